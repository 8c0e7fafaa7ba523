"""Turns at one thing, round robin between those who want it."""

import asyncio
from collections import OrderedDict, deque


class FairTurns:
    """One holder at a time. Keys have their turns in rotation, however many wait under each."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_taken = False

    async def take(self, key: str) -> None:
        """Wait for a turn. `release` ends it."""
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # it came at the moment of the cancellation
            else:
                self._forget(key, turn)
            raise

    def release(self) -> None:
        """Pass the turn on."""
        while self._waiting:
            key, line = self._waiting.popitem(last=False)
            turn = line.popleft()
            if line:
                self._waiting[key] = line
            if not turn.done():  # a cancelled one is still in line until its task has run
                turn.set_result(None)
                return
        self._is_taken = False

    def _forget(self, key: str, turn: "asyncio.Future[None]") -> None:
        line = self._waiting.get(key)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[key]
