"""Counting of budgets: in this router, or in one shared place for all routers; and what happens when that is
away."""

import asyncio
import logging
from typing import Protocol

import msgspec

from baton.core.budgets import Ask, Grant, Ledger, Settle
from baton.wire.budgets import BudgetsClient
from baton.wire.link import LinkBroken
from kv_store.directory.interface import DirectoryLost

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause after the shared place did not answer."""


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
    equal part among the routers that were there last."""

    def __init__(self, shared: Budgets) -> None:
        self._shared, self._local = shared, LocalBudgets()
        self._router_count = 1
        self._away_until_s = float("-inf")
        self.is_away = False

    async def take(self, ask: Ask) -> Grant:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._away_until_s:
            try:
                grant = await self._shared.take(ask)
            except DirectoryLost as error:
                self._lost(error, now_s)
            else:
                self._router_count, self.is_away = grant.router_count, False
                return grant
        return await self._local.take(divided(ask, self._router_count))

    async def settle(self, settle: Settle) -> None:
        """Give the refund back to both places, since it is not known any more where it was taken. That errs
        for the client, by at most what was in flight when the shared place went away."""
        part = max(1, settle.tokens_per_minute // self._router_count) if settle.tokens_per_minute else 0
        await self._local.settle(msgspec.structs.replace(settle, tokens_per_minute=part))
        now_s = asyncio.get_running_loop().time()
        if now_s < self._away_until_s:
            return
        try:
            await self._shared.settle(settle)
        except DirectoryLost as error:
            self._lost(error, now_s)

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
