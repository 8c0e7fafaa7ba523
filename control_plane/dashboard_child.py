"""The dashboard as a supervised child, so that its work costs the control plane nothing."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from baton.config import Config
from baton.core.errors import SetupError
from control_plane.child import LIVE_PATH, Child, child_environment
from control_plane.plane import restart_policy

log = logging.getLogger(__name__)

DashboardCommand = Callable[[str], Sequence[str]]
"""Function from the address of a control plane to the argv of a dashboard for it."""

END_S = 3.0
WAIT_S = 15.0
"""The longest time that the start waits for the workers."""

SILENCE_S = 60.0
"""Least time without an answer after which the dashboard is killed. No request depends on it, and a restart
loses its history, so a busy machine gets time."""


class DashboardChild(Child):
    """The dashboard as a child. Its ready line has its URL and how to sign in."""

    name = "dashboard"

    def live_url(self, ready: str) -> str:
        return f"{ready.split(' ', 1)[0]}{LIVE_PATH}"

    @classmethod
    def of(cls, command: DashboardCommand, config: Config, control_address: str) -> "DashboardChild":
        return cls(
            command(control_address),
            environment=child_environment(config),
            policy=restart_policy(config.cluster),
            silence_s=max(SILENCE_S, config.cluster.router_silence_s),
        )

    async def run_beside(
        self, announce: Callable[[str], None], *, after: asyncio.Event | None, wait_s: float = WAIT_S
    ) -> None:
        """Run the dashboard, and call `announce` once with its URL. The cluster serves without a dashboard as
        well, so an error that keeps it from starting is only logged. It starts when `after` is set, or after
        `wait_s`, so that it can show why workers do not come."""
        if after is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await after.wait()
        announcing = asyncio.create_task(self._announce(announce))
        try:
            await self.run()
        finally:
            announcing.cancel()

    async def _announce(self, announce: Callable[[str], None]) -> None:
        try:
            where = await asyncio.shield(self.ready)
        except SetupError as error:
            log.warning("dashboard cannot start: %s", error)
            return
        log.info("dashboard at %s", where)
        announce(where)
