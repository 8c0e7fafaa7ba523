"""From a trace to a plan for one server: lengths and time scaled, prefix sharing kept. Pure.

A block of 512 trace tokens becomes `512 * input_scale` tokens, which must be a whole number, so that requests
that shared k blocks still share exactly k blocks. Input lengths are rounded up: a request keeps its number of
blocks, and a partial block stays partial or becomes full. Output lengths are rounded to the nearest (halves
to even), at least 1.
"""

from dataclasses import dataclass
from fractions import Fraction

from baton.core.errors import SetupError
from loadgen.arrivals import spread_ticks
from loadgen.traces import TRACE_BLOCK_TOKENS, Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Scaling:
    input_scale: Fraction = Fraction(1)
    output_scale: Fraction = Fraction(1)
    time_scale: Fraction = Fraction(1)
    """Multiplies the instants: 2 is half the rate."""
    input_tokens_max: int | None = None
    output_tokens_max: int | None = None

    def block_tokens(self) -> int:
        """Prompt tokens behind one hash_id after scaling. Raises SetupError if that is no whole number."""
        tokens = TRACE_BLOCK_TOKENS * self.input_scale
        if tokens.denominator != 1 or tokens < 1:
            raise SetupError(
                f"--length-scale {self.input_scale} makes {float(tokens):g} tokens of a trace block of "
                f"{TRACE_BLOCK_TOKENS}; it must be a whole number, best a multiple of the server's block "
                "size: take 1/16 (32 tokens), 1/8 (64), 1/4 (128) or 1/2 (256)"
            )
        return int(tokens)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    index: int
    """Position in the plan, from 0."""
    at_s: float
    """Planned instant, since the start of the replay."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    """Of the blocks that `input_tokens` covers; empty: a prompt of its own."""


@dataclass(frozen=True, slots=True)
class Plan:
    requests: tuple[PlannedRequest, ...]
    block_tokens: int
    """Prompt tokens of one hash_id; 0: the trace knows no prefixes."""
    inputs_cut: int
    """Requests whose input was longer than `input_tokens_max`."""
    outputs_cut: int


def parse_factor(text: str) -> Fraction:
    """`1/16`, `0.5` or `2`. Raises SetupError unless it is a positive number."""
    try:
        factor = Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        factor = Fraction(0)
    if factor <= 0:
        raise SetupError(f"{text!r} is not a positive factor such as 1/16, 0.5 or 2")
    return factor


def make_plan(trace: Trace, scaling: Scaling, *, spread: bool, seed: int) -> Plan:
    """Raises SetupError when the scale does not keep the blocks whole."""
    block_tokens = scaling.block_tokens() if trace.has_prefixes else 0
    tick_s = trace.tick_s if spread else 0.0
    instants_s = spread_ticks([r.at_s for r in trace.requests], tick_s=tick_s, seed=seed)
    time_scale = float(scaling.time_scale)
    sized = [_size(r, scaling) for r in trace.requests]
    requests = tuple(
        PlannedRequest(
            index=i,
            at_s=at_s * time_scale,
            input_tokens=_capped(wanted_in, scaling.input_tokens_max),
            output_tokens=_capped(wanted_out, scaling.output_tokens_max),
            hash_ids=_covering(r.hash_ids, _capped(wanted_in, scaling.input_tokens_max), block_tokens),
        )
        for i, (r, at_s, (wanted_in, wanted_out)) in enumerate(
            zip(trace.requests, instants_s, sized, strict=True)
        )
    )
    return Plan(
        requests,
        block_tokens,
        inputs_cut=sum(p.input_tokens < wanted for p, (wanted, _) in zip(requests, sized, strict=True)),
        outputs_cut=sum(p.output_tokens < wanted for p, (_, wanted) in zip(requests, sized, strict=True)),
    )


def _size(request: TraceRequest, scaling: Scaling) -> tuple[int, int]:
    # Up, not to the nearest: with whole blocks this keeps ceil(tokens / block) as it was in the trace.
    inputs = -((-request.input_tokens * scaling.input_scale) // 1)
    outputs = round(request.output_tokens * scaling.output_scale)
    return max(1, int(inputs)), max(1, outputs)


def _capped(tokens: int, most: int | None) -> int:
    return tokens if most is None else min(tokens, most)


def _covering(hash_ids: tuple[int, ...], input_tokens: int, block_tokens: int) -> tuple[int, ...]:
    return hash_ids[: -(-input_tokens // block_tokens)] if block_tokens else ()
