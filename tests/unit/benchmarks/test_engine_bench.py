"""What `baton bench engine` measures of steps, on a tiny model."""

from pathlib import Path

import pytest

from baton.config import EngineConfig, ModelConfig
from benchmarks import limits
from benchmarks.engine import Sizes, measure
from engine.execution.tracing import SizedTrace
from tests.models import make_model

SIZES = Sizes(prefill_tokens=32, context_tokens=32, batches=(1, 4), rounds=1)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_kernels_are_counted_in_steps_that_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A Llama's recording is of all sizes; those of Gemma 2's decode steps are of one size each."""
    made = list[SizedTrace]()
    replay = SizedTrace.replay

    def noted(trace: SizedTrace, *sizes: int) -> None:
        made.append(trace)
        replay(trace, *sizes)

    monkeypatch.setattr(SizedTrace, "replay", noted)
    monkeypatch.setattr(limits, "read_bandwidth", lambda _: 1e9)
    folder = make_model(tmp_path / kind, kind)
    model = ModelConfig(path=str(folder), dtype="bfloat16")
    engine = EngineConfig(kv_bytes=2**21, block_tokens=16, threads=1)
    result = measure(model, engine, SIZES, progress=lambda _: None)
    assert made or kind != "llama"
    assert set(result.overhead_share) == set(SIZES.batches)
    assert all(0 < share < 1 for share in result.overhead_share.values())
