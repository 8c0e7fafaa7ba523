"""Attention against its definition."""

import pytest
import torch

from baton.core.geometry import KVGeometry
from engine.kernels.interface import AttentionSpec
from engine.kernels.triton import attention_plan
from engine.kernels.triton.device import DeviceFacts
from engine.kernels.triton.kernels import TritonKernels

from .cases import attention_by_definition, make_layout, make_pool

GQA = KVGeometry(2, 2, 16, 8, "float32")
DECODES = [(0, 1), (7, 1), (40, 1), (300, 1)]
MIXED = [(5, 1), (130, 1), (0, 3), (21, 4), (0, 40), (70, 33)]
FACTS = DeviceFacts(capability=90, sm_count=4, shared_bytes=227 * 1024)


def check(geometry, sizes, *, group=3, tolerance=2e-5, facts=FACTS, **spec):
    pool = make_pool(geometry)
    layout = make_layout(geometry, sizes)
    spec = AttentionSpec(layer=geometry.layer_count - 1, scale=geometry.head_dim**-0.5, **spec)
    random = torch.Generator().manual_seed(1)
    heads = geometry.kv_head_count * group
    q = torch.randn(layout.token_count, heads, geometry.head_dim, generator=random)
    q = q.to(getattr(torch, geometry.dtype))
    kernels = TritonKernels(pool, facts)
    plan = kernels.plan(layout, {}, windows=frozenset({spec.window}))
    out = kernels.attention(q, spec=spec, plan=plan)
    expected = attention_by_definition(q, pool, layout, spec)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    return plan


@pytest.mark.parametrize("window", [0, 1, 9, 64])
def test_mixed_batch(window) -> None:
    check(GQA, MIXED, window=window)


def test_keys_of_decodes_are_split_and_merged() -> None:
    plan = check(GQA, DECODES, facts=FACTS)
    ((launch,),) = plan.reads.values()
    assert launch.slot_count > 1


def test_softcap_and_sinks() -> None:
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0, 8.0, -8.0])
    check(GQA, DECODES, softcap=5.0, sinks=sinks)
    check(GQA, [(200, 1), (50, 40)], softcap=2.0, sinks=sinks, window=50)


@pytest.mark.parametrize(("dim", "block", "group"), [(24, 5, 1), (16, 32, 7), (80, 16, 2)])
def test_odd_shapes(dim, block, group) -> None:
    check(KVGeometry(1, 1, dim, block, "float32"), [(33, 1), (20, 25)], group=group)


@pytest.mark.parametrize("sizes", [[(0, 1), (170, 1)], [(3, 20)]])
def test_latent(sizes) -> None:
    latent = KVGeometry(2, 1, 40, 16, "float32", planes=1, value_dim=32)
    check(latent, sizes, group=16)


def test_latent_heads_fill_several_tiles() -> None:
    latent = KVGeometry(1, 1, 40, 16, "float32", planes=1, value_dim=32)
    check(latent, [(35, 1), (3, 4)], group=48)


def test_int8() -> None:
    check(KVGeometry(2, 2, 16, 8, "float32", kv_dtype="int8"), MIXED[1:5])
    latent = KVGeometry(1, 1, 40, 16, "float32", planes=1, value_dim=32, kv_dtype="int8")
    check(latent, [(35, 1), (3, 9)], group=16)


@pytest.mark.parametrize("window", [0, 70])
def test_bfloat16_with_the_tiles_of_production(window) -> None:
    """Many tokens: a loop without a mask in the middle."""
    geometry = KVGeometry(1, 1, 16, 32, "bfloat16")
    check(geometry, [(200, 100), (300, 5)], group=4, tolerance=1e-2, window=window)


def test_chunks_are_split_where_the_device_would_idle(monkeypatch) -> None:
    monkeypatch.setitem(attention_plan.SPLIT_KEYS_MIN, "chunk", 32)
    monkeypatch.setitem(attention_plan.SPLIT_KEYS_MIN, "few", 32)
    facts = DeviceFacts(capability=90, sm_count=64, shared_bytes=227 * 1024)
    plan = check(GQA, [(150, 40), (90, 3)], window=100, facts=facts)
    (launches,) = plan.reads.values()
    assert all(launch.slot_count for launch in launches)


@pytest.mark.parametrize("window", [0, 20])
def test_a_padded_plan_computes_the_same_and_nothing_for_the_padding(window) -> None:
    """A captured step uses plans so: one plan's numbers in another's memory."""
    pool, layout = make_pool(GQA), make_layout(GQA, DECODES)
    kernels, spec, windows = TritonKernels(pool, FACTS), AttentionSpec(0, 0.25, window), frozenset({window})
    assert kernels.host_plan(layout, windows=windows, sequences=6) is None
    q = torch.randn(6, 6, GQA.head_dim)
    expected = kernels.attention(q[:4].clone(), spec=spec, plan=kernels.plan(layout, {}, windows=windows))
    recorded = kernels.host_plan(make_layout(GQA, [(90, 1)], seed=4), windows=windows, sequences=6)
    replayed = kernels.host_plan(layout, windows=windows, sequences=6)
    static = torch.full((len(replayed.ints) + 100,), -7, dtype=torch.int32)
    plan = recorded.on_device(static, {})
    static[: len(replayed.ints)] = torch.from_numpy(replayed.ints)
    assert plan.slots.tolist()[4:] == [-1, -1]
    out = kernels.attention(q, spec=spec, plan=plan)
    torch.testing.assert_close(out[:4], expected)
    assert not out[4:].any()
