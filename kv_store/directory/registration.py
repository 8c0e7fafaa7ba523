"""A store node's side of the directory: its lease, what it publishes, what it looks up, which other nodes
there are."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from baton.core.store import BlockLocation, NodeRef, StoreChanges, StoreMember
from kv_store.directory.backlog import PublishBacklog
from kv_store.directory.interface import Directory, DirectoryLost
from kv_store.node.events import DirectoryForgot, LookedUp, LookUp, NodeEvent, PeersChanged

log = logging.getLogger(__name__)

CHANGES_MAX = 65_536
"""Changes of blocks that wait for the directory. If there are more, everything is published anew when it
answers."""

PUBLISH_EVERY_S = 0.5
"""Time in which changes go together after a message: each costs the control plane about 2 ms of a busy core.
The first change after a pause is told at once, and so are full messages, snapshots and what is sent again."""

LOOK_UPS_MAX = 64
"""Look-ups under way at once; one more is answered with nothing."""

RETRY_S = 1.0
"""The time from one failure to the next attempt, at most."""

LEAVE_S = 1.0
"""The time for saying goodbye; without it the lease lapses by itself."""


class StoreRegistration:
    """Stands between a NodeCore and its directory, whichever that is. While the directory is away the node
    goes on with what it holds: changes to publish wait, within a bound, and look-ups are answered with
    nothing.

    `post` takes events for the core: DirectoryForgot when everything must be published again, PeersChanged,
    LookedUp. `spawn` runs a coroutine beside the others. With `directory` None this node is alone, and
    nothing happens.
    """

    def __init__(
        self,
        directory: Directory | None,
        *,
        member: Callable[[], StoreMember],
        post: Callable[[NodeEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], Any],
        lease_s: float,
        changes_max: int = CHANGES_MAX,
        patience_s: float = 0.0,
        publish_every_s: float = PUBLISH_EVERY_S,
    ) -> None:
        """`patience_s` is the time that a directory which starts together with this node may take before it
        is missed."""
        self._patience_s = patience_s
        self._missing_since_s: float | None = None
        """The time since when it is missing, while the log does not say so."""
        self._directory, self._member, self._post, self._spawn = directory, member, post, spawn
        self._lease_s = lease_s
        self._backlog = PublishBacklog(changes_max=changes_max)
        self._wake = asyncio.Event()
        self._renewal_s = 0.0
        """When the next renewal is due, by the loop's clock."""
        self._publish_every_s, self._publish_s = publish_every_s, 0.0
        """The least time between two messages, and from when on the next one may be sent."""
        self._look_up_count = 0
        self.peers: tuple[NodeRef, ...] = ()
        self.trouble = ""
        """Why the directory does not answer; empty while it does."""
        self.forgot_count = 0
        """How often everything was published, the first time included."""

    # --- performing the core's actions ------------------------------------------------------------

    def publish(self, changes: StoreChanges) -> None:
        """Publish changes, in the order of the core's Publish actions. The backlog numbers them anew."""
        if self._directory is not None:
            had_too_many = self._backlog.needs_snapshot
            self._backlog.put(changes)
            if self._backlog.needs_snapshot and not (had_too_many or self.trouble):
                self._renewal_s = 0.0  # which asks for the snapshot
            self._wake.set()

    def look_up(self, action: LookUp) -> None:
        """Look hashes up. It is always answered by one LookedUp, within the action's timeout and a little."""
        if self._directory is None or self.trouble or self._look_up_count >= LOOK_UPS_MAX:
            self._post(LookedUp(action.lookup_id, _nothing(action)))
            return
        self._look_up_count += 1
        self._spawn(self._look_up(self._directory, action))

    # --- life -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the lease and publish until cancelled. One call runs at a time, so that an answer about a
        snapshot is never older than what was published."""
        if self._directory is None:
            return
        loop = asyncio.get_running_loop()
        self._renewal_s = loop.time()
        while True:
            now_s = loop.time()
            if now_s >= self._renewal_s:
                await self._renew(self._directory)
            elif self.trouble or not len(self._backlog):
                await self._wait(self._renewal_s - now_s)
            elif now_s < self._publish_s and not self._backlog.is_urgent:
                await self._wait(min(self._renewal_s, self._publish_s) - now_s)
            else:
                await self._publish(self._directory)

    async def leave(self) -> None:
        """Leave, after `run` was cancelled. It closes the directory's client."""
        if self._directory is None:
            return
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._directory.leave(self._member().node.node_id)
        except (TimeoutError, DirectoryLost):
            pass  # the lease lapses
        await self._directory.close()

    async def _wait(self, seconds: float) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._wake.wait()
        except TimeoutError:
            pass

    # --- lease ------------------------------------------------------------------------------------

    async def _renew(self, directory: Directory) -> None:
        self._renewal_s = asyncio.get_running_loop().time() + self._lease_s / 3
        try:
            is_known = await directory.renew(self._member(), lease_s=self._lease_s)
            members = await directory.members()
        except DirectoryLost as error:
            self._lost(error)
            return
        if self.trouble:
            if self._missing_since_s is None:
                log.info("the directory answers again")
            self.trouble = ""
        self._patience_s, self._missing_since_s = 0.0, None
        if self._backlog.needs_snapshot or not (is_known or self._backlog.begins_with_snapshot):
            self._tell_all()
        self._peers_are(members)

    def _peers_are(self, members: tuple[StoreMember, ...]) -> None:
        ours = self._member().node.node_id
        peers = tuple(member.node for member in members if member.node.node_id != ours)
        if peers != self.peers:
            self.peers = peers
            self._post(PeersChanged(peers))

    def _lost(self, error: DirectoryLost) -> None:
        now_s = asyncio.get_running_loop().time()
        if not self.trouble:
            self._missing_since_s = now_s
        if self._missing_since_s is not None and now_s >= self._missing_since_s + self._patience_s:
            self._missing_since_s = None
            log.warning("the directory does not answer, going on without: %s", error)
        self.trouble = str(error) or "no answer"
        retry_s = now_s + min(self._lease_s / 3, RETRY_S)
        self._renewal_s = min(self._renewal_s, retry_s)
        self._wake.set()

    def _tell_all(self) -> None:
        self._backlog.drop()
        self.forgot_count += 1
        self._post(DirectoryForgot())

    # --- changes and look-ups ---------------------------------------------------------------------

    async def _publish(self, directory: Directory) -> None:
        changes = self._backlog.begin()
        assert changes is not None
        self._publish_s = asyncio.get_running_loop().time() + self._publish_every_s
        try:
            is_known = await directory.publish(changes)
        except DirectoryLost as error:
            self._lost(error)  # it stays the first: a second arrival does no harm
            return
        if is_known:
            self._backlog.on_published(changes)
            return
        # The lease may have lapsed: a snapshot comes after the next renewal. That is now, but not again and
        # again for a directory that takes no snapshot in either.
        if not (changes.is_snapshot and changes.is_first):
            self._renewal_s = asyncio.get_running_loop().time()
        self._backlog.drop()

    async def _look_up(self, directory: Directory, action: LookUp) -> None:
        found = _nothing(action)
        try:
            async with asyncio.timeout(action.timeout_s):
                found = tuple(await directory.look_up(action.hashes))
        except TimeoutError:
            log.debug("the directory took longer than %g s for a look-up", action.timeout_s)
        except DirectoryLost as error:
            self._lost(error)
        finally:
            self._look_up_count -= 1
        self._post(LookedUp(action.lookup_id, found))


def _nothing(action: LookUp) -> tuple[tuple[BlockLocation, ...], ...]:
    return ((),) * len(action.hashes)
