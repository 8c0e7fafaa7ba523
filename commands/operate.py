"""Commands that inspect and change a running cluster: status, scale, switch-role, drain, rollout."""

import asyncio
import getpass
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.core.operate import (
    Action,
    ClusterState,
    Decision,
    DrainNode,
    DrainWorker,
    Order,
    Outcome,
    RollOut,
    Scale,
    SwitchRole,
    Version,
)
from baton.core.shape import CountedShape
from baton.wire.link import LinkBroken, LinkRefused
from baton.wire.operate import OperateClient
from baton.wire.transport import secure
from commands.settings import load_config

Control = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        envvar="BATON_CONTROL",
        help="Address of the control plane; default: the one that `baton serve` runs on this machine.",
        show_default=False,
    ),
]
Reason = Annotated[str, typer.Option(help="Reason to keep in the decision log.", show_default=False)]
ModelName = Annotated[
    str, typer.Option("--model", help="Model name that clients use; default: the only model.")
]
OneModel = Annotated[str, typer.Option("--model", help="Only the workers of this model.")]
Advise = Annotated[bool, typer.Option("--advise", help="Only say what would be done; change nothing.")]
Wait = Annotated[float, typer.Option(min=0, help="Seconds to wait until it is done; 0: do not wait.")]
Yes = Annotated[
    bool,
    typer.Option("--yes", "-y", help="Do not ask for confirmation, even if a role loses its last worker."),
]

