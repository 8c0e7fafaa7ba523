"""Which shapes a model can have on the GPUs offered, and what one replica of each takes in each role."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.sim.hardware import ModelShape, Node, find_gpu
from baton.sim.plan.phases import Demand, Worker, decode_tpots, prefill_ttfts, rate_max
from baton.sim.plan.search import Option, Shape
from loadgen.expected_cache import LruPrefixCache
from loadgen.lengths import Plan

GPUS_PER_NODE = 8
"""Tensor parallelism stays within one."""


@dataclass(frozen=True, slots=True)
class Objectives:
    ttft_s: float
    tpot_s: float
    attain: float
    """Share of requests that must meet both."""


@dataclass(frozen=True, slots=True)
class EngineSize:
    chunk_tokens: int
    batch_max: int


def parse_prices(offers: Sequence[str]) -> dict[str, float]:
    """GPU=DOLLARS_PER_HOUR each. Raises SetupError."""
    prices: dict[str, float] = {}
    for offer in offers:
        name, _, price = offer.partition("=")
        try:
            prices[find_gpu(name.strip()).name] = float(price)
        except ValueError:
            raise SetupError(f"--gpu {offer}: give a GPU and its price per hour, such as h100=2.99") from None
    if not prices or min(prices.values()) <= 0:
        raise SetupError("give at least one GPU with a price above 0, such as --gpu h100=2.99")
    return prices


def shapes(
    model: ModelShape,
    prices: Mapping[str, float],
    *,
    tensors: Sequence[int],
    pipelines: Sequence[int],
    weight_bytes: float,
) -> list[Shape]:
    """Those in which the model fits. Raises SetupError when there is none."""
    found: list[Shape] = []
    reason = ""
    for name, price in prices.items():
        for tensor in (t for t in tensors if model.heads % t == 0 and t <= GPUS_PER_NODE):
            for pipeline in (p for p in pipelines if p <= model.layers):
                node = Node(model, find_gpu(name), tensor, pipeline, weight_bytes)
                try:
                    node.kv_pool_bytes()
                except SetupError as error:
                    reason = str(error)
                    continue
                found.append(Shape(node, price))
    if not found:
        raise SetupError(f"{model.name} fits in none of the shapes: {reason or 'no such widths'}")
    return found


def worker_of(shape: Shape, role: Role, size: EngineSize) -> Worker:
    node = shape.node
    return Worker(
        node.costs(role, chunk_tokens=size.chunk_tokens),
        pool_tokens=int(node.kv_pool_bytes() / node.kv_bytes_per_token),
        chunk_tokens=size.chunk_tokens,
        batch_max=size.batch_max,
    )


def demands(plan: Plan, *, pool_tokens: int) -> list[Demand]:
    """The plan as one worker sees it, with what an LRU pool of its own would have cached."""
    block_tokens = float(plan.block_tokens)
    cache = LruPrefixCache(max(1, int(pool_tokens / block_tokens)) if block_tokens else 1)
    found: list[Demand] = []
    for request in plan.requests:
        hits = cache.hit_then_insert(request.hash_ids) if request.hash_ids else 0
        cached = min(int(hits * block_tokens), request.input_tokens - 1)
        found.append(Demand(request.at_s, request.input_tokens, cached, request.output_tokens))
    return found


def options(
    plan: Plan,
    listed: Sequence[Shape],
    objectives: Objectives,
    size: EngineSize,
    *,
    mean_rate: float,
    on_done: Callable[[], None] = lambda: None,
) -> Iterator[Option]:
    """Each shape in each role, with the rate that one replica takes by its phase alone. `mean_rate`: of the
    plan, requests per second."""
    for shape in listed:
        prefill, decode = (worker_of(shape, role, size) for role in (Role.PREFILL, Role.DECODE))
        asked = demands(plan, pool_tokens=prefill.pool_tokens)

        def ttft_met(stretch: float, worker: Worker = prefill, asked: list[Demand] = asked) -> float:
            return _share(prefill_ttfts(asked, worker, stretch=stretch), objectives.ttft_s)

        def tpot_met(stretch: float, worker: Worker = decode, asked: list[Demand] = asked) -> float:
            return _share(decode_tpots(asked, worker, stretch=stretch), objectives.tpot_s)

        rates = {
            role: rate_max(met, mean_rate=mean_rate, attain=objectives.attain)
            for role, met in ((Role.PREFILL, ttft_met), (Role.DECODE, tpot_met))
        }
        yield from (Option(shape, role, rate) for role, rate in rates.items())
        if min(rates.values()) > 0:
            # Its time is shared between the two, as far as each alone would fill it.
            yield Option(shape, Role.BOTH, 1 / sum(1 / rate for rate in rates.values()))
        on_done()


def _share(seconds: Sequence[float], objective_s: float) -> float:
    if not seconds:
        return 1.0
    return sum(s <= objective_s for s in seconds) / len(seconds)
