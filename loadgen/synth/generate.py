"""Makes the requests of a synthetic trace one after the other, in bounded memory. Pure and seeded.

Each request is fresh, a turn that continues an earlier one, or a branch off an earlier one. For the latter
two a lag is drawn, and one of the requests around the instant that lies so far back is taken, weighted by how
likely requests of its turn and length are to be continued. The distances of reuse are thus those of the
fitted trace in seconds; at twice the rate, twice as many other requests come between, as with twice as many
users.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

from baton.core.errors import SetupError
from loadgen.formats.base import Trace, TraceFormat, TraceRequest
from loadgen.lengths import ASSUMED_TPOT_S
from loadgen.synth.arrive import instants_s, mean_factor
from loadgen.synth.params import LengthModel, Quantiles, SynthParams

NEIGHBOURS = 24
"""Candidates around the instant that a lag points to."""
STEPS_MAX = 400
FORGET_AT_ONCE = 1024
REQUESTS_MAX = 1_000_000_000
"""Maximum requests of a trace with a given duration, so that a typing error does not fill a disk."""
_ROOT = 2
"""Minimum blocks that a branch shares; with one, it would share only a head."""


@dataclass(slots=True)
class _Past:
    """An earlier request that others may continue."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    row: int
    session: str
    turn: int
    is_open: bool = True


class _Pair:
    """Draws (input, output) from a Gaussian copula."""

    def __init__(self, lengths: LengthModel) -> None:
        self._input, self._output = lengths.input.table(), lengths.output.table()
        self._keeps = lengths.correlation
        self._rest = math.sqrt(max(0.0, 1 - lengths.correlation**2))

    def draw(self, rng: Random) -> tuple[float, float]:
        a, b = rng.gauss(0.0, 1.0), rng.gauss(0.0, 1.0)
        return self._input.at(_normal(a)), self._output.at(_normal(self._keeps * a + self._rest * b))


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


