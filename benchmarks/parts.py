"""Baton's processes one by one, for benchmarks that stop and restart them."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.core.errors import SetupError

START_S = 180.0
END_S = 10.0
LOG_CHARS = 2000


class BatonProcess:
    """A process `baton COMMAND …`, which prints `ready ADDRESS` when it serves."""

    def __init__(self, name: str, argv: Sequence[str], *, folder: Path, cores: Sequence[int] = ()) -> None:
        self.name, self._argv, self._cores = name, tuple(argv), tuple(cores)
        self._log = folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self.address = ""

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    async def start(self) -> None:
        """Start it and wait until it is ready. Raises SetupError with the end of its log."""
        pin = ("taskset", "-c", ",".join(map(str, self._cores))) if self._cores else ()
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *pin,
                *(sys.executable, "-m", "baton", *self._argv),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(START_S):
                self.address = await self._ready()
        except TimeoutError:
            await self.kill()
            raise SetupError(f"{self.name} was not ready within {START_S:g} s: {self._tail()}") from None

    async def _ready(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            text = line.decode(errors="replace").strip()
            if text.startswith("ready "):
                return text.removeprefix("ready ")
        raise SetupError(f"{self.name} ended while it started: {self._tail()}")

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-LOG_CHARS:]

    async def kill(self) -> None:
        """Send SIGKILL to all of it, if it runs, and wait until it is gone."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait_for(process.wait(), END_S)
