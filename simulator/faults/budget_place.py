"""The place where all routers of a cluster count the budgets of tenants: the control plane's ledger."""

import asyncio
from collections.abc import Callable

from baton.core.budgets import Ask, Grant, Ledger, Settle
from kv_store.directory.interface import DirectoryLost
from simulator.faults.network import Network


class BudgetPlace:
    """The ledger itself."""

    def __init__(self, now_s: Callable[[], float], is_away: Callable[[], bool]) -> None:
        self.ledger = Ledger()
        self.now_s, self.is_away = now_s, is_away
        self.was_away = False


class RemoteBudgetPlace:
    """One router's way to the place. `router.tenants.budgets.Budgets`."""

    def __init__(self, place: BudgetPlace, network: Network, *, timeout_s: float) -> None:
        self._place, self._network, self._timeout_s = place, network, timeout_s

    async def take(self, ask: Ask) -> Grant:
        await self._reach()
        grant = self._place.ledger.take(ask, now_s=self._place.now_s())
        await self._travel()
        return grant

    async def settle(self, settle: Settle) -> None:
        await self._reach()
        self._place.ledger.settle(settle, now_s=self._place.now_s())

    async def close(self) -> None:
        pass

    async def _travel(self) -> None:
        delay_s = self._network.delay_s()
        await asyncio.sleep(min(delay_s, self._timeout_s / 2))
        if delay_s > self._timeout_s / 2:
            self._place.was_away = True
            raise DirectoryLost("the control plane does not answer in time")

    async def _reach(self) -> None:
        await self._travel()
        if self._place.is_away():
            self._place.was_away = True
            raise DirectoryLost("the control plane does not answer")
