"""The node's standing with the directory: its lease, its changes, its look-ups."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from baton.core.store import Holding, NodeRef, StoreChanges, StoreMember
from baton.store.peers import Spawn
from kv_store.directory.interface import Directory, DirectoryLost
from kv_store.node import events as e

log = logging.getLogger(__name__)

CHANGES_MAX = 1024
"""Messages waiting for the directory; beyond that it is told everything anew, when it answers."""

LEAVE_S = 1.0
"""For saying goodbye; without it the lease lapses by itself."""


class Membership:
    """While the directory is away the node goes on with what it holds, and keeps trying."""

    def __init__(
        self,
        directory: Directory | None,
        *,
        member: Callable[[], StoreMember],
        post: Callable[[e.NodeEvent], None],
        spawn: Spawn,
        lease_s: float,
    ) -> None:
        """`directory` None: this node is alone."""
        self._directory, self._member, self._post, self._spawn = directory, member, post, spawn
        self._lease_s = lease_s
        self._waiting: deque[StoreChanges] = deque()
        self._has_changes = asyncio.Event()
        self._peers: tuple[NodeRef, ...] = ()
        self._must_tell_all = False
        """Something was not told: the next answer is followed by a snapshot."""
        self.trouble = ""
        """Why it does not answer; empty while it does."""

    @property
    def peers(self) -> tuple[NodeRef, ...]:
        return self._peers

    async def run(self) -> None:
        """Renews the lease, looks who else is there, and tells what changed."""
        if self._directory is None:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew_all(self._directory))
            tasks.create_task(self._publish_all(self._directory))

    def publish(self, changes: StoreChanges) -> None:
        if self._directory is None:
            return
        if len(self._waiting) >= CHANGES_MAX:
            self._waiting.clear()
            self._must_tell_all = True
        if not self._must_tell_all or changes.is_snapshot:
            self._waiting.append(changes)
            self._has_changes.set()

    def look_up(self, action: e.LookUp) -> None:
        if self._directory is None or self.trouble:
            nobody: tuple[tuple[Holding, ...], ...] = ((),) * len(action.hashes)
            self._post(e.LookedUp(action.lookup_id, nobody))
        else:
            self._spawn(self._look_up(self._directory, action))

    async def leave(self) -> None:
        if self._directory is None:
            return
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._directory.leave(self._member().node.node_id)
        except (TimeoutError, DirectoryLost):
            pass  # the lease lapses
        await self._directory.close()

    # --- lease ------------------------------------------------------------------------------------

    async def _renew_all(self, directory: Directory) -> None:
        loop = asyncio.get_running_loop()
        period_s = self._lease_s / 6
        while True:
            began_s = loop.time()
            try:
                knows_us = await directory.renew(self._member(), lease_s=self._lease_s)
                members = await directory.members()
            except DirectoryLost as error:
                self._lost(error)
            else:
                self._answered(knows_us, members)
            await asyncio.sleep(max(0.0, period_s - (loop.time() - began_s)))

    def _answered(self, knows_us: bool, members: tuple[StoreMember, ...]) -> None:
        if self.trouble:
            log.info("the directory answers again")
        self.trouble = ""
        if self._must_tell_all or (not knows_us and not self._waiting):
            self._tell_all()
        ours = self._member().node.node_id
        peers = tuple(sorted((m.node for m in members if m.node.node_id != ours), key=lambda n: n.node_id))
        if peers != self._peers:
            self._peers = peers
            self._post(e.PeersChanged(peers))

    def _lost(self, error: DirectoryLost) -> None:
        if not self.trouble:
            log.warning("the directory does not answer, going on without: %s", error)
        self.trouble = str(error) or "no answer"

    def _tell_all(self) -> None:
        self._must_tell_all = False
        self._waiting.clear()
        self._post(e.DirectoryForgot())

    # --- changes and look-ups ---------------------------------------------------------------------

    async def _publish_all(self, directory: Directory) -> None:
        while True:
            await self._has_changes.wait()
            if not self._waiting:
                self._has_changes.clear()
                continue
            changes = self._waiting.popleft()
            try:
                is_known = await directory.publish(changes)
            except DirectoryLost as error:
                self._lost(error)
                is_known = False
            if not is_known:  # told all after the next renewal, which it may want to see first
                self._waiting.clear()
                self._must_tell_all = True

    async def _look_up(self, directory: Directory, action: e.LookUp) -> None:
        found: list[tuple[Holding, ...]] = [()] * len(action.hashes)
        try:
            async with asyncio.timeout(action.timeout_s):
                found = await directory.look_up(action.hashes)
        except TimeoutError:
            log.debug("the directory took longer than %g s for a look-up", action.timeout_s)
        except DirectoryLost as error:
            self._lost(error)
        self._post(e.LookedUp(action.lookup_id, tuple(found)))
