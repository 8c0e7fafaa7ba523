"""The reaper ends what a killed process leaves behind: its servers, Ray's processes, its folder.

A process that starts others makes a `Reaper`. It marks its children through their environment, and starts
this file as a separate process that waits for the end of a pipe: the kernel closes the pipe however the
parent ends. This file uses only the standard library, since it stays in memory for as long as a cluster does.
It works on Linux; elsewhere it does nothing.
"""

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

RUN_VARIABLE = "RUN_OF_BATON"
"""Environment variable that says which run a process and all its children belong to."""

STEPS = ((0, 2.0), (signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0))
"""Signals, and the time each gets to work. The first step sends none: children that notice the death of their
parent end in order by themselves."""

PROC = Path("/proc")
LOOK_S = 0.1
END_S = 5.0
"""Time for the reaper to notice an orderly end."""

_ALL_IS_WELL = b"."

Found = dict[int, str]
"""Process ids, and when the kernel started each: a pid may be used again."""


class Reaper:
    """The reaper of this process, from construction to `close`."""

    def __init__(self, folder: Path | None = None) -> None:
        """Start the reaper. It removes `folder` too."""
        self._process: subprocess.Popen[bytes] | None = None
        if not (PROC / "self" / "environ").exists():
            return
        run = secrets.token_hex(16)
        self._before = os.environ.get(RUN_VARIABLE)
        os.environ[RUN_VARIABLE] = run
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve()), run, str(folder or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},  # it belongs to no run itself
            cwd="/",
            start_new_session=True,
        )

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Tell the reaper that everything ended in order, so that nothing is left to do. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # the reaper was killed
            os.write(process.stdin.fileno(), _ALL_IS_WELL)
        process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        del os.environ[RUN_VARIABLE]
        if self._before is not None:
            os.environ[RUN_VARIABLE] = self._before


# --- the reaper's process ------------------------------------------------------------------------


def of_run(run: str) -> Found:
    """Return the processes that carry the mark and all their descendants, since some programs write their
    title over their environment."""
    mark = f"{RUN_VARIABLE}={run}".encode()
    started, parents, marked = Found(), dict[int, int](), set[int]()
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            # The name, in parentheses, may contain blanks. State and parent follow, the start 18 fields on.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue  # it ended, or belongs to another user
        if fields[0] == "Z":
            continue
        started[pid], parents[pid] = fields[19], int(fields[1])
        if mark in environment.split(b"\0"):
            marked.add(pid)
    return {
        pid: start for pid, start in started.items() if pid != os.getpid() and _below(pid, parents, marked)
    }


def _below(pid: int, parents: dict[int, int], marked: set[int]) -> bool:
    while pid and pid not in marked:
        pid = parents.get(pid, 0)
    return pid in marked


def end_run(run: str, steps: Iterable[tuple[int, float]] = STEPS) -> None:
    """End all processes of a run. Returns when none is left, or after the last step."""
    found = of_run(run)
    for sign, patience_s in steps:
        found |= of_run(run)  # adds new processes; those whose parent has died stay in the set
        if sign:
            for pid in _living(found):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, sign)
                    # A stopped one, as those of a paused server are, ends in order too.
                    os.kill(pid, signal.SIGCONT)
        ends_s = time.monotonic() + patience_s
        while found := _living(found):
            if time.monotonic() >= ends_s:
                break
            select.select((), (), (), LOOK_S)
        if not found and not (found := of_run(run)):
            return


def _living(found: Found) -> Found:
    living = Found()
    for pid, start in found.items():
        with contextlib.suppress(OSError):
            fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] != "Z" and fields[19] == start:
                living[pid] = start
    return living


def main(run: str, folder: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends after the processes that it watches
    if os.read(sys.stdin.fileno(), 1) == _ALL_IS_WELL:
        return
    end_run(run)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
