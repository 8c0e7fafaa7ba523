"""Changes that a node has still to publish in the directory, in order. Pure."""

from collections import deque

import msgspec

from baton.core.store import StoreChanges

TOGETHER_MAX = 1024
"""Most changes of one message that was put together from several."""


class PublishBacklog:
    """A bounded queue, which numbers its messages.

    What waits is put together, so that the directory hears of many blocks at once. When more than
    `changes_max` changes of blocks wait, they are dropped and a snapshot is needed instead. A snapshot's own
    messages are always taken, since they hold no more than the node does, and its first one drops all that
    waits.
    """

    def __init__(self, *, changes_max: int) -> None:
        self._changes_max = changes_max
        self._waiting: deque[StoreChanges] = deque()
        self._change_count = 0
        self._last_number = 0
        self._is_begun = False
        """The first message was sent, so it must stay as it is: the directory may have taken it in."""
        self.needs_snapshot = True
        """Only a snapshot is worth publishing; other changes are dropped."""

    def __len__(self) -> int:
        """Number of messages that wait."""
        return len(self._waiting)

    @property
    def begins_with_snapshot(self) -> bool:
        return bool(self._waiting) and _begins_snapshot(self._waiting[0])

    @property
    def is_urgent(self) -> bool:
        """Whether the first message should not wait for others to join it: it was sent before, belongs to a
        snapshot, or has another behind it that did not fit in."""
        if len(self._waiting) > 1 or self._is_begun:
            return True
        return bool(self._waiting) and self._waiting[0].is_snapshot

    def put(self, changes: StoreChanges) -> None:
        if _begins_snapshot(changes):
            self.drop()
            self.needs_snapshot = False
        if self.needs_snapshot:
            return
        last = self._waiting[-1] if len(self._waiting) > int(self._is_begun) else None
        merged = None if last is None else _merged(last, changes)
        if last is None or merged is None:
            self._last_number += 1
            self._waiting.append(msgspec.structs.replace(changes, sequence_number=self._last_number))
            self._change_count += _size(changes)
        else:
            self._waiting[-1] = merged
            self._change_count += _size(merged) - _size(last)
        if self._change_count > self._changes_max:
            self.drop()

    def begin(self) -> StoreChanges | None:
        """Return the first message, which is sent now; None if nothing waits."""
        self._is_begun = bool(self._waiting)
        return self._waiting[0] if self._waiting else None

    def on_published(self, changes: StoreChanges) -> None:
        """Remove a message that the directory has taken in. Nothing happens if it is not the first any
        more."""
        if self._waiting and self._waiting[0] is changes:
            self._waiting.popleft()
            self._change_count -= _size(changes)
            self._is_begun = False

    def drop(self) -> None:
        """Drop everything; it will be published again."""
        self._waiting.clear()
        self._change_count = 0
        self._is_begun = False
        self.needs_snapshot = True


def _begins_snapshot(changes: StoreChanges) -> bool:
    return changes.is_snapshot and changes.is_first


def _size(changes: StoreChanges) -> int:
    """Number of changes that count against the bound."""
    return 0 if changes.is_snapshot else len(changes.stored) + len(changes.removed)


def _merged(first: StoreChanges, then: StoreChanges) -> StoreChanges | None:
    """Return one message that says what both say, numbered as the first; None if it would be too long, or
    part of a snapshot."""
    if first.is_snapshot or then.is_snapshot or _size(first) + _size(then) > TOGETHER_MAX:
        return None
    stored = dict(first.stored)
    removed = dict.fromkeys(first.removed)
    for block_hash in then.removed:
        stored.pop(block_hash, None)
        removed[block_hash] = None
    for block_hash, tier in then.stored:
        stored.pop(block_hash, None)  # the directory forgets the longest known first
        stored[block_hash] = tier
        removed.pop(block_hash, None)
    return msgspec.structs.replace(first, stored=tuple(stored.items()), removed=tuple(removed))
