"""Decode steps that are replayed, and their batch sizes. (Recording needs a device: tests/gpu.)"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.core.geometry import KVGeometry
from engine.execution.graphs import is_capturable, ladder, make_graphs, rung_of
from engine.kernels.interface import BatchLayout, Span
from engine.kv.pool import KVPool


@given(st.integers(1, 1024))
def test_every_batch_size_has_a_rung_that_wastes_little(most) -> None:
    rungs = ladder(most)
    assert list(rungs) == sorted(set(rungs))
    assert rungs[-1] == most
    assert len(rungs) <= 48
    for count in range(1, most + 1):
        rung = rung_of(rungs, count)
        assert rung is not None
        assert count <= rung < max(2 * count, count + most / 32 + 8)
    assert rung_of(rungs, most + 1) is None


def test_no_rungs_where_nothing_is_to_be_recorded() -> None:
    assert ladder(0) == ()
    assert rung_of((), 1) is None


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([Span(4, 1, (0, 1)), Span(0, 1, (2,))], True),
        ([Span(4, 1, (0, 1)), Span(0, 3, (2,))], False),
        ([Span(4, 1, (0, 1), adapter_slot=0)], False),
    ],
)
def test_only_plain_decodes_are_replayed(spans, expected) -> None:
    assert is_capturable(BatchLayout.of(spans)) is expected


def test_nothing_is_recorded_on_the_cpu() -> None:
    geometry = KVGeometry(1, 1, 8, 4, "float32")
    pool = KVPool(geometry, kv_bytes=geometry.block_bytes, device=torch.device("cpu"))
    assert make_graphs(object(), object(), pool, sequences_max=8) is None
