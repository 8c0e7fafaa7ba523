"""Makes forgotten slots unfindable, a moment later and on a thread of its own.

A slot that is forgotten is mostly written again at once (that is why its block was evicted), and the write
covers it: then erasing would only cost a second write. So what is to be erased waits for a moment, and a
write that comes first takes it off the list.
"""

import threading
import time
from collections.abc import Callable

from kv_store.ssd.errors import DiskError

ERASE_DELAY_S = 0.25


class Eraser:
    def __init__(self, erase: Callable[[int], None], *, name: str, delay_s: float = ERASE_DELAY_S) -> None:
        """`erase(slot)` raises DiskError."""
        self._erase, self._delay_s = erase, delay_s
        self._pending: dict[int, float] = {}
        """When to erase each slot, earliest first."""
        self._under_way: int | None = None
        self._in_haste = 0
        self._is_closing = False
        self._error: DiskError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, slot: int) -> None:
        """Erase the slot later. Returns at once."""
        with self._changed:
            self._pending.pop(slot, None)
            self._pending[slot] = time.monotonic() + self._delay_s
            self._changed.notify_all()

    def take_off(self, slot: int) -> None:
        """Take a slot off the list before it is written. It waits while the slot is just being erased."""
        with self._changed:
            self._pending.pop(slot, None)
            self._changed.wait_for(lambda: self._under_way != slot)

    def finish(self) -> None:
        """Wait until everything added so far is erased. Raises DiskError if one slot could not be."""
        with self._changed:
            self._in_haste += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pending and self._under_way is None)
            self._in_haste -= 1
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Erase what is left. Raises DiskError as `finish` does."""
        try:
            self.finish()
        finally:
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
            self._thread.join()

    def _run(self) -> None:
        while (slot := self._next()) is not None:
            try:
                self._erase(slot)
            except DiskError as error:
                self._error = error
            with self._changed:
                self._under_way = None
                self._changed.notify_all()

    def _next(self) -> int | None:
        """The slot that is due first, once it is; None when closing."""
        with self._changed:
            while True:
                wait_s = None
                if self._pending:
                    slot, due_s = next(iter(self._pending.items()))
                    is_hasty = self._in_haste or self._is_closing
                    wait_s = 0.0 if is_hasty else due_s - time.monotonic()
                    if wait_s <= 0:
                        del self._pending[slot]
                        self._under_way = slot
                        return slot
                elif self._is_closing:
                    return None
                self._changed.wait(wait_s)
