"""The control plane as a supervised child of `baton serve`. It may die without ending what it manages."""

import asyncio
from collections.abc import Mapping, Sequence

from baton.core.errors import SetupError
from control_plane.child import LIVE_PATH, SETUP_ERROR_PREFIX, Child
from control_plane.reconcile_events import RestartPolicy

SETTLED_LINE = "settled"
"""Line printed once all workers serve for the first time."""

DASHBOARD_PREFIX = "dashboard "
"""Beginning of the line that names the dashboard's URL and how to sign in, printed once it serves."""


class ControlChild(Child):
    """The control plane as a child. Its ready line has the gRPC address and the metrics address, separated by
    a blank."""

    name = "control plane"

    def __init__(
        self, argv: Sequence[str], *, environment: Mapping[str, str], policy: RestartPolicy, silence_s: float
    ) -> None:
        super().__init__(argv, environment=environment, policy=policy, silence_s=silence_s)
        self.settled = asyncio.Event()
        self.dashboard = ""
        """URL of the dashboard and how to sign in. Empty: there is none, or it is not ready yet."""
        self.has_dashboard = asyncio.Event()
        self.failed: asyncio.Future[SetupError] = asyncio.get_running_loop().create_future()
        """The setup error that the operator must resolve before the first workers can serve."""

    def live_url(self, ready: str) -> str:
        return f"http://{ready.rsplit(' ', 1)[-1]}{LIVE_PATH}"

    async def _run_once(self) -> int:
        status = await super()._run_once()
        if not self.ready.done() and not self._is_stopping:
            self._fail(self._setup_error or "the control plane cannot start: see the lines above")
        return status

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            text = line.decode(errors="replace").strip()
            if text == SETTLED_LINE:
                self.settled.set()
            elif text.startswith(DASHBOARD_PREFIX):
                self.dashboard = text.removeprefix(DASHBOARD_PREFIX)
                self.has_dashboard.set()
            elif text.startswith(SETUP_ERROR_PREFIX) and not self.settled.is_set():
                self._fail(text.removeprefix(SETUP_ERROR_PREFIX))

    def _fail(self, text: str) -> None:
        if not self.failed.done():
            self.failed.set_result(SetupError(text))
