"""The dashboard as a supervised child of the control plane, so that looking costs it nothing."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from baton.config import Config
from baton.core.errors import SetupError
from control_plane.child import LIVE_PATH, Child, child_environment
from control_plane.plane import restart_policy

log = logging.getLogger(__name__)

DashboardCommand = Callable[[str], Sequence[str]]
"""The argv of a dashboard that looks at the control plane at this address."""

END_S = 3.0

SILENCE_S = 60.0
"""Nobody's request depends on it, and killed it forgets what was seen: on a busy machine it is waited for."""


class DashboardChild(Child):
    """Its ready line: its URL, and how to sign in."""

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

    async def run_beside(self, announce: Callable[[str], None]) -> None:
        """`tell` is told, once, where it is. Without a dashboard the cluster serves as well: what keeps it
        from starting is logged, and no more."""
        announcing = asyncio.create_task(self._announce(announce))
        try:
            await self.run()
        finally:
            announcing.cancel()

    async def _announce(self, announce: Callable[[str], None]) -> None:
        try:
            where = await asyncio.shield(self.ready)
        except SetupError as error:
            log.warning("no dashboard: %s", error)
            return
        log.info("dashboard at %s", where)
        announce(where)
