"""The tables of `baton status`."""

import time
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from baton.core.experts import ExpertGroupState
from baton.core.messages import Role
from baton.core.operate import (
    AutoscaleState,
    ClusterState,
    Decision,
    Outcome,
    ReplicaState,
    has_ambiguous_names,
)
from baton.files.terminal import new_console as standard_console

DECISIONS_SHOWN = 10
DECISIONS_COLUMNS_MIN = 120
"""Width of a terminal that has room for a table of decisions. A narrower one shows each decision on lines of
its own."""
_STYLES = {ReplicaState.RUNNING: "green", ReplicaState.WAITING: "red", ReplicaState.KILLING: "red"}
_OUTCOMES = {Outcome.DONE: "green", Outcome.REFUSED: "red", Outcome.FAILED: "red"}


def show(state: ClusterState, console: Console | None = None) -> None:
    from control_plane.orders import has_all

    console = console or standard_console()
    for pool in state.pools:
        counts = ", ".join(f"{pool.count(role)} {role}" for role in Role if pool.count(role)) or "no workers"
        is_there = "all running" if has_all(pool, state) else "in progress"
        model, version = escape(pool.model), escape(pool.version.name)
        console.print(f"[bold]{model}[/bold] version {version}: {counts} wanted, {is_there}")
    for group in state.experts:
        console.print(expert_summary(group))
    console.print(_replicas(state))
    for line in _memory_lines(state):
        console.print(line)
    for one in state.autoscale:
        console.print(_learnt(one, named=len(state.autoscale) > 1))
        console.print(_autoscale(one))
    if state.nodes:
        console.print(_nodes(state))
    if state.decisions and console.width < DECISIONS_COLUMNS_MIN:
        console.print("decisions:")
        for line in _decision_lines(state):
            console.print(Padding(line, (0, 0, 0, 2)))
    elif state.decisions:
        console.print(_decisions(state))


def expert_summary(group: ExpertGroupState) -> str:
    """A group of expert ranks in one line."""
    from control_plane.expert_summary import ready_count

    missing = f"[red]{group.missing:,} experts without a replica[/red], " if group.missing else ""
    ranks = f"{ready_count(group)} of {group.wanted_ranks} expert ranks ready"
    return f"[bold]{escape(group.group)}[/bold]: {ranks}, {missing}balance {group.balance:.0%}"


def _replicas(state: ClusterState) -> Table:
    """The table of workers. Empty columns are left out, because names must fit a terminal of 80 columns."""
    has_nodes = len({r.node for r in state.replicas if r.node}) > 1
    has_versions = len({r.version for r in state.replicas}) > 1
    has_deaths = any(r.deaths_in_a_row for r in state.replicas)
    has_models = has_ambiguous_names({r.model for r in state.replicas})
    has_shapes = any(r.shape not in ("", "1") for r in state.replicas)
    extra = (
        *(("model", has_models), ("shape", has_shapes), ("version", has_versions)),
        *(("node", has_nodes), ("deaths\nin a row", has_deaths)),
    )
    table = Table()
    for name in ("worker", "role", "state", "since", *(name for name, is_shown in extra if is_shown)):
        table.add_column(name, no_wrap=True, overflow="fold")
    table.add_column("reason", overflow="fold")
    for r in state.replicas:
        style = _STYLES.get(r.state, "yellow")
        replica_state = f"[{style}]{r.state}[/{style}]"
        reason = r.last_exit if r.state is ReplicaState.WAITING else r.reason
        texts = (escape(r.model), r.shape, r.version, r.node[:12], str(r.deaths_in_a_row or ""))
        shown = [text for text, (_, is_shown) in zip(texts, extra, strict=True) if is_shown]
        table.add_row(
            r.worker_id or r.name, r.role, replica_state, span(r.for_s), *shown, escape(reason[:60])
        )
    return table


def _memory_lines(state: ClusterState) -> Iterator[str]:
    """Where workers' memory went, in one line for all that say the same."""
    workers: dict[str, list[str]] = {}
    for r in state.replicas:
        if r.memory:
            workers.setdefault(r.memory, []).append(r.name)
    for memory, names in workers.items():
        yield f"memory of {escape(', '.join(names))}: {escape(memory)}"


def _learnt(state: AutoscaleState, *, named: bool) -> str:
    what = "only advises" if state.mode == "advise" else "orders"
    durations = span(state.start_s), span(state.switch_s), span(state.drain_s)
    learnt = "starts take {}, role switches {}, drains {}".format(*durations)
    of = f" of {state.model}" if named else ""
    return f"autoscaler{of} {what}; {learnt}" + (f"; no decisions: {state.text}" if state.text else "")


def _autoscale(state: AutoscaleState) -> Table:
    table = Table("role", "demand", "forecast", "correction", "needed", "wanted")
    for one in state.roles:
        demand, forecast = f"{one.demand:.3g} {one.unit}", f"{one.forecast:.3g}"
        correction = f"x{one.correction:.2f}"
        table.add_row(one.role, demand, forecast, correction, str(one.needed), str(one.wanted))
    return table


def _nodes(state: ClusterState) -> Table:
    table = Table()
    for name in ("node", "host", "state", "cpus", "gpus"):
        table.add_column(name, overflow="fold")
    table.columns[0].no_wrap = True
    for n in state.nodes:
        word = "lost" if not n.is_alive else "drained" if n.is_drained else "in use"
        table.add_row(n.node[:12], n.host, word, f"{n.cpus:g}", f"{n.gpus:g}")
    return table


def _decisions(state: ClusterState) -> Table:
    from control_plane.desired import describe

    table = Table("", "when", "who", "what", "reason", "outcome")
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for d in state.decisions[-DECISIONS_SHOWN:]:
        words = escape(describe(d.action)), escape(d.reason), _outcome(d)
        table.add_row(str(d.number), _clock(d.at_s), escape(d.who), *words)
    return table


def _decision_lines(state: ClusterState) -> Iterator[str]:
    from control_plane.desired import describe

    for d in state.decisions[-DECISIONS_SHOWN:]:
        reason = f" ({escape(d.reason)})" if d.reason else ""
        ordered = f"{d.number} {_clock(d.at_s)} {escape(d.who)}: {escape(describe(d.action))}"
        yield f"{ordered}{reason} - {_outcome(d)}"


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def _outcome(d: Decision) -> str:
    style = _OUTCOMES.get(d.outcome, "yellow")
    took = "" if d.done_after_s is None else f" after {span(d.done_after_s)}"
    return f"[{style}]{d.outcome}[/{style}]{took}: {escape(d.text)}"


def span(seconds: float) -> str:
    """A rounded duration with its unit."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
