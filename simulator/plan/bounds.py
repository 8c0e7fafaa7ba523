"""Lower bounds of what a cluster needs: the work of a trace, were nothing ever waited for.

Every prefix that came before is taken as cached, every step as full, the goal as reached by the cheapest
requests, and any worker as free to compute any part of any request, as the router lets it. So nothing that
these bounds refuse needs to be simulated.
"""

from collections.abc import Callable, Sequence

from baton.core.costs import prompt_pairs
from simulator.plan.clusters import Needs
from simulator.plan.phases import PhaseRequest, PhaseWorker

ROUNDING = 1e-9
Cost = Callable[[PhaseRequest, PhaseWorker], float]
"""Seconds of one request at one worker."""


def served_alone(
    requests: Sequence[PhaseRequest], workers: Sequence[PhaseWorker], *, ttft_s: float, tpot_s: float
) -> int:
    """Return how many requests are in time with nobody beside them, each part at the best of the workers."""
    return sum(
        min(_prompt_s(one, w) for w in workers) <= ttft_s + ROUNDING
        and min(_alone_tpot_s(one, w) for w in workers) <= tpot_s + ROUNDING
        for one in requests
    )


def work_needs(
    requests: Sequence[PhaseRequest],
    workers: Sequence[PhaseWorker],
    *,
    goal: int,
    ttft_s: float,
    tpot_s: float,
) -> tuple[Needs, ...]:
    """Return replicas of each worker that would have to be there, were there no others, for `goal` of the
    requests to be in time: first for the prompts alone, then for prompts and answers. `requests` are in order
    of arrival."""
    begins_s = requests[0].at_s
    last_prompt_s = requests[-1].at_s + ttft_s
    last_token_s = max(one.at_s + ttft_s + tpot_s * max(0, one.output_tokens - 1) for one in requests)
    return (
        _needs(requests, workers, prompt_work_s, goal=goal, span_s=last_prompt_s - begins_s),
        _needs(requests, workers, _whole_work_s, goal=goal, span_s=last_token_s - begins_s),
    )


def _needs(
    requests: Sequence[PhaseRequest], workers: Sequence[PhaseWorker], cost: Cost, *, goal: int, span_s: float
) -> Needs:
    """Return replicas of each worker. Work is counted in seconds of the first worker; another one does none
    of the requests in less than its ratio to that."""
    first = [cost(one, workers[0]) for one in requests]
    needed = sum(sorted(first)[:goal]) / span_s
    ratios = (
        min(cost(one, worker) / there for one, there in zip(requests, first, strict=True))
        for worker in workers
    )
    return tuple(needed * ratio for ratio in ratios)


def _prompt_s(one: PhaseRequest, worker: PhaseWorker) -> float:
    return worker.costs.prompt_s(one.cached_tokens, one.input_tokens, chunk_tokens=worker.chunk_tokens)


def _alone_tpot_s(one: PhaseRequest, worker: PhaseWorker) -> float:
    if one.output_tokens < 2:
        return 0.0
    return worker.costs.step_s(decodes=1, context_tokens=one.input_tokens)


def prompt_work_s(one: PhaseRequest, worker: PhaseWorker) -> float:
    """Return the time of a prompt as its part of full steps."""
    tokens, costs = one.input_tokens - one.cached_tokens, worker.costs
    pairs_s = costs.pair_s * prompt_pairs(one.cached_tokens, one.input_tokens)
    computing_s = tokens * (costs.prompt_token_s + costs.base_s / worker.chunk_tokens) + pairs_s
    return max(tokens * costs.floor_s / worker.chunk_tokens, computing_s)


def _whole_work_s(one: PhaseRequest, worker: PhaseWorker) -> float:
    """Return the time of a prompt and its answer as their part of full steps and full batches, with contexts
    as they are at the start."""
    tokens, costs = max(0, one.output_tokens - 1), worker.costs
    batch = worker.batch_max
    each_s = costs.step_s(decodes=batch, context_tokens=batch * one.input_tokens) / batch
    return prompt_work_s(one, worker) + tokens * each_s
