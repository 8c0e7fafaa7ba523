"""Commands that look at a running cluster and change it: status, scale, flip, drain, rollout."""

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
    Drain,
    DrainNode,
    Order,
    Outcome,
    RollOut,
    Scale,
    SwitchRole,
    Version,
)
from baton.wire.link import LinkBroken, LinkRefused
from baton.wire.operate import OperateClient
from baton.wire.transport import secure
from commands.settings import load_config

Control = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        envvar="BATON_CONTROL",
        help="Control plane; default: the one that `baton serve` runs on this machine.",
        show_default=False,
    ),
]
Why = Annotated[str, typer.Option(help="Kept in the log of decisions.", show_default=False)]
ModelName = Annotated[str, typer.Option("--model", help="As clients name it; default: the only one.")]
OneModel = Annotated[
    str, typer.Option("--model", help="Only its workers, by their names with or without the model's.")
]
Advise = Annotated[bool, typer.Option("--advise", help="Only say what would be done.")]
Wait = Annotated[float, typer.Option(min=0, help="Seconds to wait until it is done; 0: not at all.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, whatever is lost by it.")]

WAIT_S = 600.0
ASK_S = 2.0
"""For the name of a cluster that is only mentioned."""


def status(
    model: OneModel = "",
    control: Control = "",
    as_json: Annotated[bool, typer.Option("--json", help="All of it, for programs.")] = False,
) -> None:
    """What is wanted, what is there, and the latest decisions with their reasons.

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
    count: Annotated[int, typer.Argument(min=0, help="Replicas there shall be.")],
    model: ModelName = "",
    control: Control = "",
    reason: Why = "",
    advise: Advise = False,
    wait: Wait = WAIT_S,
    yes: Yes = False,
) -> None:
    """So many workers of a role. What is too many is drained, what is missing is started.

    Example: baton scale decode 3 --reason "evening peak"
    """
    action = Scale(_role(role), count, model)
    _order(control, lambda state: action, _How(reason, advise, wait, yes))


def switch_role(
    worker: Annotated[str, typer.Argument(help="Name or id, as `baton status` shows it.")],
    role: Annotated[str, typer.Argument(help="prefill, decode or aggregated.")],
    model: OneModel = "",
    control: Control = "",
    reason: Why = "",
    advise: Advise = False,
    wait: Wait = WAIT_S,
    yes: Yes = False,
) -> None:
    """Give a running worker another role: it finishes what it holds, its weights stay loaded.

    Example: baton switch-role prefill-1 decode
    """
    asked = _role(role)
    _order(
        control,
        lambda state: SwitchRole(_worker(state, worker, model), asked),
        _How(reason, advise, wait, yes),
    )


def drain(
    target: Annotated[str, typer.Argument(metavar="WORKER|NODE", help="As `baton status` shows it.")],
    replace: Annotated[
        bool, typer.Option(help="Start another worker in its place, or make the pool one smaller.")
    ] = True,
    undo: Annotated[bool, typer.Option("--undo", help="Of a node: use it again.")] = False,
    model: OneModel = "",
    control: Control = "",
    reason: Why = "",
    advise: Advise = False,
    wait: Wait = WAIT_S,
    yes: Yes = False,
) -> None:
    """Empty a worker, or all workers of a node: they get nothing new, and streams finish or go on elsewhere.
    Waits until those started in their place serve.

    Example: baton drain decode-1 --reason "it is slow"
    """

    def action(state: ClusterState) -> Action:
        if model or state.replica(target) is not None:
            if undo:
                raise SetupError(
                    f"--undo is of nodes, and {target} is a worker: one that was drained does not come back; "
                    "another was started in its place, or `baton scale` starts one"
                )
            return Drain(_worker(state, target, model), replace)
        if not any(target and target in (n.host, n.node[: len(target)]) for n in state.nodes):
            names = ", ".join(
                [*(r.name for r in state.replicas[:20]), *(n.node[:12] for n in state.nodes[:20])]
            )
            raise SetupError(f"no worker and no node {target!r} here: there is {names}")
        return DrainNode(target, undo)

    _order(control, action, _How(reason, advise, wait, yes))


def rollout(
    version: Annotated[str, typer.Argument(help="A name for it; one that ran before takes it back.")],
    sets: Annotated[
        list[str],
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="What is different; repeatable."),
    ] = [],  # noqa: B006 - typer copies it
    model: ModelName = "",
    surge: Annotated[int, typer.Option(min=0, help="Workers per role beyond the usual, meanwhile.")] = 1,
    unavailable: Annotated[int, typer.Option(min=0, help="Workers per role that may be missing.")] = 0,
    control: Control = "",
    reason: Why = "",
    advise: Advise = False,
    wait: Wait = WAIT_S,
) -> None:
    """Exchange all workers of a model, a few at a time, for ones with other settings. No stream is lost. With
    nothing different, workers are only started anew.

    Example: baton rollout v2 --set engine.kv_bytes=1073741824 --unavailable 1 --surge 0
    """
    action = RollOut(Version(version, tuple(sets)), model, surge, unavailable)
    _order(control, lambda state: action, _How(reason, advise, wait))


def mount(app: typer.Typer) -> None:
    for command in (status, scale, switch_role, drain, rollout):
        app.command()(command)


# --- models ---------------------------------------------------------------------------------------


def _known(state: ClusterState, model: str) -> None:
    """Raises SetupError if there is no such model."""
    if model and state.pool(model) is None:
        names = ", ".join(pool.model for pool in state.pools) or "none"
        raise SetupError(f"no model {model!r} here: there is {names}")


def _of_model(state: ClusterState, model: str) -> ClusterState:
    """As if there were no other. Raises SetupError."""
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
    """What the control plane calls it. Raises SetupError if the model has no such worker."""
    _known(state, model)
    if not model:
        return worker
    if (replica := state.replica(worker, model=model)) is None:
        names = ", ".join(r.name for r in state.replicas if r.model == model) or "none"
        raise SetupError(f"{model} has no worker {worker!r}: there is {names}")
    return replica.name


# --- how ------------------------------------------------------------------------------------------


def _role(name: str) -> Role:
    try:
        return Role(name)
    except ValueError:
        raise SetupError(f"{name} is no role: choose prefill, decode or aggregated") from None


@dataclass(frozen=True)
class _How:
    """An order is given."""

    reason: str
    is_advice: bool
    wait_s: float
    is_sure: bool = False


def _order(control: str, action: Callable[[ClusterState], Action], how: _How) -> None:
    async def act(client: OperateClient) -> tuple[Decision, str]:
        state = await client.state()
        wanted = action(state)
        _mind_losses(wanted, state, how)
        who = f"operator {getpass.getuser()}"
        decision = await client.order(Order(wanted, who, how.reason, how.is_advice))
        if decision.outcome is not Outcome.ACCEPTED or not how.wait_s:
            return decision, ""
        print(f"{decision.text}: accepted", file=sys.stderr)
        try:
            async with asyncio.timeout(how.wait_s):
                ended = await _until_over(client, decision)
                if ended.outcome is Outcome.DONE and _is_replaced(wanted):
                    print(f"{ended.text}; waiting for what is started instead", file=sys.stderr)
                    return ended, await _until_all_there(client, _model_of(wanted, state))
                return ended, ""
        except TimeoutError:
            raise SetupError(f"not done within {how.wait_s:g} s; it goes on: see `baton status`") from None

    decision, then = _with(control, act)
    took = "" if decision.done_after_s is None else f" after {decision.done_after_s:.2f} s"
    typer.echo(f"{decision.outcome}{took}: {decision.text}{then}")
    if decision.outcome in (Outcome.REFUSED, Outcome.FAILED):
        raise typer.Exit(1)


def _mind_losses(action: Action, state: ClusterState, how: _How) -> None:
    """A person is asked whether a role may lose its last worker. Raises SetupError if nobody is there to ask,
    or the answer is no."""
    from control_plane.losses import loss_of

    loss = loss_of(action, state)
    if loss is None:
        return
    print(f"baton: warning: {loss.text}", file=sys.stderr)
    if not loss.is_lasting or how.is_advice or how.is_sure:
        return
    if not sys.stdin.isatty():
        raise SetupError("nothing was ordered: --yes says that it is meant")
    if not typer.confirm("Do it?", err=True):
        raise SetupError("nothing was ordered")


def _is_replaced(action: Action) -> bool:
    return (isinstance(action, Drain) and action.is_replaced) or (
        isinstance(action, DrainNode) and not action.is_undone
    )


async def _until_over(client: OperateClient, decision: Decision) -> Decision:
    """Also over a restart of the control plane: the log outlives it."""
    while True:
        try:
            async for state in client.changes():
                for known in state.decisions:
                    if known.number == decision.number and known.outcome is not Outcome.ACCEPTED:
                        return known
        except LinkBroken:
            await asyncio.sleep(1.0)


def _model_of(action: Action, state: ClusterState) -> str:
    """Whose worker is drained; empty: of any model."""
    replica = state.replica(action.worker) if isinstance(action, Drain) else None
    return replica.model if replica is not None else ""


async def _until_all_there(client: OperateClient, model: str) -> str:
    """What is wanted of this model, or of all, is there again. In words."""
    from control_plane.orders import has_all

    began_s = time.monotonic()
    while True:
        try:
            async for state in client.changes():
                pool = state.pool(model) if len(state.pools) > 1 else None
                if state.is_settled or (pool is not None and has_all(pool, state)):
                    return f"; all that is wanted serves, {time.monotonic() - began_s:.2f} s later"
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
    """Of the one cluster that runs on this machine and is ours. Raises SetupError."""
    found = sorted(set(_local_clusters()))
    if len(found) == 1:
        return found[0][0]
    if found:
        told = await asyncio.gather(*(_told(address, folder) for address, folder in found))
        raise SetupError(f"several clusters run here: choose one with --control, of {', '.join(told)}")
    raise SetupError("no cluster runs on this machine: name its control plane with --control HOST:PORT")


async def _told(address: str, folder: str) -> str:
    """How one cluster is told from another."""
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
    """Addresses and folders."""
    from control_plane.runtime_folder import ADDRESS_NAME, FOLDER_PREFIX, is_in_use

    for parent in {os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"} - {""}:
        for file in Path(parent).glob(f"{FOLDER_PREFIX}*/{ADDRESS_NAME}"):
            try:
                if file.stat().st_uid == os.getuid() and is_in_use(file.parent):
                    yield file.read_text(encoding="utf-8").strip(), str(file.parent)
            except OSError:
                continue  # it ends just now
