"""Fast models of how much one worker of a shape can take, each phase on its own: a queue of prompts and a
running batch, over the trace's own lengths and arrivals.

They leave out what only a cluster has (placement, hand-over, who waits for whom); `verify` looks at that.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.costs import StepCosts

RATE_PRECISION = 0.02
RATE_MAX = 1e6


class PhaseRequest(NamedTuple):
    """One request, as one worker sees it."""

    at_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PhaseWorker:
    """Costs and room of one replica."""

    costs: StepCosts
    pool_tokens: int
    chunk_tokens: int
    batch_max: int


def prefill_ttfts(requests: Sequence[PhaseRequest], worker: PhaseWorker, *, stretch: float) -> list[float]:
    """Return the TTFT in seconds of each request at one prefill worker, first come first served, with
    arrivals `stretch` times as far apart."""
    free_s = 0.0
    ttfts: list[float] = []
    for one in requests:
        arrives_s = one.at_s * stretch
        start_s = max(free_s, arrives_s)
        free_s = start_s + worker.costs.prompt_s(
            one.cached_tokens, one.input_tokens, chunk_tokens=worker.chunk_tokens
        )
        ttfts.append(free_s - arrives_s)
    return ttfts


class _PhaseBatch:
    """Sequences that decode together. Each gains one token per step, so all of them follow one count."""

    def __init__(self, worker: PhaseWorker) -> None:
        self._costs, self._worker = worker.costs, worker
        self._tokens = 0.0
        """Tokens that a sequence which was here from the start would have by now."""
        self._ends: list[tuple[float, int, float, int, int]] = []
        """Heap of (count at the end, number, joined, output tokens, positions when it joined)."""
        self._context = 0.0
        self._reserved = 0
        self._number = 0

    @property
    def _step_s(self) -> float:
        return self._costs.step_s(decodes=len(self._ends), context_tokens=self._context)

    def fits(self, one: PhaseRequest) -> bool:
        held = one.input_tokens + one.output_tokens
        has_room = (
            self._reserved + held <= self._worker.pool_tokens and len(self._ends) < self._worker.batch_max
        )
        return has_room or not self._ends

    def join(self, one: PhaseRequest, now_s: float) -> None:
        tokens = max(1, one.output_tokens - 1)
        self._number += 1
        entry = (self._tokens + tokens, self._number, now_s, tokens, one.input_tokens)
        heapq.heappush(self._ends, entry)
        self._context += one.input_tokens
        self._reserved += one.input_tokens + one.output_tokens

    def run(self, now_s: float, until_s: float) -> tuple[float, float | None]:
        """Go on up to `until_s` or to the next end; return the time then, and the TPOT of the sequence that
        ended."""
        if not self._ends:
            return until_s, None
        count, _, joined_s, tokens, positions = self._ends[0]
        # Contexts grow while it runs: the mean of both ends, to first order.
        left = count - self._tokens
        step_s = self._step_s + self._costs.context_token_s * len(self._ends) * left / 2
        if now_s + left * step_s > until_s:
            gained = (until_s - now_s) / step_s
            self._gain(gained)
            return until_s, None
        heapq.heappop(self._ends)
        ends_s = now_s + left * step_s
        self._tokens, self._context = (
            count,
            self._context + left * len(self._ends) - positions - tokens + left,
        )
        self._context = max(self._context, 0.0)
        self._reserved -= positions + tokens + 1
        return ends_s, (ends_s - joined_s) / tokens

    def _gain(self, tokens: float) -> None:
        self._tokens += tokens
        self._context += tokens * len(self._ends)


def decode_tpots(requests: Sequence[PhaseRequest], worker: PhaseWorker, *, stretch: float) -> list[float]:
    """Return the TPOT in seconds of each request with more than one token at one decode worker, waiting for
    room included, with arrivals `stretch` times as far apart."""
    batch, waiting = _PhaseBatch(worker), deque[tuple[float, PhaseRequest]]()
    now_s, tpots = 0.0, list[float]()

    def advance(until_s: float) -> None:
        nonlocal now_s
        while now_s < until_s:
            now_s, tpot_s = batch.run(now_s, until_s)
            if tpot_s is not None:
                tpots.append(tpot_s)
                admit()

    def admit() -> None:
        while waiting and batch.fits(waiting[0][1]):
            came_s, one = waiting.popleft()
            batch.join(one, came_s)

    for one in requests:
        if one.output_tokens < 2:
            continue
        advance(one.at_s * stretch)
        now_s = max(now_s, one.at_s * stretch)
        waiting.append((now_s, one))
        admit()
    expected = sum(one.output_tokens >= 2 for one in requests)
    horizon_s = 1.0
    while len(tpots) < expected:
        horizon_s *= 2
        advance(now_s + horizon_s)
    return tpots


def rate_max(share_met: Callable[[float], float], *, mean_rate: float, attain: float) -> float:
    """Return the highest rate (requests per second) at which `share_met(stretch)` is at least `attain`, to
    `RATE_PRECISION`; 0 when no rate is low enough. `mean_rate` is that of stretch 1."""
    rate = mean_rate
    if share_met(mean_rate / rate) >= attain:
        low = rate
        while low < RATE_MAX and share_met(mean_rate / (2 * low)) >= attain:
            low *= 2
        high = 2 * low
    else:
        high = rate
        while high > mean_rate / 4096 and share_met(mean_rate / (high / 2)) < attain:
            high /= 2
        low = high / 2
        if share_met(mean_rate / low) < attain:
            return 0.0
    while high / low > 1 + RATE_PRECISION:
        middle = (low * high) ** 0.5
        if share_met(mean_rate / middle) >= attain:
            low = middle
        else:
            high = middle
    return low
