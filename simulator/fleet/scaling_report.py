"""The effect of scaling on a run: figures, and a section of its page."""

from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console

from baton.core.messages import Role
from control_plane.autoscaler.values import ScalingDecision
from loadgen.html.marks import Markup, joined, tag
from loadgen.html.page import section
from loadgen.html.tables import table
from simulator.fleet.scaling import FleetScaling, ScaleSample

DECISIONS_SHOWN_MAX = 200
DECISIONS_PRINTED = 12
PLOT_WIDTH, PLOT_HEIGHT, LEFT, FOOT = 1060.0, 260.0, 40.0, 24.0
COLOURS = {Role.PREFILL: "#0072b2", Role.DECODE: "#d55e00", Role.AGGREGATED: "#009e73"}


class ScalingFigures(msgspec.Struct, frozen=True):
    """Figures of one run."""

    rule: str
    gpu_hours: float
    """GPU time paid: that of workers that start, serve or drain."""
    replicas_mean: float
    replicas_most: int
    starts: int
    stops: int
    switches: int
    drain_s_max: float
    reversals: Mapping[str, int]
    """Count of turns of each role's desired count from up to down or back."""
    samples: Sequence[ScaleSample]
    decisions: Sequence[ScalingDecision]
    """Decisions that changed something, oldest first; the newest of them if there are very many."""


def figures_of(scaling: FleetScaling, *, rule: str) -> ScalingFigures:
    """Return the figures of a run that is over."""
    duration_s = max(1e-9, scaling.fleet.clock.now_s)
    gpu_s = scaling.gpu_s
    return ScalingFigures(
        rule=rule,
        gpu_hours=gpu_s / 3600,
        replicas_mean=gpu_s / scaling.spec.gpus_per_worker / duration_s,
        replicas_most=max((_paid(sample) for sample in scaling.samples), default=0),
        starts=scaling.starts,
        stops=scaling.stops,
        switches=scaling.switches,
        drain_s_max=scaling.drain_s_max,
        reversals={role.value: count for role, count in scaling.rule.journal.reversals().items()},
        samples=scaling.samples,
        decisions=[entry.decision for entry in scaling.rule.journal if entry.decision.is_change],
    )


def with_scaling(report: bytes, figures: ScalingFigures) -> bytes:
    """Return the JSON of a report, with these figures as its `scaling`."""
    merged: dict[str, object] = msgspec.json.decode(report, type=dict[str, object])
    return msgspec.json.format(msgspec.json.encode({**merged, "scaling": figures})) + b"\n"


def show_scaling(console: Console, figures: ScalingFigures) -> None:
    turns = ", ".join(f"{count} of {role}" for role, count in figures.reversals.items()) or "none"
    console.print(
        f"{figures.rule}: {figures.gpu_hours:.2f} GPU-hours, {figures.replicas_mean:.1f} replicas in the "
        f"mean, {figures.replicas_most} at most; {figures.starts} starts, {figures.stops} stops, "
        f"{figures.switches} role switches; reversals: {turns}"
    )
    for one in figures.decisions[-DECISIONS_PRINTED:]:
        console.print(f"  {one.at_s:7.0f} s  {_changes(one)}: {'; '.join(one.reasons)}", markup=False)


def _paid(sample: ScaleSample) -> int:
    return sum(sum(counts.values()) for counts in (sample.serving, sample.starting, sample.draining))


def scaling_section(figures: ScalingFigures) -> Markup:
    """Draw replicas over time, and list the decisions with their reasons."""
    turns = ", ".join(f"{role} {count}" for role, count in figures.reversals.items()) or "none"
    note = (
        f"Rule: {figures.rule}. {figures.gpu_hours:.2f} GPU-hours, {figures.replicas_mean:.1f} replicas in "
        f"the mean and {figures.replicas_most} at most; {figures.starts} starts, {figures.stops} stops, "
        f"{figures.switches} role switches; reversals: {turns}. Lines: replicas that serve; dashed: desired; "
        "grey: requests per second, on a scale of its own."
    )
    return section("Replicas", note, tag("figure", replica_chart(figures.samples)), _decisions(figures))


def replica_chart(samples: Sequence[ScaleSample]) -> Markup:
    end_s = max((s.at_s for s in samples), default=1.0)
    top = max((max([*s.serving.values(), *s.desired.values(), 1]) for s in samples), default=1)
    rate = max((s.offered_per_s for s in samples), default=0.0) or 1.0

    def x(at_s: float) -> float:
        return LEFT + (PLOT_WIDTH - LEFT - 10) * at_s / end_s

    def y(share: float) -> float:
        return PLOT_HEIGHT - FOOT - (PLOT_HEIGHT - FOOT - 20) * share

    def line(points: Sequence[tuple[float, float]], colour: str, **more: object) -> Markup:
        text = " ".join(f"{x(at_s):.1f},{y(share):.1f}" for at_s, share in points)
        return tag("polyline", points=text, fill="none", stroke=colour, stroke_width=1.5, **more)

    parts = [line([(s.at_s, s.offered_per_s / rate) for s in samples], "#bbbbbb")]
    for number, role in enumerate(role for role in Role if any(role in s.serving for s in samples)):
        colour = COLOURS[role]
        desired = [(s.at_s, s.desired.get(role, 0) / top) for s in samples]
        parts.append(line([(s.at_s, s.serving.get(role, 0) / top) for s in samples], colour))
        parts.append(line(desired, colour, stroke_dasharray="4 4"))
        parts.append(tag("text", role.value, x=LEFT + 10 + 90 * number, y=14, fill=colour, font_size=12))
    for count in sorted({0, top // 2, top}):
        parts.append(tag("text", str(count), x=8, y=y(count / top) + 4, font_size=11, fill="currentColor"))
    parts.append(
        tag("text", f"0 to {end_s:.0f} s", x=LEFT, y=PLOT_HEIGHT - 6, font_size=11, fill="currentColor")
    )
    return tag("svg", *parts, viewBox=f"0 0 {PLOT_WIDTH:.0f} {PLOT_HEIGHT:.0f}", role="img")


def _decisions(figures: ScalingFigures) -> Markup:
    rows = [
        tag(
            "tr",
            tag("td", f"{one.at_s:.0f} s"),
            tag("td", ", ".join(f"{count} {role.value}" for role, count in one.desired.items())),
            tag("td", _changes(one)),
            tag("td", joined([tag("div", reason) for reason in one.reasons])),
        )
        for one in figures.decisions[:DECISIONS_SHOWN_MAX]
    ]
    head = [tag("th", name) for name in ("at", "desired", "change", "reason")]
    return table(head, rows)


def _changes(one: ScalingDecision) -> str:
    parts = [f"switch {f.count} {f.source.value} to {f.target.value}" for f in one.switches]
    parts += [f"start {count} {role.value}" for role, count in one.starts.items() if count]
    parts += [f"stop {count} {role.value}" for role, count in one.stops.items() if count]
    return ("advised: " if one.is_advice else "") + ", ".join(parts)
