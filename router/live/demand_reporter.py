"""Reports of this router's demand to the control plane, at the interval that it asks for."""

import asyncio

import msgspec

from baton.core.demand import DemandReport
from baton.core.ids import RouterId
from baton.wire.demand import DemandClient
from baton.wire.link import LinkBroken
from router.live.driver import Driver

FIRST_S = 1.0
"""Interval until the control plane has set one, and between attempts while it is away."""
EVERY_S_MIN, EVERY_S_MAX = 0.1, 30.0


class DemandReporter:
    """Reporter of the demand for one model."""

    def __init__(self, driver: Driver, client: DemandClient, router_id: RouterId, *, model: str = "") -> None:
        self._driver, self._client, self._router_id, self._model = driver, client, router_id, model

    async def run(self) -> None:
        """Send reports until cancelled. A lost report is in the next one, since reports have totals."""
        while True:
            try:
                reply = await self._client.report(self._report())
                pause_s = min(EVERY_S_MAX, max(EVERY_S_MIN, reply.every_s))
            except LinkBroken:  # The watch of the directory logs this.
                pause_s = FIRST_S
            await asyncio.sleep(pause_s)

    def _report(self) -> DemandReport:
        return msgspec.structs.replace(self._driver.demand(self._router_id), model=self._model)
