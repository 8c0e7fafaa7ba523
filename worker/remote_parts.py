"""The leader's side of KV in pools that it does not map: a stand-in for each part, and the link to all.

Such pools are on other hosts, or in memory that a rank has for itself (`engine.collectives=torch`).
"""

import asyncio
import subprocess
from collections.abc import Callable, Collection, Sequence

import msgspec

from baton.config import Config, TransferConfig
from baton.core.errors import SetupError
from baton.core.geometry import KVGeometry
from baton.core.ids import WorkerId
from baton.core.shape import Shape
from engine.execution.follower_process import start_follower
from engine.execution.spread import FollowerSetup, Reach, begin_mesh
from engine.parallel.collectives import collectives_of
from engine.parallel.group import GroupBroken
from engine.parallel.mesh import Mesh
from kv_transfer.part_transfer import OwnPart
from kv_transfer.remote_messages import PartOrder, PartReport
from kv_transfer.remote_part import PartLost, RemotePart
from worker.frame_link import FrameLink
from worker.part_thread import PartSetup, StageSetup
from worker.stage_actor import FOLLOWER

JOIN_S = 30.0
"""The followers have read their parts of the model by then."""


def remote_ranks(config: Config, far: Collection[int] = ()) -> tuple[int, ...]:
    """The ranks whose KV the leader does not map. `far` are the stages on other hosts."""
    shape = Shape.parse(config.engine.shape)
    if shape.is_single:
        return ()
    if collectives_of(config.engine.collectives, config.model.device) == "torch":
        return shape.pool_ranks(range(shape.pipeline))[1:]
    return shape.pool_ranks(far)


class RemoteParts:
    """The parts of a worker's blocks that its leader does not map, by rank. One for the life of a worker."""

    def __init__(
        self, mesh: Mesh, worker_id: WorkerId, ranks: Sequence[int], transfer: TransferConfig
    ) -> None:
        """Take a star over whose ranks are the leader and those that have a part each."""
        self._mesh, self._worker_id, self._transfer = mesh, worker_id, transfer
        self._link_ranks = {rank: number for number, rank in enumerate(ranks, start=1)}
        self._parts: dict[int, RemotePart] = {}
        """The keys are ranks in the link."""
        self._link: FrameLink | None = None
        self._is_closing = False

    @classmethod
    def create(
        cls, worker_id: WorkerId, ranks: Sequence[int], reach: Reach, transfer: TransferConfig
    ) -> "RemoteParts":
        """`ranks` are those whose KV pool the leader does not map. Raises SetupError."""
        if transfer.checksums:
            raise SetupError(
                "transfer.checksums needs all KV of a worker within reach of its leader, and that of this "
                "one is on several hosts or devices: set it to false"
            )
        return cls(begin_mesh(len(ranks) + 1, reach, is_star=True), worker_id, ranks, transfer)

    def launch(self, follower: FollowerSetup) -> "subprocess.Popen[bytes]":
        """Start the process of a rank of this host, which has a part."""
        return start_follower(msgspec.json.encode(self.setup(follower)), module=FOLLOWER)

    def setup(self, follower: FollowerSetup) -> StageSetup:
        """What the process of a rank is told."""
        part = None
        if (link_rank := self._link_ranks.get(follower.rank)) is not None:
            name = WorkerId(f"{self._worker_id}/rank{follower.rank}")
            part = PartSetup(self._mesh.address, link_rank, name, tuple(self._transfer.backends))
        return StageSetup(follower, part)

    async def join(self, generations: Sequence[int], on_lost: Callable[[str], None]) -> None:
        """Wait until all parts are there. `generations` is the table of whoever gives blocks out. `on_lost`
        is called with a reason if a part is lost before `close`. Raises GroupBroken."""
        await asyncio.to_thread(self._mesh.wait_for_all, JOIN_S)
        self._mesh.be_strict()
        encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(PartReport).decode

        def lost(reason: str) -> None:
            for part in self._parts.values():
                part.lost(reason)
            if not self._is_closing:
                on_lost(reason)

        def stand_in(rank: int, link_rank: int) -> RemotePart:
            def send(order: PartOrder) -> None:
                link.send(link_rank, encode(order))

            return RemotePart(f"rank {rank}", send=send, generations=generations, on_silent=lost)

        self._parts = {number: stand_in(rank, number) for rank, number in self._link_ranks.items()}
        link = self._link = FrameLink(
            self._mesh, on_frame=lambda rank, data: self._parts[rank].heard(decode(data)), on_end=lost
        )
        try:
            await asyncio.gather(*(part.start() for part in self._parts.values()))
        except PartLost as error:
            raise GroupBroken(str(error)) from error

    def lost(self, reason: str) -> None:
        """The ranks of this worker are lost, as another connection with them has shown."""
        for part in self._parts.values():
            part.lost(reason)

    def parts(self, whole: KVGeometry, *, block_count: int) -> list[OwnPart]:
        """The parts, after `join`. Raises SetupError."""
        try:
            return [
                OwnPart(part.places(whole, block_count=block_count), None, part)
                for part in self._parts.values()
            ]
        except ValueError as error:
            raise SetupError(str(error)) from None

    async def close(self) -> None:
        """Idempotent."""
        self._is_closing = True
        if self._link is not None:
            await self._link.close()
        await asyncio.to_thread(self._mesh.close)
