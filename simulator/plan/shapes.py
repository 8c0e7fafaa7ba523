"""Shapes that a model can have on the GPUs offered, and the kinds of clusters that they make."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from baton.core.errors import SetupError
from baton.core.messages import Role
from loadgen.expected_cache import LruPrefixCache
from loadgen.lengths import ReplayPlan
from simulator.hardware import Node, find_gpu
from simulator.models import ModelShape
from simulator.plan.bounds import ROUNDING, served_alone, work_needs
from simulator.plan.clusters import ClusterKind, ReplicaShape
from simulator.plan.phases import PhaseRequest, PhaseWorker, decode_tpots, prefill_ttfts, rate_max
from simulator.plan.region import REPLICAS_MAX

GPUS_PER_NODE = 8
"""GPUs of one node; tensor parallelism stays within it."""
BLOCKS_MIN = 16
"""KV blocks that the simulator demands of a worker."""


@dataclass(frozen=True, slots=True)
class PlanObjectives:
    ttft_s: float
    tpot_s: float
    attain: float
    """Share of requests that must meet both."""


@dataclass(frozen=True, slots=True)
class EngineSize:
    chunk_tokens: int
    batch_max: int


def parse_prices(offers: Sequence[str]) -> dict[str, float]:
    """Parse GPU=DOLLARS_PER_HOUR offers, every GPU once. Raises SetupError."""
    prices: dict[str, float] = {}
    for offer in offers:
        name, _, text = offer.partition("=")
        try:
            price = float(text)
        except ValueError:
            raise SetupError(f"--gpu {offer}: give a GPU and its price per hour, such as h100=2.99") from None
        if not 0 < price < math.inf:
            raise SetupError(
                f"--gpu {offer}: the price per hour must be a number above 0; for GPUs of your own give what "
                "an hour of one costs you, or 1 for the smallest number of them"
            )
        gpu = find_gpu(name.strip()).name
        if gpu in prices:
            raise SetupError(f"--gpu {offer}: {gpu} is offered at {prices[gpu]:g} already; give one price")
        prices[gpu] = price
    if not prices:
        raise SetupError("offer at least one GPU with its price per hour, such as --gpu h100=2.99")
    return prices


def shapes(
    model: ModelShape,
    prices: Mapping[str, float],
    *,
    tensors: Sequence[int],
    pipelines: Sequence[int],
    weight_bytes: float,
    block_tokens: int,
) -> list[ReplicaShape]:
    """Return the shapes in which the model fits, with room for `BLOCKS_MIN` KV blocks. Raises SetupError when
    there is none."""
    found: list[ReplicaShape] = []
    reason = ""
    for name, price in prices.items():
        for tensor in (t for t in tensors if model.heads % t == 0 and t <= GPUS_PER_NODE):
            for pipeline in (p for p in pipelines if p <= model.layers):
                node = Node(model, find_gpu(name), tensor, pipeline, weight_bytes)
                try:
                    blocks = int(node.kv_pool_bytes() / node.kv_bytes_per_token / block_tokens)
                except SetupError as error:
                    reason = str(error)
                    continue
                if blocks < BLOCKS_MIN:
                    reason = f"{node.gpu_count} × {name} hold {blocks} KV blocks of {block_tokens} tokens"
                    continue
                found.append(ReplicaShape(node, price))
    if not found:
        raise SetupError(f"{model.name} fits in none of the shapes: {reason or 'no such widths'}")
    return found


def worker_of(shape: ReplicaShape, role: Role, size: EngineSize) -> PhaseWorker:
    node = shape.node
    return PhaseWorker(
        node.costs(role, chunk_tokens=size.chunk_tokens),
        pool_tokens=int(node.kv_pool_bytes() / node.kv_bytes_per_token),
        chunk_tokens=size.chunk_tokens,
        batch_max=size.batch_max,
    )


def requests_of(plan: ReplayPlan, *, factor: float, pool_tokens: int | None) -> list[PhaseRequest]:
    """Return the plan's requests at `factor` times its rate, with what an LRU pool of that size would have
    cached; None means one without bound."""
    block_tokens = float(plan.block_tokens)
    blocks = None if pool_tokens is None or not block_tokens else max(1, int(pool_tokens / block_tokens))
    cache = LruPrefixCache(blocks)
    found: list[PhaseRequest] = []
    for request in plan.requests:
        hits = cache.hit_then_insert(request.hash_ids) if request.hash_ids else 0
        cached = min(int(hits * block_tokens), request.input_tokens - 1)
        found.append(PhaseRequest(request.at_s / factor, request.input_tokens, cached, request.output_tokens))
    return found


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The load and the objectives of a planned cluster."""

    plan: ReplayPlan
    factor: float
    """Multiple of the plan's own rate."""
    rate: float
    """Requests per second at that factor."""
    objectives: PlanObjectives
    size: EngineSize


