"""The router as a supervised child process of the control plane."""

import asyncio
import contextlib

import httpx

from control_plane.child import LIVE_PATH, PROBE_S, Child

HEALTH_PATH = "/health"
CONNECTED_PROBE_S = 0.1


class RouterChild(Child):
    name = "router"

    @property
    def url(self) -> asyncio.Future[str]:
        """Of the first start. SetupError if that fails for want of something only a person can give."""
        return self.ready

    def live_url(self, ready: str) -> str:
        return f"{ready}{LIVE_PATH}"

    async def until_connected(self, worker_count: int) -> None:
        """Returns once the router has a session with this many workers: from then on requests find all
        of them. Ask only when that many workers serve."""
        url = await asyncio.shield(self.url)
        async with httpx.AsyncClient(trust_env=False, timeout=PROBE_S) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    pools = (await client.get(f"{url}{HEALTH_PATH}")).json()["workers"]
                    if sum(map(len, pools.values())) >= worker_count:
                        return
                await asyncio.sleep(CONNECTED_PROBE_S)
