"""A remote part's side of KV transfer: its transfer manager, beside the orders of its follower's process."""

import asyncio
import logging
import threading
from concurrent.futures import Future

import msgspec

from baton.core.ids import WorkerId
from baton.core.transfer_backends import BackendName
from baton.wire.address import host_port, reachable_host
from engine.execution.executor import Executor
from engine.execution.spread import FollowerSetup, join_mesh
from engine.parallel.group import GroupBroken
from engine.parallel.meeting import MeetingPlace
from engine.parallel.mesh import Mesh
from kv_transfer.manager import TransferManager
from kv_transfer.part_service import PartService
from kv_transfer.remote_messages import PartOrder, PartReady, PartReport
from worker.frame_link import FrameLink
from worker.transfer import part_manager, part_memories

log = logging.getLogger(__name__)

LEADER = 0
JOIN_S = 1800.0
"""The longest time for the leader and the other hosts to read their parts of the model."""
START_S = 120.0
"""The longest time for transfer backends to start."""
END_S = 2.0


class PartSetup(msgspec.Struct, frozen=True):
    """What the process of a remote part is told beside its `FollowerSetup`."""

    link_address: str
    """The group of the leader and all remote parts."""
    link_rank: int
    name: WorkerId
    backends: tuple[BackendName, ...]


class StageSetup(msgspec.Struct, frozen=True):
    """What a follower's process on another host reads from its standard input."""

    follower: FollowerSetup
    part: PartSetup | None
    """None: its KV pool is another rank's."""


class PartThread:
    """A context in which the leader can let this process read KV, and peers can read it here."""

    def __init__(self, setup: PartSetup, executor: Executor) -> None:
        self._setup, self._kv, (self._part,) = setup, executor.kv, executor.parts
        self._started: Future[Mesh] = Future()
        self._thread = threading.Thread(target=self._run, name="kv-part", daemon=True)
        self._is_strict = False
        self._crashing: asyncio.Task[None] | None = None

    def __enter__(self) -> "PartThread":
        """Raises SetupError: no backend works here, or the leader is not reached."""
        self._thread.start()
        self._mesh = self._started.result(START_S)
        return self

    def __exit__(self, *exception: object) -> None:
        self._mesh.close()
        self._thread.join(END_S)

    def _run(self) -> None:
        asyncio.run(self._live())

    async def _live(self) -> None:
        setup, (memory,) = self._setup, (memory for _, memory in part_memories([self._part]))
        try:
            host = _own_host(setup.link_address)
            manager = part_manager(setup.name, self._part.pool, memory, setup.backends, host=host)
        except BaseException as error:
            self._started.set_exception(error)
            return
        try:
            await manager.start()
            mesh = await asyncio.to_thread(join_mesh, setup.link_address, setup.link_rank, is_star=True)
        except BaseException as error:
            await manager.close()
            self._started.set_exception(error)
            return
        self._started.set_result(mesh)
        try:
            await asyncio.to_thread(mesh.wait_for_all, JOIN_S)
            await self._serve(mesh, manager)
        except GroupBroken as error:
            log.info("%s", error)
        except Exception as error:
            log.exception("KV transfer fails")
            await asyncio.to_thread(mesh.abort, f"KV transfer fails: {type(error).__name__}: {error}")
        finally:
            await manager.close()

    async def _serve(self, mesh: Mesh, manager: TransferManager) -> None:
        over = asyncio.Event()
        encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(PartOrder).decode

        def report(what: PartReport) -> None:
            link.send(LEADER, encode(what))

        def on_crash(reason: str) -> None:
            log.error("KV transfer fails: %s", reason)
            self._crashing = asyncio.create_task(link.abort(f"KV transfer fails: {reason}"))

        service = PartService(
            manager, raise_generations=self._kv.raise_generations, report=report, on_crash=on_crash
        )

        def on_frame(rank: int, data: bytes) -> None:
            if not self._is_strict:  # the first order means that all serve
                self._is_strict = True
                mesh.be_strict()
            service.take(decode(data))

        def on_end(reason: str) -> None:
            log.info("KV transfer ends: %s", reason)
            over.set()

        link = FrameLink(mesh, on_frame=on_frame, on_end=on_end)
        report(self._ready(manager))
        await over.wait()
        await service.close()
        await link.close()

    def _ready(self, manager: TransferManager) -> PartReady:
        layers, heads, pool = self._part
        return PartReady(
            first_layer=layers.start,
            layer_count=len(layers),
            first_head=heads.start,
            head_count=len(heads),
            block_bytes=pool.block_bytes,
            block_count=pool.block_count,
            offers=manager.offers(),
            left_out=manager.left_out,
        )


def _own_host(link_address: str) -> str:
    """This host as the leader reaches it, and with it the peers of the worker. Raises SetupError."""
    place = MeetingPlace.parse(link_address)
    everywhere = "::" if ":" in place.host else "0.0.0.0"
    return reachable_host(everywhere, towards=host_port(place.host, place.port))
