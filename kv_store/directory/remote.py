"""The control plane's directory, over gRPC."""

from collections.abc import Awaitable, Sequence
from typing import TypeVar

from baton.core.ids import BlockHash, NodeId
from baton.core.store import BlockLocation, StoreChanges, StoreMember
from baton.wire.link import LinkBroken
from baton.wire.store_directory import StoreDirectoryClient
from kv_store.directory.interface import DirectoryLost

T = TypeVar("T")


class RemoteDirectory:
    """Implements `kv_store.directory.interface.Directory`. It reconnects by itself, within a second of the
    control plane's return."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self._client = StoreDirectoryClient(address, timeout_s=timeout_s)

    async def renew(self, member: StoreMember, *, lease_s: float) -> bool:
        return await _directory_errors(self._client.renew(member, lease_s=lease_s))

    async def leave(self, node_id: NodeId) -> None:
        await _directory_errors(self._client.leave(node_id))

    async def members(self) -> tuple[StoreMember, ...]:
        return await _directory_errors(self._client.members())

    async def publish(self, changes: StoreChanges) -> bool:
        return await _directory_errors(self._client.publish(changes))

    async def look_up(self, hashes: Sequence[BlockHash]) -> list[tuple[BlockLocation, ...]]:
        return await _directory_errors(self._client.look_up(hashes))

    async def close(self) -> None:
        await self._client.close()


async def _directory_errors(call: Awaitable[T]) -> T:
    try:
        return await call
    except LinkBroken as error:
        raise DirectoryLost(str(error)) from None
