"""Tells the directory what this node gained and lost, in order."""

from baton.core.ids import BlockHash
from baton.core.store import StoreChanges, Tier
from kv_store.node.context import HASHES_MAX, Context
from kv_store.node.events import Publish


class Publisher:
    """Publishes changes. Those of one event go together, and of a block that came and went only the
    result."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._published: dict[BlockHash, Tier] = {}
        """What the directory was told that we hold."""
        self._changed: dict[BlockHash, Tier | None] = {}
        self._sequence_number = 0

    def block_is(self, block_hash: BlockHash, tier: Tier | None) -> None:
        """Set the fastest tier of a block; None if it is not here any more."""
        self._changed[block_hash] = tier

    def flush(self) -> None:
        if not self._changed:
            return
        changed, self._changed = self._changed, {}
        here = [(h, tier) for h, tier in changed.items() if tier is not None]
        stored = [(h, tier) for h, tier in here if self._published.get(h) != tier]
        removed = [h for h, tier in changed.items() if tier is None and h in self._published]
        self._published.update(stored)
        for block_hash in removed:
            del self._published[block_hash]
        for first in range(0, max(len(stored), len(removed)), HASHES_MAX):
            end = first + HASHES_MAX
            self._publish(stored[first:end], removed[first:end])

    def snapshot(self) -> None:
        """Publish everything again, in one or more messages."""
        self.flush()
        held = list(self._published.items())
        for first in range(0, max(1, len(held)), HASHES_MAX):
            end = first + HASHES_MAX
            ends = {"is_first": first == 0, "is_last": end >= len(held)}
            self._publish(held[first:end], [], is_snapshot=True, **ends)

    def reported(self) -> dict[BlockHash, Tier]:
        return self._published

    def _publish(
        self,
        stored: list[tuple[BlockHash, Tier]],
        removed: list[BlockHash],
        *,
        is_snapshot: bool = False,
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        self._sequence_number += 1
        changes = StoreChanges(
            node_id=self._context.node.node_id,
            sequence_number=self._sequence_number,
            stored=tuple(stored),
            removed=tuple(removed),
            is_snapshot=is_snapshot,
            is_first=is_first,
            is_last=is_last,
        )
        self._context.emit(Publish(changes))
