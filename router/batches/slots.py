"""Slots that tenants share fairly: whoever has the fewest gets the next one."""

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator


class FairSlots:
    """A bounded number of slots. A free one goes to the waiting tenant that holds the fewest, and among
    equals to the one whose last turn is longest ago, however many wait for each."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._held = Counter[str]()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def one(self, tenant: str) -> AsyncGenerator[None]:
        """Hold one slot."""
        await self._take(tenant)
        try:
            yield
        finally:
            self._give_back(tenant)

    async def _take(self, tenant: str) -> None:
        if self._free and not self._waiting:
            self._free -= 1
            self._held[tenant] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(tenant)  # It came at the moment of the cancellation.
            else:
                self._forget(tenant, turn)
            raise

    def _forget(self, tenant: str, turn: "asyncio.Future[None]") -> None:
        line = self._waiting.get(tenant)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[tenant]

    def _give_back(self, tenant: str) -> None:
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._free += 1
        while self._free and self._waiting:
            # The first of equals: tenants move to the end when they have had a turn.
            chosen = min(self._waiting, key=lambda name: self._held[name])
            line = self._waiting.pop(chosen)
            turn = line.popleft()
            if line:
                self._waiting[chosen] = line
            if not turn.done():  # A cancelled one is in line until its task has run.
                self._free -= 1
                self._held[chosen] += 1
                turn.set_result(None)
