"""Tells the control plane what is asked of this router, as often as it wants to hear it."""

import asyncio

import msgspec

from baton.core.demand import DemandReport
from baton.core.ids import RouterId
from baton.wire.demand import DemandClient
from baton.wire.link import LinkBroken
from router.live.driver import Driver

FIRST_S = 1.0
"""Until the control plane has said how often, and between attempts while it is away."""
EVERY_S_MIN, EVERY_S_MAX = 0.1, 30.0


class DemandReporter:
    """Of one model."""

    def __init__(self, driver: Driver, client: DemandClient, router_id: RouterId, *, model: str = "") -> None:
        self._driver, self._client, self._router_id, self._model = driver, client, router_id, model

    async def run(self) -> None:
        """Until cancelled. What is not received is in the next report: they have totals."""
        while True:
            try:
                reply = await self._client.report(self._report())
                pause_s = min(EVERY_S_MAX, max(EVERY_S_MIN, reply.every_s))
            except LinkBroken:  # which is told by whoever watches the directory
                pause_s = FIRST_S
            await asyncio.sleep(pause_s)

    def _report(self) -> DemandReport:
        return msgspec.structs.replace(self._driver.demand(self._router_id), model=self._model)
