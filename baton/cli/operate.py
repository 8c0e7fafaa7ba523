"""Commands that look at a running cluster and change it: status, scale, flip, drain, rollout."""

import asyncio
import getpass
import os
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from baton.cli.settings import load_config
from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.core.operate import (
    Action,
    ClusterState,
    Decision,
    Drain,
    DrainNode,
    Flip,
    Order,
    Outcome,
    RollOut,
    Scale,
    Version,
)
from baton.wire.link import LinkBroken
from baton.wire.operate import OperateClient
from baton.wire.transport import secure

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

WAIT_S = 600.0


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
    from baton.cli.show_cluster import show

    show(state)


def scale(
    role: Annotated[str, typer.Argument(help="prefill, decode or both.")],
    count: Annotated[int, typer.Argument(min=0, help="Replicas there shall be.")],
    model: ModelName = "",
    control: Control = "",
    why: Why = "",
    advise: Advise = False,
    wait: Wait = WAIT_S,
) -> None:
    """So many workers of a role. What is too many is drained, what is missing is started.

    Example: baton scale decode 3 --why "evening peak"
    """
    action = Scale(_role(role), count, model)
    _order(control, lambda state: action, why, advise, wait)


def flip(
    worker: Annotated[str, typer.Argument(help="Name or id, as `baton status` shows it.")],
    role: Annotated[str, typer.Argument(help="prefill, decode or both.")],
    model: OneModel = "",
    control: Control = "",
    why: Why = "",
    advise: Advise = False,
    wait: Wait = WAIT_S,
) -> None:
    """Give a running worker another role: it finishes what it holds, its weights stay loaded.

    Example: baton flip prefill-1 decode
    """
    asked = _role(role)
    _order(control, lambda state: Flip(_worker(state, worker, model), asked), why, advise, wait)


def drain(
    target: Annotated[str, typer.Argument(metavar="WORKER|NODE", help="As `baton status` shows it.")],
    replace: Annotated[
        bool, typer.Option(help="Start another worker in its place, or make the pool one smaller.")
    ] = True,
    undo: Annotated[bool, typer.Option("--undo", help="Of a node: use it again.")] = False,
    model: OneModel = "",
    control: Control = "",
    why: Why = "",
    advise: Advise = False,
    wait: Wait = WAIT_S,
) -> None:
    """Empty a worker, or all workers of a node: they get nothing new, and streams finish or go on elsewhere.

    Example: baton drain decode-1 --why "it is slow"
    """

    def action(state: ClusterState) -> Action:
        if model or state.replica(target) is not None:
            return Drain(_worker(state, target, model), replace)
        if not any(target and target in (n.host, n.node[: len(target)]) for n in state.nodes):
            names = ", ".join(
                [*(r.name for r in state.replicas[:20]), *(n.node[:12] for n in state.nodes[:20])]
            )
            raise SetupError(f"no worker and no node {target!r} here: there is {names}")
        return DrainNode(target, undo)

    _order(control, action, why, advise, wait)


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
    why: Why = "",
    advise: Advise = False,
    wait: Wait = WAIT_S,
) -> None:
    """Exchange all workers of a model, a few at a time, for ones with other knobs. No stream is lost. With
    nothing different, workers are only started anew.

    Example: baton rollout v2 --set engine.kv_bytes=1073741824 --unavailable 1 --surge 0
    """
    action = RollOut(Version(version, tuple(sets)), model, surge, unavailable)
    _order(control, lambda state: action, why, advise, wait)


def mount(app: typer.Typer) -> None:
    for command in (status, scale, flip, drain, rollout):
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
        raise SetupError(f"{name} is no role: choose prefill, decode or both") from None


def _order(
    control: str, action: Callable[[ClusterState], Action], why: str, is_advice: bool, wait_s: float
) -> None:
    async def act(client: OperateClient) -> Decision:
        who = f"operator {getpass.getuser()}"
        decision = await client.order(Order(action(await client.state()), who, why, is_advice))
        if decision.outcome is not Outcome.ACCEPTED or not wait_s:
            return decision
        print(f"{decision.text}: accepted", file=sys.stderr)
        try:
            async with asyncio.timeout(wait_s):
                return await _until_over(client, decision)
        except TimeoutError:
            raise SetupError(f"not done within {wait_s:g} s; it goes on: see `baton status`") from None

    decision = _with(control, act)
    took = "" if decision.done_after_s is None else f" after {decision.done_after_s:.2f} s"
    typer.echo(f"{decision.outcome}{took}: {decision.text}")
    if decision.outcome in (Outcome.REFUSED, Outcome.FAILED):
        raise typer.Exit(1)


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


def _with(control: str, call: Callable[[OperateClient], Coroutine[Any, Any, Any]]) -> Any:
    config = load_config()
    secure(config.tls, config.access)

    async def run() -> Any:
        client = OperateClient(control or _only_cluster())
        try:
            return await call(client)
        except LinkBroken as error:
            raise SetupError(f"the control plane does not answer: {error}") from None
        finally:
            await client.close()

    return asyncio.run(run())


def _only_cluster() -> str:
    """Of the one cluster that runs on this machine and is ours. Raises SetupError."""
    found = sorted(set(_local_clusters()))
    if len(found) == 1:
        return found[0]
    if found:
        raise SetupError(f"several clusters run here: choose one with --control, of {', '.join(found)}")
    raise SetupError("no cluster runs on this machine: name its control plane with --control HOST:PORT")


def _local_clusters() -> Iterator[str]:
    from control_plane.runtime_folder import ADDRESS_NAME, FOLDER_PREFIX, is_in_use

    for parent in {os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"} - {""}:
        for file in Path(parent).glob(f"{FOLDER_PREFIX}*/{ADDRESS_NAME}"):
            try:
                if file.stat().st_uid == os.getuid() and is_in_use(file.parent):
                    yield file.read_text(encoding="utf-8").strip()
            except OSError:
                continue  # it ends just now
