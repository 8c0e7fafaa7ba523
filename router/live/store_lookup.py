"""Lookups in the store's directory, before a request is placed, for the blocks of its prompt that hosts
have."""

import asyncio
import logging
from collections.abc import Sequence

from baton.core.ids import BlockHash, NodeId
from kv_store.directory.interface import Directory, DirectoryLost
from router.decisions.stored_prefix import StoredPrefix, stored_prefix

log = logging.getLogger(__name__)

BLOCKS_MIN = 8
"""Fewest blocks that are looked up. Fewer are computed sooner."""
BLOCKS_MAX = 4096
CALLS_MAX = 64
"""Most calls at once. Further requests are placed without a lookup."""
MEMBERS_S = 2.0
"""Time between two looks at the list of nodes."""
AWAY_S = 1.0
"""Pause after a failure, since a directory that is away must not delay every request."""


class StoreLookup:
    """A client of the directory. `of` never raises and never takes longer than `timeout_s`."""

    def __init__(self, directory: Directory, *, timeout_s: float) -> None:
        """The lookup owns the directory: `close` closes it."""
        self._directory, self._timeout_s = directory, timeout_s
        self._host_of: dict[NodeId, str] = {}
        self._members_until_s = float("-inf")
        self._calls = 0
        self._away_until_s = float("-inf")

    async def of(self, hashes: Sequence[BlockHash]) -> StoredPrefix | None:
        """Return the stored blocks. None: nothing is stored, or it cannot be known in time."""
        now_s = asyncio.get_running_loop().time()
        if len(hashes) < BLOCKS_MIN or self._calls >= CALLS_MAX or now_s < self._away_until_s:
            return None
        self._calls += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._look_up(hashes[:BLOCKS_MAX], now_s)
        except (DirectoryLost, TimeoutError) as error:
            self._away_until_s = asyncio.get_running_loop().time() + AWAY_S
            log.info("placing without the store's directory: %s", str(error) or "no answer in time")
            return None
        finally:
            self._calls -= 1

    async def _look_up(self, hashes: Sequence[BlockHash], now_s: float) -> StoredPrefix | None:
        if self._members_until_s <= now_s:
            self._members_until_s = now_s + MEMBERS_S
            members = await self._directory.members()
            self._host_of = {m.node.node_id: m.host for m in members if not m.is_draining}
        if not self._host_of:
            return None
        return stored_prefix(await self._directory.look_up(hashes), self._host_of)

    async def close(self) -> None:
        await self._directory.close()