class RequestGenerator:
    """Makes requests without end; `synthesize` and `stream` limit their number."""

    def __init__(self, params: SynthParams, *, seed: int, requests_per_s: float | None = None) -> None:
        self._params = params
        self._rng = Random(f"lengths {seed}")
        self._instants = instants_s(
            params.arrivals,
            Random(f"arrivals {seed}"),
            requests_per_s=params.arrivals.rate_per_s if requests_per_s is None else requests_per_s,
        )
        self._block = params.block_tokens
        self._next_id = 0
        self._row = 0
        self._past: list[_Past] = []
        self._gone = 0
        """Number of requests at the start of the list that are too old to continue."""
        self._fresh = _Pair(params.fresh)
        self._growth = _Pair(params.turns.growth) if params.turns else None
        self._branch = _Pair(params.branches.lengths) if params.branches else None
        self._lags = {
            kind: quantiles.table()
            for kind, quantiles in (
                ("turn", params.turns.lag_s if params.turns else None),
                ("branch", params.branches.lag_s if params.branches else None),
                ("kept", params.branches.kept if params.branches else None),
            )
            if isinstance(quantiles, Quantiles)
        }
        longest = [part.lag_s.values[-2] for part in (params.turns, params.branches) if part]
        self._keep_s = max(longest, default=0.0)
        self._heads = [(head.share, self._new_ids(head.blocks)) for head in params.heads]

    def _new_ids(self, count: int) -> tuple[int, ...]:
        first = self._next_id
        self._next_id += count
        return tuple(range(first, self._next_id))

    def __iter__(self) -> Iterator[TraceRequest]:
        for at_s in self._instants:
            self._forget(at_s - self._keep_s)
            request = self._next(at_s)
            self._row += 1
            yield request

    def _forget(self, before_s: float) -> None:
        past = self._past
        while self._gone < len(past) and past[self._gone].at_s < before_s:
            self._gone += 1
        if self._gone > FORGET_AT_ONCE and self._gone > len(past) // 2:
            del past[: self._gone]
            self._gone = 0

    def _next(self, at_s: float) -> TraceRequest:
        chance = self._rng.random()
        turns, branches = self._params.turns, self._params.branches
        if turns and chance < turns.share:
            past = self._earlier(at_s, "turn")
            if past is not None:
                return self._turn(at_s, past)
        elif branches and chance > 1 - branches.share:
            past = self._earlier(at_s, "branch")
            if past is not None:
                return self._branched(at_s, past)
        return self._new(at_s)

    def _earlier(self, at_s: float, kind: str) -> _Past | None:
        """None if the lag points to before the trace began, or no candidate is left there."""
        target_s = at_s - self._lags[kind].draw(self._rng)
        past, gone = self._past, self._gone
        if target_s < 0 or gone == len(past):
            return None
        middle = bisect_left(past, target_s, lo=gone, key=lambda p: p.at_s)
        found: list[_Past] = []
        shared = kind == "branch" or (
            self._params.turns is not None and self._rng.random() < self._params.turns.shared
        )
        for step in range(STEPS_MAX):
            place = middle + (step // 2 if step % 2 else -1 - step // 2)
            if gone <= place < len(past) and past[place].is_open != (shared and kind == "turn"):
                found.append(past[place])
                if len(found) == NEIGHBOURS:
                    break
        if not found:
            return None
        weights = [self._chance(p) if kind == "turn" else float(len(p.hash_ids) > _ROOT + 1) for p in found]
        if sum(weights) <= 0:
            return None
        return self._rng.choices(found, weights)[0]

    def _chance(self, past: _Past) -> float:
        turns = self._params.turns
        assert turns is not None
        blocks = -(-past.input_tokens // (self._block or 100))
        by_turn = turns.by_turn[min(past.turn, len(turns.by_turn) - 1)]
        return by_turn * turns.by_length[bisect_left(turns.length_blocks, blocks)]

    def _new(self, at_s: float) -> TraceRequest:
        inputs, outputs = self._fresh.draw(self._rng)
        chance, head = self._rng.random(), ()
        for share, ids in self._heads:
            if chance < share:
                head = ids
                break
            chance -= share
        return self._made(at_s, inputs, outputs, head, None)

    def _turn(self, at_s: float, past: _Past) -> TraceRequest:
        assert self._params.turns is not None
        assert self._growth is not None
        past.is_open = False
        growth, outputs = self._growth.draw(self._rng)
        if self._rng.random() < self._params.turns.repeat:
            return self._made(at_s, past.input_tokens, outputs, past.hash_ids, past)
        kept = past.hash_ids[: past.input_tokens // self._block] if self._block else ()
        return self._made(at_s, past.input_tokens + max(1.0, growth), outputs, kept, past)

    def _branched(self, at_s: float, past: _Past) -> TraceRequest:
        assert self._branch is not None
        inputs, outputs = self._branch.draw(self._rng)
        share = min(1.0, self._lags["kept"].draw(self._rng))
        blocks = len(past.hash_ids)
        kept = past.hash_ids[: min(max(_ROOT, round(share * blocks)), max(0, blocks - 1))]
        return self._made(at_s, max(inputs, len(kept) * self._block + 1), outputs, kept, None)

    def _made(
        self, at_s: float, inputs: float, outputs: float, kept: tuple[int, ...], past: _Past | None
    ) -> TraceRequest:
        input_tokens = min(max(1, round(inputs)), self._params.input_tokens_max)
        output_tokens = max(1, round(outputs))
        hash_ids: tuple[int, ...] = ()
        if self._block:
            needed = -(-input_tokens // self._block)
            hash_ids = (*kept[:needed], *self._new_ids(max(0, needed - len(kept))))
        turn = past.turn + 1 if past else 0
        session = past.session if past else str(self._row)
        think_s = None
        if past is not None:
            think_s = max(0.0, at_s - past.at_s - past.output_tokens * ASSUMED_TPOT_S)
        if self._keep_s:
            self._past.append(_Past(at_s, input_tokens, output_tokens, hash_ids, self._row, session, turn))
        return TraceRequest(
            at_s,
            input_tokens,
            output_tokens,
            hash_ids,
            row=self._row,
            session=session if self._params.turns else None,
            turn=turn,
            parent_row=past.row if past else None,
            think_s=think_s,
        )


def stream(
    params: SynthParams,
    *,
    seed: int = 0,
    requests: int | None = None,
    duration_s: float | None = None,
    requests_per_s: float | None = None,
) -> Iterator[TraceRequest]:
    """Yield this many requests, or those of this many seconds; with neither, as many as the fitted trace has.

    `requests_per_s` is the mean rate of the result, whatever part of the fitted profile it covers. Memory
    holds the requests inside the longest lag. Raises SetupError.
    """
    if requests_per_s is not None and not 0 < requests_per_s < math.inf:
        raise SetupError(f"--rate {requests_per_s:g}: must be above 0, and a number")
    if duration_s is not None and not 0 < duration_s < math.inf:
        raise SetupError(f"--duration {duration_s:g}: must be above 0, and a number of seconds")
    if requests is None and duration_s is None:
        requests = params.source.requests or 1000
    if requests_per_s is not None:
        until_s = (requests or 0) / requests_per_s if duration_s is None else duration_s
        requests_per_s *= mean_factor(params.arrivals, until_s)
    rate = params.arrivals.rate_per_s if requests_per_s is None else requests_per_s
    if (duration_s or 0.0) * rate > REQUESTS_MAX:
        raise SetupError(
            f"--duration {duration_s:g}: {rate:.3g} requests per second are more than {REQUESTS_MAX:,} in "
            "that time: make a shorter trace, or give --requests"
        )
    return _cut(RequestGenerator(params, seed=seed, requests_per_s=requests_per_s), requests, duration_s)


def _cut(made: RequestGenerator, requests: int | None, duration_s: float | None) -> Iterator[TraceRequest]:
    for request in islice(made, requests):
        if duration_s is not None and request.at_s >= duration_s:
            return
        yield request


def synthesize(
    params: SynthParams,
    *,
    seed: int = 0,
    requests: int | None = None,
    duration_s: float | None = None,
    requests_per_s: float | None = None,
) -> Trace:
    """The result of `stream` as a trace."""
    made = stream(params, seed=seed, requests=requests, duration_s=duration_s, requests_per_s=requests_per_s)
    return Trace(TraceFormat.MOONCAKE, tuple(made), block_tokens=params.block_tokens)
