"""Processes as detached Ray actors: followed until they end, adopted by the next control plane, killed.

Ray starts, places and ends processes. What they say to each other never passes through it.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import psutil

from baton.core.messages import Role
from control_plane.node_choice import NodeChoice, group_of
from control_plane.ray_cluster import RayCluster, first_line

log = logging.getLogger(__name__)

IDENTIFY_S = 5.0
"""Time for a process of an earlier control plane to report its identity. A frozen one does not."""

KILL_S = 2.0
"""Longest time from SIGKILL to the end of the process, which usually takes milliseconds."""


class ProcessIdentity(Protocol):
    @property
    def model(self) -> str: ...

    @property
    def role(self) -> Role: ...

    @property
    def node(self) -> str: ...

    @property
    def host(self) -> str: ...

    @property
    def pid(self) -> int: ...


Name = TypeVar("Name", bound=str)
Identity = TypeVar("Identity", bound=ProcessIdentity)


def _nothing() -> None:
    pass


@dataclass(slots=True)
class _RayActor:
    handle: Any
    watcher: asyncio.Task[None] | None = None
    process: psutil.Process | None = None
    """A process on our own host. psutil knows when it was created, so a later owner of the pid is never
    signalled."""
    release: Callable[[], None] = _nothing
    """Gives back what was reserved for the process."""
    identity: Any = None
    is_known: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is an identity, or there will be none."""


class RayProcesses(Generic[Name, Identity]):
    """Actors that have the async methods `identity() -> Identity` and `serve() -> reason`, which runs for the
    life of the process. `on_exit(name, reason)` is called once for each, when the process has ended or could
    not be started."""

    def __init__(
        self,
        home: RayCluster,
        *,
        kind: str,
        on_exit: Callable[[Name, BaseException | str], None],
        choice: NodeChoice,
    ) -> None:
        """`kind` is what log lines call such a process."""
        self._home, self._kind, self._on_exit = home, kind, on_exit
        self._choice = choice
        self._actors: dict[Name, _RayActor] = {}

    @property
    def names(self) -> tuple[Name, ...]:
        """Processes that run, start or have not ended yet."""
        return tuple(self._actors)

    def handle(self, name: Name) -> Any:
        """The actor, or None."""
        actor = self._actors.get(name)
        return actor.handle if actor is not None else None

    async def identity(self, name: Name, *, timeout_s: float) -> Identity | None:
        """The identity that a process reports when it has started; None if it does not in time."""
        actor = self._actors.get(name)
        if actor is None:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await actor.is_known.wait()
        return actor.identity

    def follow(self, name: Name, handle: Any, release: Callable[[], None] = _nothing) -> None:
        actor = self._actors[name] = _RayActor(handle, release=release)
        actor.watcher = asyncio.create_task(self._watch(name, actor), name=name)

    async def survivors(
        self, namespace: str, make: Callable[[str], Name], release: Callable[[Name], Callable[[], None]]
    ) -> list[tuple[Name, Identity]]:
        """Return the processes of an earlier control plane in this namespace, and follow them from now on.
        One that does not answer is killed."""
        named: list[dict[str, str]] = await asyncio.to_thread(
            self._home.ray.util.list_named_actors, all_namespaces=True
        )
        names = [make(actor["name"]) for actor in named if actor["namespace"] == namespace]
        found = await asyncio.gather(*(self._identify(name, namespace, release) for name in names))
        return [survivor for survivor in found if survivor is not None]

    async def _identify(
        self, name: Name, namespace: str, release: Callable[[Name], Callable[[], None]]
    ) -> tuple[Name, Identity] | None:
        handle: Any = None
        try:
            handle = await asyncio.to_thread(self._home.ray.get_actor, name, namespace)
            async with asyncio.timeout(IDENTIFY_S):
                identity: Identity = await handle.identity.remote()
        except TimeoutError:
            log.warning("%s %s of an earlier control plane does not answer; killing it", self._kind, name)
            self._kill_actor(_RayActor(handle))
            return None
        except Exception as error:  # it died since it was listed
            log.info("%s %s of an earlier control plane is gone: %s", self._kind, name, first_line(error))
            return None
        self.follow(name, handle, release(name))
        return name, identity

    async def kill(self, name: Name) -> None:
        """Kill a process at once, even if a signal has stopped it. Ray alone would report such a process as
        dead and leave it there."""
        if (actor := self._actors.get(name)) is not None:
            _sigkill(actor.process)
            self._kill_actor(actor)

    def _kill_actor(self, actor: _RayActor) -> None:
        if self._home.is_lost:
            return
        try:
            actor.release()
            self._home.ray.kill(actor.handle, no_restart=True)
        except Exception as error:  # an error of Ray must not prevent the restart of a process
            log.warning("Ray cannot kill an actor: %s", first_line(error))

    async def close(self, *, leaves_them: bool = False) -> None:
        """Kill the remaining processes, or leave them to the next control plane. Idempotent."""
        if not leaves_them:
            for name in list(self._actors):
                await self.kill(name)
        watchers = [actor.watcher for actor in self._actors.values() if actor.watcher is not None]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)

    async def _watch(self, name: Name, actor: _RayActor) -> None:
        serving = actor.handle.serve.remote()
        reason: BaseException | str
        try:
            actor.identity = identity = await actor.handle.identity.remote()
            actor.is_known.set()
            self._choice.found(name, group_of(self._kind, identity.model, identity.role), identity.node)
            if identity.host == socket.gethostname():
                actor.process = psutil.Process(identity.pid)
            reason = await serving
        except asyncio.CancelledError:
            raise
        except Exception as error:
            reason = _cause(error)
        actor.is_known.set()
        _sigkill(actor.process)  # Ray may report a process as dead while it still exists
        self._kill_actor(actor)
        await asyncio.to_thread(_wait_gone, actor.process)
        self._actors.pop(name, None)
        self._choice.forget(name)
        self._on_exit(name, reason)


def _cause(error: Exception) -> BaseException | str:
    """Return the exception of the actor's own code, which Ray wraps together with the actor's traceback, or a
    text which says that the process is gone."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return cause
    name = type(error).__name__
    if "died" in name.lower():
        return "its process died"
    if name == "ActorUnavailableError":  # Ray's first error when a whole node is lost
        return "its process cannot be reached"
    return error


def _sigkill(process: psutil.Process | None) -> None:
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _wait_gone(process: psutil.Process | None) -> None:
    if process is None:
        return
    try:
        process.wait(KILL_S)
    except psutil.NoSuchProcess:
        pass  # the state we wanted
    except psutil.TimeoutExpired:
        log.error("process %d did not end after SIGKILL", process.pid)
