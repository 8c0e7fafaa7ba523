"""Supervised child processes of the control plane: the router, and the store node of this host."""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence

import httpx
import msgspec

from baton.config import Config
from baton.core.errors import SetupError
from control_plane.reconcile import RestartPolicy

log = logging.getLogger(__name__)

READY_PREFIX = "ready "
"""Beginning of the one line that a ready child prints on standard output. Its addresses follow."""

SETUP_ERROR_PREFIX = "setup error "
"""Beginning of the line that a child prints in place of the ready line when a person must change something.
The text follows, and the child exits with `SETUP_ERROR_STATUS`."""

SETUP_ERROR_STATUS = 2
LIVE_PATH = "/health/live"
START_S = 60.0
"""Longest time from starting a child to its ready line."""

PROBE_S = 2.0
"""Time between two liveness probes of a child; a quarter of the silence after which it is killed, where that
is less."""

PATIENCE_S_MIN = 1.0
"""Least time that a probe waits for its answer."""

KILL_S = 2.0
"""Longest time from SIGKILL to the end of the process."""


PARENT_VARIABLE = "PARENT_OF_BATON"
"""Environment variable with the process id of a child's parent. A parent may well be process 1, as in a
container, so a child cannot tell from that number alone that its parent is gone."""

NOT_PASSED_ON = ("BATON_", "RAY_AUTH_")
"""Prefixes of environment variables that children do not inherit: a router has no business with Ray."""


def child_environment(config: Config) -> dict[str, str]:
    """Return this process's environment with the whole configuration in it. A child then sees the same
    values, whether they came from the command line, the environment or a default."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED_ON)}
    values = config.model_dump(mode="json")
    ours = {
        f"BATON_{name.upper()}": msgspec.json.encode(section).decode() for name, section in values.items()
    }
    return {**kept, **ours}


def _prober() -> httpx.AsyncClient:
    """Return what asks for liveness. The certificate is not checked, since it does not name our own child's
    address."""
    return httpx.AsyncClient(trust_env=False, timeout=None, verify=False)


async def _answers(client: httpx.AsyncClient, url: str, *, timeout_s: float) -> bool:
    """Return whether the URL answers in time, whatever the answer is."""
    try:
        async with asyncio.timeout(timeout_s):
            await client.get(url)
    except (httpx.HTTPError, TimeoutError):
        return False
    return True


class Child:
    """A supervised process, which is started again when it dies. `run` is one task; cancelling it leaves the
    process to `stop`."""

    name = "child"
    start_s = START_S
    has_input = False
    """Whether the child is told something on its standard input."""

    def __init__(
        self, argv: Sequence[str], *, environment: Mapping[str, str], policy: RestartPolicy, silence_s: float
    ) -> None:
        """`silence_s`: a child that was ready and does not answer for this long is killed."""
        self._argv, self._environment, self._policy = list(argv), dict(environment), policy
        self._silence_s = silence_s
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self._setup_error = ""
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Addresses from the first ready line. SetupError if the child cannot start until a person changes
        something."""

    @property
    def pid(self) -> int | None:
        """Process id of the current process; None before the first start."""
        return None if self._process is None else self._process.pid

    def live_url(self, ready: str) -> str:
        """Return the URL of the liveness probe, given the text after READY_PREFIX."""
        raise NotImplementedError

    async def run(self) -> None:
        deaths_in_a_row = 0
        while not self._is_stopping:
            started_s = time.monotonic()
            status = await self._run_once()
            if self._is_stopping:
                return
            if status == SETUP_ERROR_STATUS and not self.ready.done():
                self.ready.set_exception(
                    SetupError(self._setup_error or f"the {self.name} cannot start: see the lines above")
                )
                self.ready.exception()  # marks it as retrieved; awaiting the future still raises it
                return
            was_stable = time.monotonic() - started_s >= self._policy.stable_s
            deaths_in_a_row = 1 if was_stable else deaths_in_a_row + 1
            delay_s = self._policy.delay_s(deaths_in_a_row)
            log.warning("%s ended with status %s; restarting it in %g s", self.name, status, delay_s)
            await asyncio.sleep(delay_s)

    async def _run_once(self) -> int:
        """Run the process once and return its exit status."""
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            env={**self._environment, PARENT_VARIABLE: str(os.getpid())},
            stdin=asyncio.subprocess.PIPE if self.has_input else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C in the terminal reaches this process only, which ends the child in order.
            start_new_session=True,
        )
        telling = asyncio.create_task(self._tell(self._process)) if self.has_input else None
        try:
            async with asyncio.timeout(self.start_s):
                ready = await self._await_ready(self._process)
        except TimeoutError:
            log.error("%s was not ready after %g s; killing it", self.name, self.start_s)
            self._process.kill()
            ready = None
        watch = asyncio.create_task(self._watch(self._process, self.live_url(ready))) if ready else None
        try:
            await self._read_output(self._process)
            return await self._process.wait()
        finally:
            for task in (watch, telling):
                if task is not None:
                    task.cancel()

    async def _tell(self, process: asyncio.subprocess.Process) -> None:
        """Write what the child is to know as soon as that is known."""

    async def _watch(self, process: asyncio.subprocess.Process, url: str) -> None:
        """Kill the child once it has been silent for long. A slow answer is an answer, since a busy router
        has streams to lose. A pause of this process itself does not count."""
        silent_s, loop = 0.0, asyncio.get_running_loop()
        every_s = min(PROBE_S, self._silence_s / 4)
        patience_s = max(PATIENCE_S_MIN, self._silence_s / 2)
        async with _prober() as client:  # one for all probes: making one costs more than a probe
            while silent_s < self._silence_s:
                looked_s = loop.time()
                is_alive = await _answers(client, url, timeout_s=patience_s)
                await asyncio.sleep(max(0.0, every_s - (loop.time() - looked_s)))
                silent_s = 0.0 if is_alive else silent_s + min(patience_s, loop.time() - looked_s)
        if self._is_stopping:
            return  # a draining child is left to `stop`, which has a deadline of its own
        log.error("%s has not answered for %g s; killing it", self.name, self._silence_s)
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    async def _await_ready(self, process: asyncio.subprocess.Process) -> str | None:
        """Return the text after READY_PREFIX, or None if the child ended before it was ready."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            text = line.decode(errors="replace").strip()
            if text.startswith(READY_PREFIX):
                ready = text.removeprefix(READY_PREFIX)
                if not self.ready.done():
                    self.ready.set_result(ready)
                return ready
            if text.startswith(SETUP_ERROR_PREFIX):
                self._setup_error = text.removeprefix(SETUP_ERROR_PREFIX)
            else:
                print(text, file=sys.stderr)
        return None

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        """Discard what the child prints after it was ready."""
        assert process.stdout is not None
        while await process.stdout.read(65_536):
            pass

    async def stop(self, timeout_s: float) -> None:
        """Let the child drain for at most this long, then kill it. Idempotent."""
        self._is_stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            log.warning("%s did not end within %g s; killing it", self.name, timeout_s)
            self.kill()
            async with asyncio.timeout(KILL_S):
                await process.wait()

    def kill(self) -> None:
        self._is_stopping = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
