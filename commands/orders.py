"""How commands reach a control plane, give it an order and wait until that is done."""

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

import typer

from baton.core.errors import SetupError
from baton.core.operate import (
    Action,
    ClusterState,
    Decision,
    DrainNode,
    DrainWorker,
    Order,
    Outcome,
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
PROGRESS_S = 1.0
"""Least time between two lines of progress."""

ASK_S = 2.0
"""Longest wait for the names of a cluster's models, which only an error text shows."""


@dataclass(frozen=True)
class OrderOptions:
    """The options that all orders share."""

    reason: str
    is_advice: bool
    wait_s: float
    is_sure: bool = False


@dataclass(frozen=True)
class OrderWatch:
    """What is shown, and waited for, while an order is followed."""

    progress: Callable[[ClusterState], str]
    """One line about the present state."""
    is_whole: Callable[[ClusterState], bool]
    """Whether everything is back that the order took away."""
    whole: str
    """The text that says so."""


def give_order(
    control: str,
    action: Callable[[ClusterState], Action],
    options: OrderOptions,
    watch_of: Callable[[ClusterState], OrderWatch] | None = None,
) -> None:
    """Give the order that `action` makes of the present state, and wait for its end. `watch_of` gets that
    state too. Raises SetupError."""

    async def act(client: OperateClient) -> tuple[Decision, str]:
        state = await client.state()
        wanted, watch = action(state), watch_of(state) if watch_of is not None else None
        _mind_losses(wanted, state, options)
        who = f"operator {getpass.getuser()}"
        decision = await client.order(Order(wanted, who, options.reason, options.is_advice))
        if decision.outcome is not Outcome.ACCEPTED or not options.wait_s:
            return decision, ""
        print(f"{decision.text}: accepted", file=sys.stderr)
        try:
            async with asyncio.timeout(options.wait_s):
                ended = await _until_over(client, decision, watch)
                if ended.outcome is Outcome.DONE and watch is not None:
                    return ended, await _until_whole(client, watch)
                if ended.outcome is Outcome.DONE and _is_replaced(wanted):
                    print(f"{ended.text}; waiting for the replacements", file=sys.stderr)
                    return ended, await _until_all_there(client, _model_of(wanted, state))
                return ended, ""
        except TimeoutError:
            raise SetupError(
                f"not done within {options.wait_s:g} s; but it is still running: see `baton status`"
            ) from None

    decision, then = with_control(control, act)
    took = "" if decision.done_after_s is None else f" after {decision.done_after_s:.2f} s"
    typer.echo(f"{decision.outcome}{took}: {decision.text}{then}")
    if decision.outcome in (Outcome.REFUSED, Outcome.FAILED):
        raise typer.Exit(1)


def _mind_losses(action: Action, state: ClusterState, options: OrderOptions) -> None:
    """Ask the operator to confirm a loss of capacity that lasts. Raises SetupError if there is nobody to ask,
    or if the answer is no."""
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


class _Progress:
    """Prints a line whenever it differs from the last one, at most once a second."""

    def __init__(self, watch: OrderWatch | None) -> None:
        self._watch, self._line, self._next_s = watch, "", 0.0

    def show(self, state: ClusterState) -> None:
        if self._watch is None or time.monotonic() < self._next_s:
            return
        line = self._watch.progress(state)
        if line != self._line:
            print(line, file=sys.stderr)
            self._line, self._next_s = line, time.monotonic() + PROGRESS_S


async def _until_over(client: OperateClient, decision: Decision, watch: OrderWatch | None) -> Decision:
    """Wait for the outcome, also across a restart of the control plane, whose decision log survives it."""
    progress = _Progress(watch)
    while True:
        try:
            async for state in client.changes():
                progress.show(state)
                for known in state.decisions:
                    if known.number == decision.number and known.outcome is not Outcome.ACCEPTED:
                        return known
        except LinkBroken:
            await asyncio.sleep(1.0)


async def _until_whole(client: OperateClient, watch: OrderWatch) -> str:
    """Wait until everything is back that the order took away. Returns that as text."""
    began_s, progress = time.monotonic(), _Progress(watch)
    while True:
        try:
            async for state in client.changes():
                if watch.is_whole(state):
                    return f"; {watch.whole}, {time.monotonic() - began_s:.2f} s later"
                progress.show(state)
        except LinkBroken:
            pass
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


def with_control(control: str, call: Callable[[OperateClient], Coroutine[Any, Any, Any]]) -> Any:
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
    found = sorted(set(local_clusters()))
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


def local_clusters() -> Iterator[tuple[str, str]]:
    """The address and folder of every cluster that this user runs here."""
    from control_plane.runtime_folder import ADDRESS_NAME, FOLDER_PREFIX, is_in_use

    for parent in {os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"} - {""}:
        for file in Path(parent).glob(f"{FOLDER_PREFIX}*/{ADDRESS_NAME}"):
            try:
                if file.stat().st_uid == os.getuid() and is_in_use(file.parent):
                    yield file.read_text(encoding="utf-8").strip(), str(file.parent)
            except OSError:
                continue  # the cluster is just ending
