"""A worker's lease in the directory."""

import asyncio
import logging
from collections.abc import Callable

from baton.core.messages import Member
from baton.wire.client import DirectoryClient
from baton.wire.link import LinkBroken

log = logging.getLogger(__name__)

LEAVE_S = 0.5
"""The time for saying goodbye; without it the lease lapses by itself."""


class Registration:
    """Renews the lease every `period_s`. While the directory is gone the worker goes on serving whoever knows
    it, and keeps trying."""

    def __init__(self, address: str, member: Callable[[], Member], *, period_s: float) -> None:
        self._address, self._member, self._period_s = address, member, period_s
        self._client = DirectoryClient(address)
        self._is_known = True

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            await self._renew()
            await asyncio.sleep(max(0.0, self._period_s - (loop.time() - began_s)))

    async def _renew(self) -> None:
        try:
            await self._client.renew(self._member())
        except LinkBroken as error:
            if self._is_known:
                log.warning("the directory does not answer, going on without: %s", error)
            self._is_known = False
            # A new channel tries at once; the old one backs off for longer and longer.
            await self._client.close()
            self._client = DirectoryClient(self._address)
        else:
            if not self._is_known:
                log.info("the directory answers again")
            self._is_known = True

    async def leave(self) -> None:
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._client.leave(self._member().worker_id)
        except (TimeoutError, LinkBroken):
            pass  # the lease lapses
        await self._client.close()
