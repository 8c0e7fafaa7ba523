"""The control plane as a supervised child of `baton serve`. It may die without ending what it manages."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from baton.core.errors import SetupError
from control_plane.child import LIVE_PATH, SETUP_ERROR_PREFIX, Child
from control_plane.reconcile_events import RestartPolicy

SETTLED_LINE = "settled"
"""Line printed once all workers serve for the first time."""

DASHBOARD_PREFIX = "dashboard "
"""Beginning of the line that names the dashboard's URL and how to sign in, printed once it serves."""


START_S = 180.0
"""Longest time from starting the control plane to its ready line, Ray's own start included, because it loads
its libraries while Ray starts."""


class ControlChild(Child):
    """The control plane as a child. Its ready line has the gRPC address and the metrics address, separated by
    a blank."""

    name = "control plane"
    start_s = START_S
    has_input = True

    def __init__(
        self, argv: Sequence[str], *, environment: Mapping[str, str], policy: RestartPolicy, silence_s: float
    ) -> None:
        super().__init__(argv, environment=environment, policy=policy, silence_s=silence_s)
        self._ray_address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.settled = asyncio.Event()
        self.dashboard = ""
        """URL of the dashboard and how to sign in. Empty: there is none, or it is not ready yet."""
        self.has_dashboard = asyncio.Event()
        self.failed: asyncio.Future[SetupError] = asyncio.get_running_loop().create_future()
        """The setup error that the operator must resolve before the first workers can serve."""

    def tell_ray(self, address: str) -> None:
        """Tell the child, and each that follows it, the address of the Ray cluster to join."""
        self._ray_address.set_result(address)

    async def _tell(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        address = await asyncio.shield(self._ray_address)
        with contextlib.suppress(OSError):  # the child has ended, which `run` sees
            process.stdin.write(f"{address}\n".encode())
            await process.stdin.drain()
            process.stdin.close()

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
