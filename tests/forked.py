"""Processes for tests that are forked from one that has imported torch already.

A follower or an expert rank that starts by itself imports torch, which takes a core two seconds, in hundreds
of tests. Integration tests start them as users do, and so do tests whose leader is a process of its own.

`python -m tests.forked FD` is the server: it is asked on a socket, with JSON and the standard files of the
process to fork.
"""

import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

import msgspec

from baton.wire.parent import end_with_parent
from engine.execution import follower
from engine.execution.spread import FollowerSetup
from tests.certificates import secure_tests

ROOT = Path(__file__).parents[1]
MESSAGE_BYTES_MAX = 100_000
ANSWER_S = 60.0
"""The longest time for the server to start and answer."""


@cache
def fork_server() -> "ForkServer":
    """Return this process's server, which ends with it."""
    return ForkServer()


def forked_follower(setup: FollowerSetup) -> "ForkedProcess":
    """Take the place of `engine.execution.team.launch_follower`."""
    return fork_server().start("tests.forked:follow", [msgspec.json.encode(setup).decode()])


def follow(setup: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return follower.follow(msgspec.json.decode(setup, type=FollowerSetup))


class ForkServer:
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.forked", str(theirs.fileno())]
        with theirs:
            self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT)
        self._socket.settimeout(ANSWER_S)
        self._lock = threading.Lock()

    def start(self, function: str, arguments: Sequence[str], *, pipes: bool = False) -> "ForkedProcess":
        """Call a function, as "module:name", in a new process. An int that it returns is the exit status.
        pipes: its standard input and output are `ForkedProcess.stdin` and `.stdout`, as text."""
        files: list[IO[Any]] = []
        if pipes:
            (read_in, write_in), (read_out, write_out) = os.pipe(), os.pipe()
            files = [os.fdopen(write_in, "w"), os.fdopen(read_out)]
        else:
            read_in, write_out = os.open(os.devnull, os.O_RDONLY), os.dup(2)
        try:
            pid = self.ask({"function": function, "arguments": list(arguments)}, read_in, write_out, 2)
        finally:
            os.close(read_in)
            os.close(write_out)
        return ForkedProcess(self, pid, *files)

    def ask(self, request: dict[str, Any], *fds: int) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            answer = self._socket.recv(MESSAGE_BYTES_MAX)
        assert answer, "the server has ended"
        return int(answer)


class ForkedProcess:
    """What tests and `RankTeam` use of a `subprocess.Popen`."""

    def __init__(
        self, server: ForkServer, pid: int, stdin: IO[str] | None = None, stdout: IO[str] | None = None
    ) -> None:
        self._server, self.pid, self.stdin, self.stdout = server, pid, stdin, stdout
        self._gone = os.pidfd_open(pid)
        self._lock = threading.Lock()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                if not select.select([self._gone], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
                self.returncode = self._server.ask({"ended": self.pid})
                os.close(self._gone)
            return self.returncode

    def kill(self) -> None:
        with self._lock:
            if self.returncode is None:
                signal.pidfd_send_signal(self._gone, signal.SIGKILL)

    def communicate(self) -> None:
        """Close its standard input and output, and wait for its end."""
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                pipe.close()
        self.wait()


def _fork(request: dict[str, Any], fds: Sequence[int]) -> int:
    server = os.getpid()
    module, name = request["function"].split(":")
    function = getattr(importlib.import_module(module), name)  # once, for all that are forked
    if pid := os.fork():
        return pid
    code = 1
    try:
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(3, 64)  # the server's socket
        end_with_parent(server, signal.SIGKILL)
        code = function(*request["arguments"]) or 0
        logging.shutdown()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main(fd: int) -> None:
    secure_tests()
    asked = socket.socket(fileno=fd)
    gc.freeze()
    while True:
        message, fds, _, _ = socket.recv_fds(asked, MESSAGE_BYTES_MAX, 3)
        if not message:
            return
        request = json.loads(message)
        if "function" in request:
            answer = _fork(request, fds)
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])
        for one in fds:
            os.close(one)
        asked.send(str(answer).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
