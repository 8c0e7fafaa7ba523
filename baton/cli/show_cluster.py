"""`baton status` for people."""

import time

from rich.console import Console
from rich.table import Table

from baton.core.messages import Role
from baton.core.operate import AutoscaleState, ClusterState, Outcome, ReplicaPhase

DECISIONS_SHOWN = 10
_STYLES = {ReplicaPhase.RUNNING: "green", ReplicaPhase.WAITING: "red", ReplicaPhase.KILLING: "red"}
_OUTCOMES = {Outcome.DONE: "green", Outcome.REFUSED: "red", Outcome.FAILED: "red"}


def show(state: ClusterState, console: Console | None = None) -> None:
    from control_plane.orders import has_all

    console = console or Console()
    for pool in state.pools:
        counts = ", ".join(f"{pool.count(role)} {role}" for role in Role if pool.count(role)) or "no workers"
        is_there = "all there" if has_all(pool, state) else "on its way"
        console.print(f"[bold]{pool.model}[/bold] version {pool.version.name}: {counts} wanted, {is_there}")
    console.print(_replicas(state))
    for one in state.autoscale:
        console.print(_learnt(one, named=len(state.autoscale) > 1))
        console.print(_outlook(one))
    if state.nodes:
        console.print(_nodes(state))
    if state.decisions:
        console.print(_decisions(state))


def _replicas(state: ClusterState) -> Table:
    columns = ("worker", "role", "phase", "since", "version", "node", "deaths", "why")
    has_several = len(state.pools) > 1
    table = Table(*(("model", *columns) if has_several else columns))
    for r in state.replicas:
        style = _STYLES.get(r.phase, "yellow")
        phase = f"[{style}]{r.phase}[/{style}]"
        name = r.worker_id or r.name
        why = r.last_exit if r.phase is ReplicaPhase.WAITING else r.why
        deaths = str(r.deaths_in_a_row or "")
        row = (name, r.role, phase, span(r.for_s), r.version, r.node[:12], deaths, why[:60])
        table.add_row(*((r.model, *row) if has_several else row))
    return table


def _learnt(state: AutoscaleState, *, named: bool) -> str:
    what = "only advises" if state.mode == "advise" else "orders"
    learnt = f"starts take {span(state.start_s)}, flips {span(state.flip_s)}, drains {span(state.drain_s)}"
    of = f" of {state.model}" if named else ""
    return f"autoscaler{of} {what}; {learnt}" + (f"; decides nothing: {state.text}" if state.text else "")


def _outlook(state: AutoscaleState) -> Table:
    table = Table("role", "demand", "forecast", "correction", "needed", "wanted")
    for one in state.roles:
        demand, forecast = f"{one.demand:.3g} {one.unit}", f"{one.forecast:.3g}"
        correction = f"x{one.correction:.2f}"
        table.add_row(one.role, demand, forecast, correction, str(one.needed), str(one.wanted))
    return table


def _nodes(state: ClusterState) -> Table:
    table = Table("node", "host", "state", "cpus", "gpus")
    for n in state.nodes:
        word = "lost" if not n.is_alive else "drained" if n.is_drained else "in use"
        table.add_row(n.node[:12], n.host, word, f"{n.cpus:g}", f"{n.gpus:g}")
    return table


def _decisions(state: ClusterState) -> Table:
    from control_plane.desired import describe

    table = Table("", "when", "who", "what", "why", "outcome")
    for d in state.decisions[-DECISIONS_SHOWN:]:
        when = time.strftime("%H:%M:%S", time.localtime(d.at_s))
        style = _OUTCOMES.get(d.outcome, "yellow")
        took = "" if d.done_after_s is None else f" after {span(d.done_after_s)}"
        outcome = f"[{style}]{d.outcome}[/{style}]{took}: {d.text}"
        table.add_row(str(d.number), when, d.who, describe(d.action), d.why, outcome)
    return table


def span(seconds: float) -> str:
    """About how long."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