def kinds(
    load: PlannedLoad, listed: Sequence[ReplicaShape], *, on_done: Callable[[], None] = lambda: None
) -> list[ClusterKind]:
    """Return every pair of shapes, and every shape for both phases, that can serve the load at all."""
    rates: dict[tuple[Role, str], float] = {}
    for shape in listed:
        for role, rate in _rates_alone(load, shape).items():
            rates[role, shape.name] = rate
        on_done()
    asked = requests_of(load.plan, factor=load.factor, pool_tokens=None)
    pairs = [((Role.PREFILL, p), (Role.DECODE, d)) for p in listed for d in listed]
    alone = [((Role.AGGREGATED, shape),) for shape in listed]
    found = (_kind(load, asked, rates, named) for named in (*pairs, *alone))
    return [kind for kind in found if kind is not None]


def _kind(
    load: PlannedLoad,
    asked: Sequence[PhaseRequest],
    rates: Mapping[tuple[Role, str], float],
    named: tuple[tuple[Role, ReplicaShape], ...],
) -> ClusterKind | None:
    wanted = load.objectives
    workers = [worker_of(shape, role, load.size) for role, shape in named]
    goal = math.ceil(wanted.attain * len(asked) - ROUNDING)
    if served_alone(asked, workers, ttft_s=wanted.ttft_s, tpot_s=wanted.tpot_s) < goal:
        return None
    needs = work_needs(asked, workers, goal=goal, ttft_s=wanted.ttft_s, tpot_s=wanted.tpot_s)
    estimate: list[int] = []
    for role, shape in named:
        rate = rates[role, shape.name]
        estimate.append(min(REPLICAS_MAX // len(named), math.ceil(load.rate / rate)) if rate > 0 else 1)
    kind = ClusterKind(
        named, tuple(estimate), needs, any(rates[role, shape.name] <= 0 for role, shape in named)
    )
    short = max((1 / sum(g / n for g, n in zip(estimate, each, strict=True)) for each in needs), default=1.0)
    return replace(kind, estimate=tuple(math.ceil(g * max(1.0, short)) for g in estimate))


def is_slower(slow: ClusterKind, fast: ClusterKind) -> bool:
    """Return whether the roles are the same, and in each the worker of `slow` is no better than that of
    `fast` in anything."""
    if [role for role, _ in slow.shapes] != [role for role, _ in fast.shapes]:
        return False
    return all(
        all(one >= other for one, other in zip(_drags(role, mine), _drags(role, theirs), strict=True))
        for (role, mine), (_, theirs) in zip(slow.shapes, fast.shapes, strict=True)
    )


@cache
def _drags(role: Role, shape: ReplicaShape) -> tuple[float, ...]:
    """Return figures that are worse the larger they are."""
    costs, node = shape.node.costs(role), shape.node
    return (
        *(costs.base_s, costs.prompt_token_s, costs.decode_s, costs.context_token_s, costs.pair_s),
        costs.decode_s + costs.few_decode_s,
        *(-node.kv_pool_bytes(), -node.transfer_bytes_s),
    )


def _rates_alone(load: PlannedLoad, shape: ReplicaShape) -> dict[Role, float]:
    """Return what one replica takes by its phase alone, in requests per second; 0 when no rate is low
    enough."""
    prefill, decode = (worker_of(shape, role, load.size) for role in (Role.PREFILL, Role.DECODE))
    asked = requests_of(load.plan, factor=load.factor, pool_tokens=prefill.pool_tokens)
    wanted = load.objectives

    def ttft_met(stretch: float) -> float:
        return _share(prefill_ttfts(asked, prefill, stretch=stretch), wanted.ttft_s)

    def tpot_met(stretch: float) -> float:
        return _share(decode_tpots(asked, decode, stretch=stretch), wanted.tpot_s)

    rates = {
        role: rate_max(met, mean_rate=load.rate, attain=wanted.attain)
        for role, met in ((Role.PREFILL, ttft_met), (Role.DECODE, tpot_met))
    }
    # Its time is split between the two, as far as each alone would fill it.
    aggregated = 1 / sum(1 / rate for rate in rates.values()) if min(rates.values()) > 0 else 0.0
    return {**rates, Role.AGGREGATED: aggregated}


def _share(seconds: Sequence[float], objective_s: float) -> float:
    if not seconds:
        return 1.0
    return sum(s <= objective_s for s in seconds) / len(seconds)
