"""Hosts made of namespaces, on one Linux machine.

The drill itself runs in namespaces of its own (`enter`). The kernel ends all of its processes and removes its
networks and mounts when its first process ends, however that happens, so nothing can stay behind. A host is
one more set of namespaces: network, processes, mounts, hostname, and shared memory.
"""

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from baton.core.errors import SetupError

UNSHARE = ("unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc")
PROGRAMS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
    "tc": "iproute2",
    "mount": "mount",
}
INSIDE = "BATON_CHAOS_INSIDE"
"""Environment variable of the process that runs in the drill's namespaces."""
_PR_SET_PDEATHSIG = 1
END_S = 20.0
RUN_BYTES = 1024 * 2**20
_INIT = Path(__file__).with_name("host_init.py")


def _unshare() -> list[str]:
    """A user who is not root gets the rights within a namespace of users, where the system allows that."""
    head, *rest = UNSHARE
    return [head, *(() if os.geteuid() == 0 else ("--user", "--map-root-user")), *rest]


def check_namespaces() -> None:
    """Raise SetupError if this machine does not let us make namespaces."""
    missing = sorted(
        {package for name, package in PROGRAMS.items() if shutil.which(name, path=_path()) is None}
    )
    if missing:
        raise SetupError(f"baton chaos needs network namespaces of Linux: install {' and '.join(missing)}")
    probe = "ip link set lo up && ip link add name v0 type veth peer name v1 && mount -t tmpfs none /run"
    tried = subprocess.run(
        [*_unshare(), "sh", "-c", probe], capture_output=True, text=True, env={**os.environ, "PATH": _path()}
    )
    if tried.returncode:
        reason = (tried.stderr.strip() or f"exit status {tried.returncode}").splitlines()[-1]
        raise SetupError(
            f"baton chaos needs namespaces of Linux, and this user may not make them ({reason}): run it as "
            "root, in a container with --privileged"
        )


def _path() -> str:
    """Programs of administrators are in folders that users often leave out."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def is_inside() -> bool:
    return INSIDE in os.environ


def enter(argv: Sequence[str]) -> int:
    """Run this command line again in namespaces of its own, and return its exit status. SIGINT and SIGTERM
    are passed on. `check_namespaces` came before."""
    process = subprocess.Popen(
        [*_unshare(), *argv],
        env={**os.environ, INSIDE: "1", "PATH": _path()},
        preexec_fn=_die_with_parent,
        start_new_session=True,
    )

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children():
                child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    return process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def command(*argv: str) -> str:
    """Run a program and return its output. Raises SetupError if it fails."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    text = said.decode(errors="replace").strip()
    if process.returncode:
        raise SetupError(f"`{' '.join(argv)}` failed: {text or process.returncode}")
    return text


class Host:
    """One host. Its `/run` is a file system of its own."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._holder: asyncio.subprocess.Process | None = None
        self._init_pid = 0

    @property
    def is_up(self) -> bool:
        return self._holder is not None

    @property
    def init_pid(self) -> int:
        """Process 1 of the host, by its pid in the drill's namespace."""
        return self._init_pid

    async def start(self) -> None:
        """Start it without links to others. Raises SetupError."""
        setup = (
            f"hostname {self.name} && ip link set lo up && ip addr add {self.address}/32 dev lo"
            f" && mount -t tmpfs -o size={RUN_BYTES} none /run && mount -t tmpfs none /dev/shm"
            f" && mkdir -p /run/tmp && exec {sys.executable} -I -S {_INIT}"
        )
        self._holder = process = await asyncio.create_subprocess_exec(
            *(*UNSHARE, "sh", "-c", setup),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        said = await process.stdout.readline()
        if said.strip() != b"up":
            raise SetupError(f"host {self.name} does not start: {said.decode(errors='replace').strip()}")
        (child,) = psutil.Process(process.pid).children()
        self._init_pid = child.pid

    def inside(self, *argv: str) -> tuple[str, ...]:
        """The command line that runs `argv` on this host."""
        return ("nsenter", "-t", str(self._init_pid), "-n", "-m", "-u", "-i", "-p", "--", *argv)

    async def command(self, *argv: str) -> str:
        """Raises SetupError."""
        return await command(*self.inside(*argv))

    async def spawn(self, *argv: str, environment: Mapping[str, str], log: int) -> asyncio.subprocess.Process:
        """Start a process on this host. Its output goes to the file `log`. What is returned is the process of
        `nsenter`, which ends as its child does."""
        return await asyncio.create_subprocess_exec(
            *self.inside(*argv),
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def processes(self) -> list[psutil.Process]:
        """All processes of the host but the first."""
        space = _process_space(self._init_pid)
        return [
            process
            for process in psutil.process_iter()
            if process.pid != self._init_pid and space and _process_space(process.pid) == space
        ]

    async def kill(self) -> None:
        """Kill its process 1, and with it all others. Idempotent."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._init_pid, signal.SIGKILL)
        await asyncio.wait_for(holder.wait(), END_S)


def _process_space(pid: int) -> int:
    """The namespace of processes that a process is in; 0 if it is gone."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0
