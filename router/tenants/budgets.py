"""Counting of budgets: in this router, or in one shared place for all routers; and what happens when that is
away."""

import asyncio
import logging
from collections import deque
from typing import Protocol

import msgspec

from baton.core.budgets import Ask, Grant, Ledger, Settle
from baton.wire.budgets import BudgetsClient
from baton.wire.link import LinkBroken
from kv_store.directory.interface import DirectoryLost

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause after the shared place did not answer."""
UNSETTLED_MAX = 4096
"""Settlements kept while the shared place is away. Older ones are dropped, and those requests keep their
charge."""
SETTLED_AT_ONCE = 64


class Budgets(Protocol):
    async def take(self, ask: Ask) -> Grant:
        """Take from the budgets. Raises DirectoryLost if there is no answer in time."""
        ...

    async def settle(self, settle: Settle) -> None:
        """Give back the refund. Raises DirectoryLost if there is no answer in time."""
        ...

    async def close(self) -> None: ...


class LocalBudgets:
    def __init__(self) -> None:
        self._ledger = Ledger()

    async def take(self, ask: Ask) -> Grant:
        return self._ledger.take(ask, now_s=asyncio.get_running_loop().time())

    async def settle(self, settle: Settle) -> None:
        self._ledger.settle(settle, now_s=asyncio.get_running_loop().time())

    async def close(self) -> None:
        pass


class RemoteBudgets:
    """Budgets that the control plane counts."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self._client = BudgetsClient(address, timeout_s=timeout_s)

    async def take(self, ask: Ask) -> Grant:
        try:
            return await self._client.take(ask)
        except LinkBroken as error:
            raise DirectoryLost(str(error)) from None

    async def settle(self, settle: Settle) -> None:
        try:
            await self._client.settle(settle)
        except LinkBroken as error:
            raise DirectoryLost(str(error)) from None

    async def close(self) -> None:
        await self._client.close()


class SharedBudgets:
    """Budgets of a shared place. While that is away, this router spends its part of the budget by itself: an
    equal part among the routers that were there last.

    Every request is settled where it took. What cannot be settled because the place is away is settled when
    it is back, and so is a request of which it is not known whether it took anything there."""

    def __init__(self, shared: Budgets) -> None:
        self._shared, self._local = shared, LocalBudgets()
        self._router_count = 1
        self._away_until_s = float("-inf")
        self.is_away = False
        self._own: dict[str, int] = {}
        """Leases that were taken from this router's own part, and tokens per minute of that part."""
        self._unsettled: deque[Settle] = deque(maxlen=UNSETTLED_MAX)
        """Settlements that the shared place has not confirmed."""

    async def take(self, ask: Ask) -> Grant:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._away_until_s:
            try:
                grant = await self._shared.take(ask)
            except DirectoryLost as error:
                self._unsettled.append(Settle(ask.tenant, ask.lease, ask.tokens, ask.tokens_per_minute))
                self._lost(error, now_s)
            except BaseException:  # Nobody hears the answer, which may be a grant.
                self._unsettled.append(Settle(ask.tenant, ask.lease, ask.tokens, ask.tokens_per_minute))
                raise
            else:
                self._router_count, self.is_away = grant.router_count, False
                return grant
        part = divided(ask, self._router_count)
        grant = await self._local.take(part)
        if grant.is_granted:
            self._own[ask.lease] = part.tokens_per_minute
        return grant

    async def settle(self, settle: Settle) -> None:
        part = self._own.pop(settle.lease, None)
        if part is not None:
            await self._local.settle(msgspec.structs.replace(settle, tokens_per_minute=part))
        else:
            self._unsettled.append(settle)
        await self._settle_shared()

    async def _settle_shared(self) -> None:
        """Send what is not settled, oldest first, as long as the shared place answers."""
        for _ in range(SETTLED_AT_ONCE):
            now_s = asyncio.get_running_loop().time()
            if not self._unsettled or now_s < self._away_until_s:
                return
            settle = self._unsettled.popleft()
            try:
                await self._shared.settle(settle)
            except DirectoryLost as error:
                self._unsettled.appendleft(settle)
                self._lost(error, now_s)
            except BaseException:  # It may not have arrived. A second copy has no effect.
                self._unsettled.appendleft(settle)
                raise

    def _lost(self, error: DirectoryLost, now_s: float) -> None:
        if not self.is_away:
            log.warning("budgets are this router's own for now (1/%d): %s", self._router_count, error)
        self.is_away, self._away_until_s = True, now_s + RETRY_S

    async def close(self) -> None:
        await self._shared.close()


def divided(ask: Ask, router_count: int) -> Ask:
    """Return one router's part of each limit, at least 1."""

    def part(limit: int) -> int:
        return max(1, limit // router_count) if limit else 0

    return msgspec.structs.replace(
        ask,
        requests_per_minute=part(ask.requests_per_minute),
        tokens_per_minute=part(ask.tokens_per_minute),
        concurrent_max=part(ask.concurrent_max),
    )
