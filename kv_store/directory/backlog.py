"""Changes that a node has still to publish in the directory, in order. Pure."""

from collections import deque

from baton.core.store import StoreChanges


class PublishBacklog:
    """A bounded queue. When more than `changes_max` messages wait, they are dropped and a snapshot is needed
    instead. A snapshot's own messages are always taken, since they hold no more than the node does, and its
    first one drops all that waits."""

    def __init__(self, *, changes_max: int) -> None:
        self._changes_max = changes_max
        self._waiting: deque[StoreChanges] = deque()
        self._change_count = 0
        self.needs_snapshot = True
        """Only a snapshot is worth publishing; other changes are dropped."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def head(self) -> StoreChanges | None:
        return self._waiting[0] if self._waiting else None

    @property
    def begins_with_snapshot(self) -> bool:
        return bool(self._waiting) and _begins_snapshot(self._waiting[0])

    def put(self, changes: StoreChanges) -> None:
        if _begins_snapshot(changes):
            self.drop()
            self.needs_snapshot = False
        if self.needs_snapshot:
            return
        self._waiting.append(changes)
        self._change_count += not changes.is_snapshot
        if self._change_count > self._changes_max:
            self.drop()

    def on_published(self, changes: StoreChanges) -> None:
        """Remove changes that the directory has taken in. Nothing happens if they are not the head any
        more."""
        if self._waiting and self._waiting[0] is changes:
            self._waiting.popleft()
            self._change_count -= not changes.is_snapshot

    def drop(self) -> None:
        """Drop everything; it will be published again."""
        self._waiting.clear()
        self._change_count = 0
        self.needs_snapshot = True


def _begins_snapshot(changes: StoreChanges) -> bool:
    return changes.is_snapshot and changes.is_first
