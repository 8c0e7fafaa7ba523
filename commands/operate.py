"""Commands that inspect and change a running cluster: status, scale, switch-role, drain, rollout."""

from typing import Annotated

import msgspec
import typer

from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.core.operate import (
    Action,
    ClusterState,
    DrainNode,
    DrainWorker,
    RollOut,
    Scale,
    SwitchRole,
    Version,
)
from baton.core.shape import CountedShape
from commands.orders import (
    WAIT_S,
    Advise,
    Control,
    ModelName,
    OneModel,
    OrderOptions,
    Reason,
    Wait,
    Yes,
    give_order,
    with_control,
)


def status(
    model: OneModel = "",
    control: Control = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole state as JSON.")] = False,
) -> None:
    """Show the wanted and the running workers, and the latest decisions with their reasons.

    Columns that are the same for all workers are left out. Deaths in a row: ends of a worker that nobody
    ordered, counted anew once it has served for cluster.restart_stable_s; each doubles the wait before the
    next start.

    Example: baton status --control 127.0.0.1:7000
    """
    state = _of_model(with_control(control, lambda client: client.state()), model)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(state), indent=2).decode())
        return
    from commands.show_cluster import show

    show(state)


def scale(
    role: Annotated[str, typer.Argument(help="prefill, decode or aggregated.")],
    count: Annotated[
        str, typer.Argument(help="Wanted number of workers; `baton rollout` changes their shape.")
    ],
    model: ModelName = "",
    control: Control = "",
    reason: Reason = "",
    advise: Advise = False,
    wait: Wait = WAIT_S,
    yes: Yes = False,
) -> None:
    """Set the number of workers of a role.

    Surplus workers are drained, missing ones are started.

    Example: baton scale decode 3 --reason "evening peak"
    """
    action = Scale(_role(role), _worker_count(count), model)
    give_order(control, lambda state: action, OrderOptions(reason, advise, wait, yes))


def switch_role(
    worker: Annotated[str, typer.Argument(help="Worker's name or id, as `baton status` shows it.")],
    role: Annotated[str, typer.Argument(help="prefill, decode or aggregated.")],
    model: OneModel = "",
    control: Control = "",
    reason: Reason = "",
    advise: Advise = False,
    wait: Wait = WAIT_S,
    yes: Yes = False,
) -> None:
    """Give a running worker another role.

    It finishes its requests first and keeps its weights loaded.

    Example: baton switch-role prefill-1 decode
    """
    asked = _role(role)
    give_order(
        control,
        lambda state: SwitchRole(_worker(state, worker, model), asked),
        OrderOptions(reason, advise, wait, yes),
    )


def drain(
    target: Annotated[
        str, typer.Argument(metavar="WORKER|NODE", help="Name or id, as `baton status` shows it.")
    ],
    replace: Annotated[
        bool, typer.Option(help="Start another worker in its place, or make the pool one smaller.")
    ] = True,
    undo: Annotated[bool, typer.Option("--undo", help="Use a drained node again.")] = False,
    model: OneModel = "",
    control: Control = "",
    reason: Reason = "",
    advise: Advise = False,
    wait: Wait = WAIT_S,
    yes: Yes = False,
) -> None:
    """Drain a worker, or all workers of a node.

    They get no new requests; their streams finish or move to other workers. The command waits until the
    replacements serve.

    Example: baton drain decode-1 --reason "it is slow"
    """

    def action(state: ClusterState) -> Action:
        if model or state.replica(target) is not None:
            if undo:
                raise SetupError(
                    f"--undo works for nodes, and {target} is a worker: a drained worker does not come back; "
                    "start another one with `baton scale` if none was started in its place"
                )
            return DrainWorker(_worker(state, target, model), replace)
        if any(target in (r.name, r.rank_id) for group in state.experts for r in group.ranks):
            raise SetupError(f"{target} is an expert rank: use `baton experts drain {target}`")
        if not any(target and target in (n.host, n.node[: len(target)]) for n in state.nodes):
            names = ", ".join(
                [*(r.name for r in state.replicas[:20]), *(n.node[:12] for n in state.nodes[:20])]
            )
            raise SetupError(f"no worker and no node {target!r} here: choose one of {names}")
        return DrainNode(target, undo)

    give_order(control, action, OrderOptions(reason, advise, wait, yes))


def rollout(
    version: Annotated[
        str, typer.Argument(help="Name of the new version; the name of an earlier version rolls back to it.")
    ],
    sets: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="SECTION.FIELD=VALUE", help="Setting that the new version changes; repeatable."
        ),
    ] = [],  # noqa: B006 - typer copies it
    model: ModelName = "",
    surge: Annotated[int, typer.Option(min=0, help="Extra workers per role while it runs.")] = 1,
    unavailable: Annotated[
        int, typer.Option(min=0, help="Workers per role that may be missing while it runs.")
    ] = 0,
    control: Control = "",
    reason: Reason = "",
    advise: Advise = False,
    wait: Wait = WAIT_S,
) -> None:
    """Replace all workers of a model, a few at a time, by workers with other settings.

    No stream is lost. Without --set, the workers are restarted as they are.

    Example: baton rollout v2 --set engine.kv_bytes=1073741824 --unavailable 1 --surge 0
    """
    action = RollOut(Version(version, tuple(sets)), model, surge, unavailable)
    give_order(control, lambda state: action, OrderOptions(reason, advise, wait))


def mount(app: typer.Typer) -> None:
    for command in (status, scale, switch_role, drain, rollout):
        app.command()(command)


# --- models ---------------------------------------------------------------------------------------


def _known(state: ClusterState, model: str) -> None:
    """Raises SetupError if there is no such model."""
    if model and state.pool(model) is None:
        names = ", ".join(pool.model for pool in state.pools) or "none"
        raise SetupError(f"no model {model!r} here: choose one of {names}")


def _of_model(state: ClusterState, model: str) -> ClusterState:
    """The state with only this model in it. Raises SetupError."""
    _known(state, model)
    if not model:
        return state
    return msgspec.structs.replace(
        state,
        pools=tuple(pool for pool in state.pools if pool.model == model),
        replicas=tuple(replica for replica in state.replicas if replica.model == model),
        autoscale=tuple(one for one in state.autoscale if one.model == model),
        experts=tuple(group for group in state.experts if group.model == model),
    )


def _worker(state: ClusterState, worker: str, model: str) -> str:
    """The name that the control plane uses for the worker. Raises SetupError if the model has no such
    worker."""
    _known(state, model)
    if not model:
        return worker
    if (replica := state.replica(worker, model=model)) is None:
        names = ", ".join(r.name for r in state.replicas if r.model == model) or "none"
        raise SetupError(f"{model} has no worker {worker!r}: choose one of {names}")
    return replica.name


def _role(name: str) -> Role:
    try:
        return Role(name)
    except ValueError:
        raise SetupError(f"{name} is not a role: choose prefill, decode or aggregated") from None


def _worker_count(text: str) -> int:
    """Raises SetupError."""
    if text.isascii() and text.isdecimal():
        return int(text)
    try:
        shape = CountedShape.parse(text).shape
    except SetupError:
        shape = None
    if shape is None:
        raise SetupError(f"{text} is not a number of workers, such as 3")
    raise SetupError(
        f"{text} names a shape, and `baton scale` takes a number of workers, which keep theirs. A new shape "
        f"is a new version: baton rollout NAME --set engine.shape={shape}"
    )