WAIT_S = 600.0
ASK_S = 2.0
"""Longest wait for the names of a cluster's models, which only an error text shows."""


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
    state = _of_model(_with(control, lambda client: client.state()), model)
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
    _order(control, lambda state: action, _OrderOptions(reason, advise, wait, yes))


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
    _order(
        control,
        lambda state: SwitchRole(_worker(state, worker, model), asked),
        _OrderOptions(reason, advise, wait, yes),
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
        if not any(target and target in (n.host, n.node[: len(target)]) for n in state.nodes):
            names = ", ".join(
                [*(r.name for r in state.replicas[:20]), *(n.node[:12] for n in state.nodes[:20])]
            )
            raise SetupError(f"no worker and no node {target!r} here: choose one of {names}")
        return DrainNode(target, undo)

    _order(control, action, _OrderOptions(reason, advise, wait, yes))


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
    _order(control, lambda state: action, _OrderOptions(reason, advise, wait))


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


# --- orders ---------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class _OrderOptions:
    """The options that all orders share."""

    reason: str
    is_advice: bool
    wait_s: float
    is_sure: bool = False


def _order(control: str, action: Callable[[ClusterState], Action], options: _OrderOptions) -> None:
    async def act(client: OperateClient) -> tuple[Decision, str]:
        state = await client.state()
        wanted = action(state)
        _mind_losses(wanted, state, options)
        who = f"operator {getpass.getuser()}"
        decision = await client.order(Order(wanted, who, options.reason, options.is_advice))
        if decision.outcome is not Outcome.ACCEPTED or not options.wait_s:
            return decision, ""
        print(f"{decision.text}: accepted", file=sys.stderr)
        try:
            async with asyncio.timeout(options.wait_s):
                ended = await _until_over(client, decision)
                if ended.outcome is Outcome.DONE and _is_replaced(wanted):
                    print(f"{ended.text}; waiting for the replacements", file=sys.stderr)
                    return ended, await _until_all_there(client, _model_of(wanted, state))
                return ended, ""
        except TimeoutError:
            raise SetupError(
                f"not done within {options.wait_s:g} s; but it is still running: see `baton status`"
            ) from None

    decision, then = _with(control, act)
    took = "" if decision.done_after_s is None else f" after {decision.done_after_s:.2f} s"
    typer.echo(f"{decision.outcome}{took}: {decision.text}{then}")
    if decision.outcome in (Outcome.REFUSED, Outcome.FAILED):
        raise typer.Exit(1)


def _mind_losses(action: Action, state: ClusterState, options: _OrderOptions) -> None:
    """Ask the operator to confirm that a role loses its last worker. Raises SetupError if there is nobody to
    ask, or if the answer is no."""
    from control_plane.order_impact import impact_of

    loss = impact_of(action, state)
    if loss is None:
        return
    print(f"baton: warning: {loss.text}", file=sys.stderr)
    if not loss.is_lasting or options.is_advice or options.is_sure:
        return
    if not sys.stdin.isatty():
        raise SetupError("nothing was ordered: confirm it with --yes")
    if not typer.confirm("Do it?", err=True):
        raise SetupError("nothing was ordered")


def _is_replaced(action: Action) -> bool:
    return (isinstance(action, DrainWorker) and action.is_replaced) or (
        isinstance(action, DrainNode) and not action.is_undone
    )


async def _until_over(client: OperateClient, decision: Decision) -> Decision:
    """Wait for the outcome, also across a restart of the control plane, whose decision log survives it."""
    while True:
        try:
            async for state in client.changes():
                for known in state.decisions:
                    if known.number == decision.number and known.outcome is not Outcome.ACCEPTED:
                        return known
        except LinkBroken:
            await asyncio.sleep(1.0)


def _model_of(action: Action, state: ClusterState) -> str:
    """The model of the worker that is drained; empty for a single-model cluster or any other action."""
    replica = state.replica(action.worker) if isinstance(action, DrainWorker) else None
    return replica.model if replica is not None else ""


async def _until_all_there(client: OperateClient, model: str) -> str:
    """Wait until all wanted workers of this model, or of all models, serve again. Returns that as text."""
    from control_plane.orders import has_all

    began_s = time.monotonic()
    while True:
        try:
            async for state in client.changes():
                pool = state.pool(model) if len(state.pools) > 1 else None
                if state.is_settled or (pool is not None and has_all(pool, state)):
                    return f"; all wanted workers serve, {time.monotonic() - began_s:.2f} s later"
        except LinkBroken:
            pass
        await asyncio.sleep(1.0)


def _with(control: str, call: Callable[[OperateClient], Coroutine[Any, Any, Any]]) -> Any:
    config = load_config()
    secure(config.tls, config.access)

    async def run() -> Any:
        client = OperateClient(control or await _only_cluster())
        try:
            return await call(client)
        except LinkRefused as error:
            raise SetupError(f"the control plane refuses it: {error}") from None
        except LinkBroken as error:
            raise SetupError(f"the control plane does not answer: {error}") from None
        finally:
            await client.close()

    return asyncio.run(run())


async def _only_cluster() -> str:
    """The control plane's address of the only cluster that this user runs on this machine. Raises
    SetupError."""
    found = sorted(set(_local_clusters()))
    if len(found) == 1:
        return found[0][0]
    if found:
        clusters = await asyncio.gather(*(_described(address, folder) for address, folder in found))
        raise SetupError(f"several clusters run here: choose one with --control: {', '.join(clusters)}")
    raise SetupError("no cluster runs on this machine: name its control plane with --control HOST:PORT")


async def _described(address: str, folder: str) -> str:
    """The address, models and folder of a cluster, as text."""
    client = OperateClient(address)
    try:
        async with asyncio.timeout(ASK_S):
            state = await client.state()
        models = " and ".join(pool.model for pool in state.pools) or "no model"
    except (LinkBroken, TimeoutError):
        models = "which does not answer"
    finally:
        await client.close()
    return f"{address} ({models}, {folder})"


def _local_clusters() -> Iterator[tuple[str, str]]:
    """The address and folder of every cluster that this user runs here."""
    from control_plane.runtime_folder import ADDRESS_NAME, FOLDER_PREFIX, is_in_use

    for parent in {os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"} - {""}:
        for file in Path(parent).glob(f"{FOLDER_PREFIX}*/{ADDRESS_NAME}"):
            try:
                if file.stat().st_uid == os.getuid() and is_in_use(file.parent):
                    yield file.read_text(encoding="utf-8").strip(), str(file.parent)
            except OSError:
                continue  # the cluster is just ending
