"""Turns a trace into a plan for one server: lengths and time are scaled, and prefix sharing is kept. Pure.

A block of the trace becomes `block * input_scale` tokens, which need not be a whole number. Block k spans the
tokens from `ceil(k * size)` to `ceil((k + 1) * size)`, the same for every request, so requests that shared k
blocks still share exactly the tokens of k blocks. If a block would become shorter than `BLOCK_TOKENS_MIN`,
runs of blocks from the start of the prompt are grouped, and sharing is kept in whole groups. Input lengths
are rounded up, so that a request keeps its number of blocks. Output lengths are rounded to the nearest
(halves to even), at least 1.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from baton.core.errors import SetupError
from loadgen.arrivals import RateShape, spread_ticks
from loadgen.disconnects import Disconnect, Disconnects
from loadgen.formats.base import TOKENS_MAX, TRACE_BLOCK_TOKENS
from loadgen.traces import Trace, TraceRequest
from loadgen.users import Users

BLOCK_TOKENS_MIN = 4
"""Smallest block that can tell 2**32 blocks apart with 1,000 token ids."""

FACTOR_MAX = 1_000_000
_FACTOR = re.compile(r"[\d._]{1,40}([eE][+-]?\d{1,3})?|\d{1,40} ?/ ?\d{1,40}")
"""The pattern is short, because a number of many digits takes long to parse."""

RATE_MAX = 1_000_000
"""Highest rate in requests per second; its inverse is the lowest."""

HASH_ID_MAX = 2**31
"""Larger hash_ids are renumbered: they are 64-bit hashes, not dense numbers."""

ASSUMED_TPOT_S = 0.02
"""Assumed seconds per answer token, for think times of traces that do not record how long an answer took."""


@dataclass(frozen=True, slots=True)
class TraceScaling:
    input_scale: Fraction = Fraction(1)
    output_scale: Fraction = Fraction(1)
    time_scale: Fraction = Fraction(1)
    """Factor on the instants: 2 is half the rate."""
    input_tokens_max: int | None = None
    output_tokens_max: int | None = None

    def block_tokens(self, trace_block_tokens: int = TRACE_BLOCK_TOKENS) -> Fraction:
        """Prompt tokens of the plan per block of the trace."""
        return trace_block_tokens * self.input_scale


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    index: int
    """Position in the plan, from 0."""
    at_s: float
    """Planned instant, in seconds since the start of the replay."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    """Ids of the blocks from the start of the prompt. Tokens that they do not cover belong to the request
    alone."""
    session: str | None = None
    turn: int = 0
    parent: int | None = None
    """Index of the earlier turn; None for the first turn, and without a session."""
    think_s: float = 0.0
    """Seconds from the end of the earlier turn, if turns wait for it."""
    slo_class: str = ""
    tenant: str = ""
    disconnect: Disconnect | None = None


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    requests: tuple[PlannedRequest, ...]
    block_tokens: Fraction
    """Prompt tokens per hash_id; 0 if the trace has no prefixes."""
    inputs_cut: int
    """Number of requests whose input was longer than `input_tokens_max`."""
    outputs_cut: int
    blocks_grouped: int = 1
    """Blocks of the trace per hash_id of the plan."""

    @property
    def has_prefixes(self) -> bool:
        return self.block_tokens > 0

    def edge(self, block: int) -> int:
        """The number of tokens before this block."""
        return math.ceil(block * self.block_tokens)


def parse_factor(text: str) -> Fraction:
    """A factor such as `1/16`, `0.5` or `2`. Raises SetupError unless it is positive and of plausible
    size."""
    digits = text.strip()
    try:
        factor = Fraction(digits) if _FACTOR.fullmatch(digits) else Fraction(0)
    except (ValueError, ZeroDivisionError):
        factor = Fraction(0)
    if not Fraction(1, FACTOR_MAX) <= factor <= FACTOR_MAX:
        raise SetupError(f"{text[:40]!r} is not a positive factor such as 1/16, 0.5 or 2")
    return factor


def factor_text(factor: Fraction) -> str:
    """A factor as users write it; the factors of a search are decimal numbers."""
    return str(factor) if factor.denominator <= 1000 else f"{float(factor):.6g}"


def check_rate(requests_per_s: float | None, time_scale: str) -> None:
    """Raises SetupError if both options are given."""
    if requests_per_s is not None and time_scale != "1":
        raise SetupError("--rate and --time-scale say the same thing; give one")


def time_scale_for(trace: Trace, requests_per_s: float) -> Fraction:
    """The time scale that gives the trace this mean rate. Raises SetupError."""
    span_s = trace.requests[-1].at_s - trace.requests[0].at_s
    if not 1 / RATE_MAX <= requests_per_s <= RATE_MAX:  # this also refuses NaN
        raise SetupError(
            f"--rate {requests_per_s:g}: must be from {1 / RATE_MAX:g} to {RATE_MAX:,} per second"
        )
    if span_s <= 0:
        raise SetupError(f"--rate {requests_per_s:g}: the trace is a single instant: take more of it")
    exact = Fraction((len(trace.requests) - 1) / span_s / requests_per_s)
    return exact.limit_denominator(10**9) or exact


def make_plan(
    trace: Trace,
    scaling: TraceScaling,
    *,
    spread: bool,
    seed: int,
    shape: RateShape | None = None,
    users: Users | None = None,
    disconnects: Disconnects | None = None,
) -> ReplayPlan:
    """The plan. Raises SetupError if an instant cannot be represented."""
    instants_s = _instants_s(trace, scaling, spread=spread, seed=seed, shape=shape or RateShape())
    blocks = _PlanBlocks(trace, scaling)
    users, disconnects = users or Users(), disconnects or Disconnects()
    indices = {r.row: i for i, r in enumerate(trace.requests)}
    requests: list[PlannedRequest] = []
    inputs_cut = outputs_cut = 0
    for i, (r, at_s) in enumerate(zip(trace.requests, instants_s, strict=True)):
        wanted_in, wanted_out = _size(r, scaling)
        inputs = _capped(wanted_in, scaling.input_tokens_max)
        outputs = _capped(wanted_out, scaling.output_tokens_max)
        if max(inputs, outputs) > TOKENS_MAX:
            raise SetupError(f"request {i}, scaled, has more than {TOKENS_MAX:,} tokens: scale by less")
        inputs_cut += inputs < wanted_in
        outputs_cut += outputs < wanted_out
        parent = None if r.parent_row is None else indices.get(r.parent_row)
        # A turn never precedes the turn that it follows, wherever sorting or spreading put them.
        parent = parent if parent is not None and parent < i else None
        before = None if parent is None else trace.requests[parent]
        requests.append(
            PlannedRequest(
                index=i,
                at_s=at_s,
                input_tokens=inputs,
                output_tokens=outputs,
                hash_ids=blocks.covering(r.hash_ids, inputs),
                session=r.session,
                turn=r.turn,
                parent=parent,
                think_s=_think_s(r, before) * float(scaling.time_scale),
                slo_class=r.slo_class or users.slo_class,
                tenant=r.tenant or users.tenant_of(r.session or str(r.row)),
                disconnect=disconnects.of(r.row, outputs),
            )
        )
    return ReplayPlan(tuple(requests), blocks.tokens, inputs_cut, outputs_cut, blocks.grouped)


def _instants_s(
    trace: Trace, scaling: TraceScaling, *, spread: bool, seed: int, shape: RateShape
) -> list[float]:
    spread_s = spread_ticks(
        [r.at_s for r in trace.requests], tick_s=trace.tick_s if spread else 0.0, seed=seed
    )
    time_scale = float(scaling.time_scale)
    return shape.warp([at_s * time_scale for at_s in spread_s])


class _PlanBlocks:
    """The trace's hash_ids as the plan uses them, grouped if a block would become too short."""

    def __init__(self, trace: Trace, scaling: TraceScaling) -> None:
        one = scaling.block_tokens(trace.hash_block_tokens)
        self.grouped = max(1, math.ceil(BLOCK_TOKENS_MIN / one)) if one else 1
        self.tokens = one * self.grouped
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        largest = max((max(r.hash_ids) for r in trace.requests if r.hash_ids), default=0)
        self._dense: dict[int, int] | None = {} if largest >= HASH_ID_MAX else None

    def covering(self, hash_ids: tuple[int, ...], input_tokens: int) -> tuple[int, ...]:
        """The ids of the blocks that begin within the first `input_tokens` tokens."""
        if not self.tokens:
            return ()
        needed = -(-input_tokens * self.tokens.denominator // self.tokens.numerator)
        if (dense := self._dense) is not None:
            hash_ids = tuple(dense.setdefault(i, len(dense)) for i in hash_ids)
        if self.grouped == 1:
            return hash_ids[:needed]
        ids: list[int] = []
        parent = -1
        for start in range(0, min(len(hash_ids), needed * self.grouped), self.grouped):
            run = hash_ids[start : start + self.grouped]
            parent = self._numbers.setdefault((parent, run), len(self._numbers))
            ids.append(parent)
        return tuple(ids)


def _size(request: TraceRequest, scaling: TraceScaling) -> tuple[int, int]:
    # Rounding up keeps ceil(tokens / block) as it was in the trace.
    inputs = -((-request.input_tokens * scaling.input_scale) // 1)
    outputs = round(request.output_tokens * scaling.output_scale)
    return max(1, int(inputs)), max(1, outputs)


def _capped(tokens: int, most: int | None) -> int:
    return tokens if most is None else min(tokens, most)


def _think_s(request: TraceRequest, before: TraceRequest | None) -> float:
    """Seconds of the trace between the end of the earlier turn and this one."""
    if before is None:
        return 0.0
    if request.think_s is not None:
        return max(0.0, request.think_s)
    took_s = before.output_tokens * ASSUMED_TPOT_S if before.elapsed_s is None else before.elapsed_s
    return max(0.0, request.at_s - before.at_s - took_s)
