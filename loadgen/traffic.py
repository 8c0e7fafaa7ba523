"""Makes a plan from the options: the trace is read and cut, scaled, shaped, and assigned to users."""

from dataclasses import dataclass, replace

from baton.core.errors import SetupError
from loadgen.arrivals import RateShape, parse_burst, parse_ramp, parse_warp
from loadgen.disconnects import Disconnects
from loadgen.lengths import ReplayPlan, TraceScaling, check_rate, make_plan, parse_factor, time_scale_for
from loadgen.options import SessionMode, TrafficOptions
from loadgen.sources import name_of, open_trace
from loadgen.traces import Trace, cut
from loadgen.users import Users, read_keys


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace that was read, and everything that turns it into plans, so that plans at other rates need not
    read it again."""

    trace: Trace
    scaling: TraceScaling
    shape: RateShape
    users: Users
    disconnects: Disconnects
    spread: bool
    seed: int
    wait_for_turns: bool
    name: str
    start_s: float = 0.0

    def plan(self, *, requests_per_s: float | None = None) -> ReplayPlan:
        """A plan at this mean rate; None means as requested by the options. Raises SetupError."""
        scaling = self.scaling
        if requests_per_s is not None:
            scaling = replace(scaling, time_scale=time_scale_for(self.trace, requests_per_s))
        return make_plan(
            self.trace,
            scaling,
            spread=self.spread,
            seed=self.seed,
            shape=self.shape,
            users=self.users,
            disconnects=self.disconnects,
        )

    def described(self, plan: ReplayPlan) -> dict[str, str | int | float | bool | None]:
        """The options and their effect on the plan, for the report."""
        options: dict[str, str | int | float | bool | None] = {
            "length_scale": str(self.scaling.input_scale),
            "output_scale": str(self.scaling.output_scale),
            "max_input": self.scaling.input_tokens_max,
            "max_output": self.scaling.output_tokens_max,
            "start_s": self.start_s or None,
            "spread_ticks": self.spread and self.trace.tick_s > 0,
            "inputs_cut": plan.inputs_cut,
            "outputs_cut": plan.outputs_cut,
            "sessions": (SessionMode.WAIT if self.wait_for_turns else SessionMode.OPEN).value,
        }
        if plan.blocks_grouped > 1:
            options["prefixes_in_trace_blocks"] = plan.blocks_grouped
        if self.trace.skipped_at_s:
            options["failed_in_trace_left_out"] = len(self.trace.skipped_at_s)
        if self.shape:
            points = ", ".join(f"{factor:g}x at {at_s:g} s" for at_s, factor in self.shape.points)
            bursts = ", ".join(f"{b.factor:g}x {b.at_s:g}+{b.duration_s:g} s" for b in self.shape.bursts)
            options["rate_shape"] = "; ".join(part for part in (points, bursts) if part)
        if self.disconnects.share:
            options["cancel_share"] = self.disconnects.share
        return options


def traffic_of(asked: TrafficOptions) -> Traffic:
    """Raises SetupError."""
    check_rate(asked.rate, asked.time_scale)
    if asked.ramp and asked.warp:
        raise SetupError("--ramp and --warp both shape the rate: give one of them")
    if asked.cancel_after is not None and not asked.cancel:
        raise SetupError("--cancel-after applies to cancelled requests: give --cancel SHARE, too")
    scaling = TraceScaling(
        parse_factor(asked.length_scale),
        parse_factor(asked.output_scale or asked.length_scale),
        parse_factor(asked.time_scale),
        asked.max_input,
        asked.max_output,
    )
    points = parse_ramp(asked.ramp) if asked.ramp else parse_warp(asked.warp) if asked.warp else ()
    shape = RateShape(points, tuple(parse_burst(text) for text in asked.burst))
    keys = read_keys(asked.keys) if asked.keys else ()
    users = Users(asked.slo_class, asked.tenants, keys)
    disconnects = Disconnects(asked.cancel, asked.cancel_after, asked.seed)
    taken = cut(_read(asked), start_s=asked.start, duration_s=asked.duration, limit=asked.limit)
    if asked.rate is not None:
        scaling = replace(scaling, time_scale=time_scale_for(taken, asked.rate))
    return Traffic(
        taken,
        scaling,
        shape,
        users,
        disconnects,
        asked.spread,
        asked.seed,
        asked.sessions is SessionMode.WAIT,
        name_of(asked.trace),
        asked.start,
    )


def _read(asked: TrafficOptions) -> Trace:
    return open_trace(
        asked.trace,
        format=asked.trace_format,
        requests=asked.limit,
        duration_s=asked.start + asked.duration,
        seed=asked.seed,
    )
