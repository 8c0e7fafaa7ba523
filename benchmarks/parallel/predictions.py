"""Predicted times of workers of two ranks beside measured ones.

There are two predictions: the step-time model that a worker of that shape learns when it times itself, and
what `baton simulate` makes of the costs of one rank on one core, beside another one (`simulator.divided`).
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec

from baton.core.costs import StepCosts, median_costs
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
    step_time_s: list[float]
    """In each round, what the step-time model of the worker itself predicts."""
    simulated_s: list[float]
    """In each round, what `baton simulate` predicts from the costs of one rank."""

    def error(self, predicted_s: list[float]) -> float:
        """Return (predicted - measured) / measured: the median over the rounds. Both times of a round are of
        the same minute."""
        pairs = zip(predicted_s, self.measured_s, strict=True)
        return statistics.median(predicted / measured for predicted, measured in pairs) - 1.0


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
        beside = stack.enter_context(loaded(Launch(str(folder), "1", 1, sizes.kv_tokens), cores[1:2]))
        at_once = stack.enter_context(ThreadPoolExecutor(max_workers=1))

        def both_timed(*, records: bool) -> StepCosts:
            other = at_once.submit(beside.self_timed, sizes.chunk_tokens, records=records)
            costs = workers["1"].self_timed(sizes.chunk_tokens, records=records)
            other.result()
            return costs

        def measured_rank() -> MeasuredRank:
            costs = workers["1"].self_timed(sizes.chunk_tokens)
            shared, unrecorded = both_timed(records=True), both_timed(records=False)
            return _measured_rank(folder, (costs, shared, unrecorded), workers["1"], sizes, links)

        found: dict[tuple[str, Role, int], PredictedTime] = {}
        ranks: list[MeasuredRank] = []
        for number in range(1 + sizes.rounds):
            progress(f"round {number} of {sizes.rounds}")
            for shape, worker in workers.items():
                # Predictions are made before and after, since a machine's speed changes within a minute.
                rank_before, before = measured_rank(), worker.self_timed(sizes.chunk_tokens)
                measured = _measured(worker, sizes)
                rank_after, after = measured_rank(), worker.self_timed(sizes.chunk_tokens)
                if number == 0:
                    continue  # the first round does not count
                rank, learnt = _median_rank([rank_before, rank_after]), median_costs([before, after])
                assert learnt is not None, "there are two"
                ranks.append(rank)
                for (role, size), seconds in measured.items():
                    name = _name(role, size, sizes)
                    one = found.setdefault((shape, role, size), PredictedTime(shape, *name, [], [], []))
                    one.measured_s.append(seconds)
                    one.step_time_s.append(_predicted_s(learnt, role, size, sizes))
                    divided = divided_costs(rank, Shape.parse(shape), role)
                    one.simulated_s.append(_predicted_s(divided, role, size, sizes))
    return PredictionResult(_median_rank(ranks), list(found.values()))


def _median_rank(ranks: Sequence[MeasuredRank]) -> MeasuredRank:
    def median(costs: Iterable[StepCosts]) -> StepCosts:
        found = median_costs(costs)
        assert found is not None, "there is one round at least"
        return found

    return msgspec.structs.replace(
        ranks[0],
        costs=median(rank.costs for rank in ranks),
        beside=median(rank.beside for rank in ranks),
        beside_unrecorded=median(rank.beside_unrecorded for rank in ranks),
        fixed_s=statistics.median(rank.fixed_s for rank in ranks),
    )


def _cases(sizes: ModelSizes) -> list[tuple[Role, int]]:
    """(PREFILL, tokens) and (DECODE, sequences)."""
    prompts = sorted({*sizes.prefill_tokens, sizes.long_prompt_tokens})
    return [(Role.PREFILL, n) for n in prompts] + [(Role.DECODE, n) for n in sizes.batches]


def _name(role: Role, size: int, sizes: ModelSizes) -> tuple[str, str]:
    if role is Role.PREFILL:
        return "prefill", f"{size} tokens"
    return "decode", f"{size} at {sizes.context_tokens}"


def _measured(worker: ModelProcess, sizes: ModelSizes) -> dict[tuple[Role, int], float]:
    measured: dict[tuple[Role, int], float] = {}
    for role, size in _cases(sizes):
        if role is Role.PREFILL:
            seconds = worker.scheduled_prefill(size, sizes.chunk_tokens)
        else:
            seconds = worker.decode(size, sizes.context_tokens, sizes.steps)
        measured[role, size] = seconds
    return measured


def _predicted_s(costs: StepCosts, role: Role, size: int, sizes: ModelSizes) -> float:
    if role is Role.PREFILL:
        return costs.prompt_s(0, size, chunk_tokens=sizes.chunk_tokens)
    return costs.step_s(decodes=size, context_tokens=size * sizes.context_tokens)


def _measured_rank(
    folder: Path,
    timed: tuple[StepCosts, StepCosts, StepCosts],
    worker: ModelProcess,
    sizes: ModelSizes,
    links: LinkResult,
) -> MeasuredRank:
    """`timed` is of the rank alone, beside another, and beside another with nothing recorded."""
    spec = load_spec(folder)
    costs, beside, unrecorded = timed
    spent = worker.profile(1, sizes.context_tokens)
    sums = sorted((one for one in links.sums if one.dtype == DTYPE), key=lambda one: one.size_bytes)
    small, large = sums[0], sums[-1]
    byte_s = _byte_s(small, large)
    return MeasuredRank(
        costs=costs,
        beside=beside,
        beside_unrecorded=unrecorded,
        fixed_s=sum(seconds for part, seconds in spent.items() if part != MODEL),
        sum_s=max(0.0, small.all_reduce_s - small.size_bytes * byte_s),
        sum_byte_s=byte_s,
        layers=spec.layer_count,
        hidden=spec.hidden_size,
        element_bytes=ELEMENT_BYTES,
    )


def _byte_s(small: SumLatency, large: SumLatency) -> float:
    return max(0.0, (large.all_reduce_s - small.all_reduce_s) / (large.size_bytes - small.size_bytes))
