"""The number of replicas that a load needs, computed from the cost of steps. These are queueing
approximations that know nothing of one router's placement; tests/unit/simulator/test_autoscale.py checks them
against the fleet simulator.

Prefill is a queue of prompts with n servers: waiting follows Erlang's C formula, its mean is scaled for
service times that differ (Lee and Longton 1959; Allen and Cunneen), and its tail is exponential. Decode is a
batch whose sequences share a step: by Little's law, the number of running sequences is the token rate times
the length of the step that they cause.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt

from baton.core.costs import FEW_DECODES, StepCosts
from baton.core.demand import Traits

UTILISATION_MAX = 0.85
"""Highest utilisation of a pool whose requests have no objective that limits their wait."""
SPREAD = 1.3
"""Standard deviations of the number of sequences at a replica for which the objective must still hold."""
POOL_SHARE = 0.95
"""Part of a KV pool that may be full, since the scheduler keeps some blocks free."""
REPLICAS_MAX = 4096


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Requests that are alike."""

    weight: float
    """Requests per second, or any unit that all groups have in common."""
    service_s: float
    """Time to compute the uncached part of one request's prompt."""
    ttft_s: float
    """TTFT objective. 0: none."""


def erlang_c(servers: int, load: float) -> float:
    """Return the probability that a request must wait. `load` is in units of servers; the result is 1 when it
    reaches their number."""
    if load >= servers:
        return 1.0
    if load <= 0:
        return 0.0
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return servers * blocked / (servers - load * (1 - blocked))


def prompts_missed(prompts: Sequence[PromptGroup], *, work: float, servers: int) -> float:
    """Return the part of requests that could meet their TTFT objective on an idle cluster but will not on
    `servers` replicas under `work` seconds of prompts per second."""
    weight = sum(p.weight for p in prompts)
    if not weight or work <= 0:
        return 0.0
    if work >= servers:
        return 1.0
    mean_s = sum(p.weight * p.service_s for p in prompts) / weight
    square = sum(p.weight * p.service_s**2 for p in prompts) / weight
    variation = max(0.0, square / mean_s**2 - 1) if mean_s else 0.0
    waits = erlang_c(servers, work)
    # The mean wait of requests that wait is that of M/M/n, scaled by (1 + C²)/2.
    wait_s = mean_s * (1 + variation) / 2 / (servers - work)
    able = [p for p in prompts if not p.ttft_s or p.service_s < p.ttft_s]
    judged = sum(p.weight for p in able if p.ttft_s)
    if not judged:
        return 0.0 if work <= UTILISATION_MAX * servers else 1.0
    missed = sum(p.weight * waits * exp(-(p.ttft_s - p.service_s) / wait_s) for p in able if p.ttft_s)
    return missed / judged


def prefill_needed(prompts: Sequence[PromptGroup], *, work: float, missed_max: float) -> int:
    """Return the fewest replicas that suffice: 0 for no work, at most `REPLICAS_MAX`."""
    if work <= 0:
        return 0
    if not work < REPLICAS_MAX:
        return REPLICAS_MAX
    return _fewest(
        lambda n: prompts_missed(prompts, work=work, servers=n) <= missed_max, least=max(1, int(work))
    )


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """The load on a decode pool."""

    tokens_per_s: float
    context_tokens: float
    """Mean number of positions of a decoding sequence."""
    tpot_s: float
    """TPOT objective. 0: none."""


def batch_of(load: DecodeLoad, traits: Traits, *, replicas: float, slowed: float = 1.0) -> float:
    """Return the number of sequences in the batch of each of `replicas`; infinite when tokens are asked for
    faster than steps can produce them. `slowed` is the factor by which prompts lengthen steps."""
    rate, batch = load.tokens_per_s / replicas * slowed, inf
    for base_s, each_s, batch_max in _lines(traits.costs, load.context_tokens):
        batch = rate * base_s / (1 - rate * each_s) if rate * each_s < 1 else inf
        if batch <= batch_max:
            break
    return max(rate * traits.costs.floor_s, batch)


def _lines(costs: StepCosts, context_tokens: float) -> tuple[tuple[float, float, float], ...]:
    """Return (base, cost of each sequence, largest batch) of the two lines that a step's time follows."""
    each_s = costs.decode_s + costs.context_token_s * context_tokens
    few_s = costs.few_decode_s
    return (costs.base_s, each_s + few_s, FEW_DECODES), (costs.base_s + few_s * FEW_DECODES, each_s, inf)


