"""Predicted times of workers of two ranks beside measured ones.

There are two predictions: the step-time model that a worker of that shape learns when it times itself, and
what `baton simulate` makes of the costs of one rank on one core (`simulator.divided`).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from baton.core.costs import StepCosts
from baton.core.messages import Role
from baton.core.shape import Shape
from benchmarks.parallel.links import LinkResult, SumLatency
from benchmarks.parallel.measure import ModelProcess, ModelSizes, loaded
from benchmarks.parallel.model_requests import Launch
from benchmarks.parallel.step_profile import MODEL
from engine.model_files.read_spec import load_spec
from simulator.divided import MeasuredRank, divided_costs

SHAPES = ("1", "tp2", "pp2")
DTYPE, ELEMENT_BYTES = "bf16", 2


class PredictedTime(msgspec.Struct, frozen=True):
    shape: str
    work: str
    case: str
    measured_s: list[float]
    """Seconds of each round."""
    step_time_s: float
    """The step-time model of the worker itself predicts so many seconds."""
    simulated_s: float
    """`baton simulate` predicts so many seconds from the costs of one rank."""

    def error(self, predicted_s: float) -> float:
        """Return (predicted - measured) / measured, for the round with the shortest time: other work on the
        machine makes times longer, and disturbs the timing of the prediction in other minutes."""
        return predicted_s / min(self.measured_s) - 1.0


class PredictionResult(msgspec.Struct, frozen=True):
    one_rank: MeasuredRank
    predictions: list[PredictedTime]


def measure(
    folder: Path,
    sizes: ModelSizes,
    links: LinkResult,
    cores: Sequence[int],
    *,
    progress: Callable[[str], None],
) -> PredictionResult:
    """Raises SetupError."""
    progress(f"predictions for {', '.join(SHAPES)}: {folder.name}")
    with ExitStack() as stack:
        workers = {
            shape: stack.enter_context(
                loaded(
                    Launch(str(folder), shape, 1, sizes.kv_tokens),
                    cores if shape != "1" else cores[:1],
                )
            )
            for shape in SHAPES
        }
        learnt = {shape: worker.self_timed(sizes.chunk_tokens) for shape, worker in workers.items()}
        rank = _measured_rank(folder, learnt["1"], workers["1"], sizes, links)
        measured = _rounds(workers, sizes)
    predictions = [
        PredictedTime(
            shape,
            *_name(role, size, sizes),
            times,
            _predicted_s(learnt[shape], role, size, sizes),
            _predicted_s(divided_costs(rank, Shape.parse(shape), role), role, size, sizes),
        )
        for (shape, role, size), times in measured.items()
    ]
    return PredictionResult(rank, predictions)


def _cases(sizes: ModelSizes) -> list[tuple[Role, int]]:
    """(PREFILL, tokens) and (DECODE, sequences)."""
    prompts = sorted({*sizes.prefill_tokens, sizes.long_prompt_tokens})
    return [(Role.PREFILL, n) for n in prompts] + [(Role.DECODE, n) for n in sizes.batches]


def _name(role: Role, size: int, sizes: ModelSizes) -> tuple[str, str]:
    if role is Role.PREFILL:
        return "prefill", f"{size} tokens"
    return "decode", f"{size} at {sizes.context_tokens}"


def _rounds(workers: dict[str, ModelProcess], sizes: ModelSizes) -> dict[tuple[str, Role, int], list[float]]:
    measured: dict[tuple[str, Role, int], list[float]] = {}
    for number in range(1 + sizes.rounds):
        for shape, worker in workers.items():
            for role, size in _cases(sizes):
                if role is Role.PREFILL:
                    seconds = worker.scheduled_prefill(size, sizes.chunk_tokens)
                else:
                    seconds = worker.decode(size, sizes.context_tokens, sizes.steps)
                if number:  # the first round does not count
                    measured.setdefault((shape, role, size), []).append(seconds)
    return measured


def _predicted_s(costs: StepCosts, role: Role, size: int, sizes: ModelSizes) -> float:
    if role is Role.PREFILL:
        return costs.prompt_s(0, size, chunk_tokens=sizes.chunk_tokens)
    return costs.step_s(decodes=size, context_tokens=size * sizes.context_tokens)


def _measured_rank(
    folder: Path, costs: StepCosts, worker: ModelProcess, sizes: ModelSizes, links: LinkResult
) -> MeasuredRank:
    spec = load_spec(folder)
    spent = worker.profile(1, sizes.context_tokens)
    sums = sorted((one for one in links.sums if one.dtype == DTYPE), key=lambda one: one.size_bytes)
    small, large = sums[0], sums[-1]
    byte_s = _byte_s(small, large)
    return MeasuredRank(
        costs=costs,
        fixed_s=sum(seconds for part, seconds in spent.items() if part != MODEL),
        sum_s=max(0.0, small.all_reduce_s - small.size_bytes * byte_s),
        sum_byte_s=byte_s,
        layers=spec.layer_count,
        hidden=spec.hidden_size,
        element_bytes=ELEMENT_BYTES,
    )


def _byte_s(small: SumLatency, large: SumLatency) -> float:
    return max(0.0, (large.all_reduce_s - small.all_reduce_s) / (large.size_bytes - small.size_bytes))
