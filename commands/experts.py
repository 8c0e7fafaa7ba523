"""`baton experts` shows the expert ranks of a cluster, and orders changes of them."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
import typer

from baton.core.errors import SetupError
from baton.core.experts import ExpertGroupState
from baton.core.operate import (
    ClusterState,
    DrainExpertRank,
    RebalanceExperts,
    ScaleExperts,
)
from baton.wire.operate import OperateClient
from commands.orders import (
    WAIT_S,
    Advise,
    Control,
    OrderOptions,
    OrderWatch,
    Reason,
    Wait,
    Yes,
    give_order,
    with_control,
)

app = typer.Typer(
    help="Show the expert ranks of a cluster, and rebalance, drain or scale them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

GroupName = Annotated[
    str,
    typer.Option(
        "--group",
        metavar="GROUP",
        help='Group of expert ranks: its name ("decode of MODEL"), role or model; default: the only one.',
    ),
]
RANKS_MAX = 1024
NAMES_SHOWN = 20


@app.command()
def show(
    group: GroupName = "",
    every: Annotated[bool, typer.Option("--all", help="List every rank of large groups.")] = False,
    seconds: Annotated[
        float,
        typer.Option(min=0, max=60, help="Seconds over which rows are counted; 0: no rates."),
    ] = 1.0,
    control: Control = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the groups' whole state as JSON.")] = False,
) -> None:
    """Show the ranks of each group, what they hold, their load, and experts without a replica.

    Example: baton experts show

    Example: baton experts show --group decode --json
    """

    async def look(client: OperateClient) -> tuple[ClusterState, ClusterState, float]:
        first, began_s = await client.state(), time.monotonic()
        if as_json or not seconds or not first.experts:
            return first, first, 0.0
        await asyncio.sleep(seconds)
        return first, await client.state(), time.monotonic() - began_s

    first, state, span_s = with_control(control, look)
    groups = groups_of(state, group)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(groups), indent=2).decode())
        return
    from commands.show_experts import rows_between
    from commands.show_experts import show as show_groups

    rates = rows_between(first.experts, groups, span_s) if span_s else {}
    show_groups(groups, rates, shows_all=every)


@app.command()
def rebalance(
    group: GroupName = "",
    control: Control = "",
    reason: Reason = "",
    advise: Advise = False,
    wait: Wait = WAIT_S,
) -> None:
    """Place the experts of a group anew now, however small the gain.

    Ranks load experts beside their work; nothing pauses. The command waits until they have loaded what the
    new placement gives them.

    Example: baton experts rebalance --group decode --reason "a new kind of traffic"
    """
    give_order(
        control,
        lambda state: RebalanceExperts(group_of(state, group).group),
        OrderOptions(reason, advise, wait),
        lambda state: _until_loaded(group_of(state, group)),
    )


@app.command()
def drain(
    rank: Annotated[str, typer.Argument(metavar="RANK", help="Name or id, see `baton experts show`.")],
    replace: Annotated[
        bool, typer.Option(help="Start another rank in its place, or make the group one smaller.")
    ] = True,
    control: Control = "",
    reason: Reason = "",
    advise: Advise = False,
    wait: Wait = WAIT_S,
    yes: Yes = False,
) -> None:
    """Drain an expert rank.

    Other ranks take over the experts that it holds, then its process ends. The command waits until the group
    has all its ranks.

    Example: baton experts drain RANK --reason "its host is slow"
    """

    def action(state: ClusterState) -> DrainExpertRank:
        _group_of_rank(state, rank)
        return DrainExpertRank(rank, replace)

    give_order(
        control,
        action,
        OrderOptions(reason, advise, wait, yes),
        lambda state: _until_whole(_group_of_rank(state, rank)),
    )


@app.command()
def scale(
    count: Annotated[int, typer.Argument(min=1, max=RANKS_MAX, metavar="N", help="Number of ranks.")],
    group: GroupName = "",
    control: Control = "",
    reason: Reason = "",
    advise: Advise = False,
    wait: Wait = WAIT_S,
    yes: Yes = False,
) -> None:
    """Set the number of expert ranks of a group that are apart from workers (experts.parallel=ranks).

    New ranks take their share of the experts from the others; surplus ones hand over theirs first.

    Example: baton experts scale 8 --group decode --reason "evening peak"
    """
    give_order(
        control,
        lambda state: ScaleExperts(count, group_of(state, group).group),
        OrderOptions(reason, advise, wait, yes),
        lambda state: _until_whole(group_of(state, group)),
    )


# --- names ------------------------------------------------------------------------------------------


def groups_of(state: ClusterState, name: str) -> tuple[ExpertGroupState, ...]:
    """The groups with this name, role or model; all groups if it is empty. Raises SetupError if there are
    none."""
    if not state.experts:
        raise SetupError(
            "this cluster has no expert ranks: every worker holds all experts of its model; see "
            "experts.parallel in `baton config`"
        )
    exact = tuple(g for g in state.experts if g.group == name)
    found = exact or tuple(g for g in state.experts if not name or name in (g.role, g.model))
    if not found:
        raise SetupError(f"no group {name!r} here: choose one of {_listed(g.group for g in state.experts)}")
    return found


def group_of(state: ClusterState, name: str) -> ExpertGroupState:
    """The only group with this name, role or model. Raises SetupError."""
    first, *others = groups_of(state, name)
    if others:
        names = _listed(g.group for g in (first, *others))
        raise SetupError(f"several groups: choose one with --group: {names}")
    return first


def _group_of_rank(state: ClusterState, rank: str) -> ExpertGroupState:
    """The group of the rank with this name or id. Raises SetupError."""
    groups = groups_of(state, "")
    for group in groups:
        if any(rank in (r.name, r.rank_id) for r in group.ranks):
            return group
    names = _listed(r.name for group in groups for r in group.ranks)
    raise SetupError(f"no expert rank {rank!r} here: choose one of {names}")


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = len(every) - NAMES_SHOWN
    return ", ".join([*every[:NAMES_SHOWN], *([f"and {more} more"] if more > 0 else [])])


# --- waiting ----------------------------------------------------------------------------------------


def _until_whole(group: ExpertGroupState) -> OrderWatch:
    """Wait until the group has all its ranks."""
    from control_plane.expert_summary import is_whole

    return _watch(group.group, is_whole, "all ranks are ready")


def _until_loaded(group: ExpertGroupState) -> OrderWatch:
    """Wait until the group's ranks have loaded what they were ordered to."""
    return _watch(group.group, lambda now: not now.loads_running, "no expert is loading any more")


def _watch(name: str, is_over: Callable[[ExpertGroupState], bool], text: str) -> OrderWatch:
    """A group that is gone has nothing to wait for."""
    from control_plane.expert_summary import progress

    def now(state: ClusterState) -> list[ExpertGroupState]:
        return [group for group in state.experts if group.group == name]

    return OrderWatch(
        lambda state: "; ".join(map(progress, now(state))), lambda state: all(map(is_over, now(state))), text
    )