def holds(load: DecodeLoad, traits: Traits, *, batch: float, replicas: int, slowed: float = 1.0) -> bool:
    """Return whether a replica with a mean of `batch` sequences keeps to the objective, the largest batch and
    the KV pool."""
    if batch == inf:
        return False
    # The number of sequences in the pool varies as a Poisson number does, and placement spreads them.
    crowd = batch + SPREAD * sqrt(batch / replicas)
    if crowd > traits.batch_max or crowd * load.context_tokens > POOL_SHARE * traits.pool_tokens:
        return batch <= 1 and load.context_tokens <= traits.pool_tokens
    step_s = slowed * traits.costs.step_s(decodes=crowd, context_tokens=crowd * load.context_tokens)
    return not load.tpot_s or step_s <= load.tpot_s


def decode_needed(load: DecodeLoad, traits: Traits) -> int:
    """Return the fewest replicas that suffice; 0 for no tokens. Where no number meets the objective, return
    as many as keep to the KV pool and `UTILISATION_MAX`."""
    if load.tokens_per_s <= 0:
        return 0
    able = load
    if traits.costs.step_s(decodes=1, context_tokens=load.context_tokens) > load.tpot_s:
        able = DecodeLoad(load.tokens_per_s, load.context_tokens, 0.0)
    each = traits.costs.decode_s + traits.costs.context_token_s * load.context_tokens

    def suffices(replicas: int) -> bool:
        if not able.tpot_s and load.tokens_per_s * each > UTILISATION_MAX * replicas:
            return False
        return holds(able, traits, batch=batch_of(able, traits, replicas=replicas), replicas=replicas)

    return _fewest(suffices, least=1)


def largest_batch(load: DecodeLoad, traits: Traits) -> float:
    """Return the number of sequences that one replica decodes within objective, largest batch and KV pool; at
    least 1."""
    by_time = inf
    for base_s, each_s, batch_max in _lines(traits.costs, load.context_tokens):
        by_time = (load.tpot_s - base_s) / each_s if load.tpot_s and each_s else inf
        if by_time <= batch_max:
            break
    by_room = POOL_SHARE * traits.pool_tokens / max(1.0, load.context_tokens)
    return max(1.0, min(by_time, by_room, float(traits.batch_max)))


def decode_strain(load: DecodeLoad, traits: Traits, *, replicas: int) -> float:
    """Return how near a crowded batch comes to its limits: 1 at the limit, half of that at 5 % less."""
    batch = batch_of(load, traits, replicas=replicas)
    if batch == inf:
        return inf
    crowd = batch + SPREAD * sqrt(batch / replicas)
    step_s = traits.costs.step_s(decodes=crowd, context_tokens=crowd * load.context_tokens)
    nearness = max(
        step_s / load.tpot_s if load.tpot_s else 0.0,
        crowd / traits.batch_max,
        crowd * load.context_tokens / (POOL_SHARE * traits.pool_tokens),
    )
    return max(0.0, 1 - (1 - nearness) * 10)


def aggregated_needed(
    prompts: Sequence[PromptGroup], load: DecodeLoad, traits: Traits, *, work: float, missed_max: float
) -> int:
    """Return the fewest replicas that suffice if each takes both phases: prompts make steps longer, and
    decodes take time from prompts."""
    each = traits.costs.decode_s + traits.costs.context_token_s * load.context_tokens

    def suffices(replicas: int) -> bool:
        busy, decoding = work / replicas, load.tokens_per_s * each / replicas
        if busy + decoding >= UTILISATION_MAX:
            return False
        slowed = 1 / (1 - busy)
        batch = batch_of(load, traits, replicas=replicas, slowed=slowed)
        if not holds(load, traits, batch=batch, replicas=replicas, slowed=slowed):
            return False
        longer = [PromptGroup(p.weight, p.service_s / (1 - decoding), p.ttft_s) for p in prompts]
        missed = prompts_missed(longer, work=work / (1 - decoding), servers=replicas)
        return missed <= missed_max

    if work <= 0 and load.tokens_per_s <= 0:
        return 0
    return _fewest(suffices, least=1)


def _fewest(suffices: Callable[[int], bool], *, least: int) -> int:
    """Return the smallest number that suffices. More replicas never do worse, so doubling and halving finds
    it."""
    if suffices(least):
        return least
    low, high = least, 2 * least
    while high < REPLICAS_MAX and not suffices(high):
        low, high = high, 2 * high
    high = min(high, REPLICAS_MAX)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high
