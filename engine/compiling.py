"""The process in which grammars are compiled, so that one that takes too long can be killed.

xgrammar's compiler cannot be interrupted, and the time that it takes cannot be told from the grammar. The
process (`engine.compile_process`) loads the libraries once and forks for every grammar. The kernel kills the
fork when its processor time is used up, and the next grammar finds the process ready. Each message is a
length of four bytes and MessagePack.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import psutil

from baton.core.sampling import Grammar

log = logging.getLogger(__name__)

START_S = 60.0
"""The longest time to load xgrammar, on a machine that is busy."""
LOOK_S = 0.5
STALL_LOOKS = 10
"""The process is taken to hang after so many looks, one every LOOK_S, at which it did nothing."""
WALL_TIMES = 4
WALL_S = 10.0
"""The wall time of one compilation is its processor time this many times, and so many seconds. Beyond it the
machine is too busy."""
ANSWER_S = 5.0
"""The time beyond the wall time until the process itself must have answered."""
BURY_S = 1.0
"""The longest time that a killed fork needs to be gone."""
LENGTH_BYTES = 4


class CompilerSetup(msgspec.Struct, frozen=True):
    """The first message to the process."""

    tokenizer: str
    """`TokenizerInfo` as JSON."""
    vocab: int
    has_end: bool
    """Whether the model has a token that ends its text."""


class CompileJob(msgspec.Struct, frozen=True):
    grammar: Grammar
    cpu_s: float
    wall_s: float


class CompilerReady(msgspec.Struct, frozen=True, tag=True):
    """The process has loaded what it needs."""


class GrammarCompiled(msgspec.Struct, frozen=True, tag=True):
    text: str
    """`CompiledGrammar` as JSON. Empty: compiling it again is quicker than reading it."""


class GrammarRefused(msgspec.Struct, frozen=True, tag=True):
    """The grammar is wrong."""

    message: str


class GrammarExceeded(msgspec.Struct, frozen=True, tag=True):
    """The grammar needs more time or memory than one may have, or brings the compiler down."""

    message: str


class CompileFailed(msgspec.Struct, frozen=True, tag=True):
    """The compilation ended for a reason that is not the grammar's."""

    message: str


CompilerAnswer = CompilerReady | GrammarCompiled | GrammarRefused | GrammarExceeded | CompileFailed


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


class CompilerLost(Exception):
    """The process ended or hung. It is no fault of the grammar."""


class StallWatch:
    """Tells a process that hangs or was stopped from one that is slow: a slow one, or what it forked, uses
    the processor, waits for it, or waits for a disk. Looks are counted, so that a pause of the whole machine
    is none of the process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu_s = 0.0
        self._idle_looks = 0

    def look(self) -> None:
        """Raise CompilerLost if the process has done nothing for too long."""
        cpu_s, is_active = 0.0, False
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._pid)
            for one in (process, *process.children()):
                with contextlib.suppress(psutil.Error):
                    times = one.cpu_times()
                    cpu_s += times.user + times.system
                    is_active |= one.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
        is_idle = not is_active and cpu_s == self._cpu_s
        self._cpu_s = cpu_s
        self._idle_looks = self._idle_looks + 1 if is_idle else 0
        if self._idle_looks >= STALL_LOOKS:
            raise CompilerLost(
                f"it hangs, or was stopped: it has done nothing for {LOOK_S * STALL_LOOKS:g} s"
            )


class CompilerProcess:
    """The process, which is started by `start` or when the first grammar comes, and again after it was lost.
    One call at a time; `close` may come from any thread. The process ends with the thread that makes the call
    for which it is started, see `baton.wire.parent`."""

    def __init__(self, *, compile_s: float, argv: tuple[str, ...] = ("-m", "engine.compile_process")) -> None:
        """`compile_s` is the processor time that one grammar may take."""
        self._compile_s, self._argv = compile_s, argv
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def compile_s(self) -> float:
        return self._compile_s

    def start(self) -> None:
        """Let the process load its libraries, and do not wait for it. Nothing is done if it runs, or if it
        cannot be started: the first grammar then says why."""
        with self._lock, contextlib.suppress(OSError, CompilerLost):
            if self._process is None:
                self._spawn()

    def compile(
        self, grammar: Grammar, setup: Callable[[], CompilerSetup], *, times: float = 1.0
    ) -> CompilerAnswer:
        """Return what came of the grammar, which has `times` the usual time. Raises CompilerLost."""
        with self._lock:
            cpu_s = self._compile_s * times
            job = CompileJob(grammar, cpu_s, cpu_s * WALL_TIMES + WALL_S)
            try:
                process = self._started(setup)
                self._send(process, msgspec.msgpack.encode(job))
                return self._answer(process, job.wall_s + ANSWER_S)
            except (OSError, CompilerLost, msgspec.DecodeError) as error:
                self._kill()
                raise CompilerLost(f"the compiler of grammars was lost: {error}") from error

    def close(self) -> None:
        self._is_closed = True
        self._kill()

    def _started(self, setup: Callable[[], CompilerSetup]) -> "subprocess.Popen[bytes]":
        process = self._process
        if process is None or process.poll() is not None:
            self._kill()
            process = self._spawn()
        if self._is_ready:
            return process
        try:
            # The process loads its libraries while the tokenizer is read here.
            self._send(process, msgspec.msgpack.encode(setup()))
        except BaseException:
            self._kill()
            raise
        if not isinstance(self._answer(process, START_S), CompilerReady):
            raise CompilerLost("it did not come up")
        self._is_ready = True
        return process

    def _spawn(self) -> "subprocess.Popen[bytes]":
        if self._is_closed:
            raise CompilerLost("the worker ends")
        # One thread: the process forks.
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = self._process = subprocess.Popen(
            [sys.executable, *self._argv, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **threads},
            # No session of its own: its niceness counts within its session only, see decision 0061.
            process_group=0,
        )
        if self._is_closed:  # meanwhile, by another thread, which may have found no process
            self._kill()
            raise CompilerLost("the worker ends")
        return process

    @staticmethod
    def _send(process: "subprocess.Popen[bytes]", payload: bytes) -> None:
        assert process.stdin is not None
        fd, data = process.stdin.fileno(), memoryview(frame(payload))
        ends_s, watch = time.monotonic() + START_S, StallWatch(process.pid)
        os.set_blocking(fd, False)
        while data:
            _await(watch, ends_s, "it does not read", to_write=fd)
            data = data[os.write(fd, data) :]

    def _answer(self, process: "subprocess.Popen[bytes]", timeout_s: float) -> CompilerAnswer:
        assert process.stdout is not None
        fd, ends_s = process.stdout.fileno(), time.monotonic() + timeout_s
        watch = StallWatch(process.pid)
        length = int.from_bytes(_read(fd, LENGTH_BYTES, watch, ends_s), "big")
        return msgspec.msgpack.decode(_read(fd, length, watch, ends_s), type=CompilerAnswer)

    def _kill(self) -> None:
        process, self._process, self._is_ready = self._process, None, False
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _bury(process.pid)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _read(fd: int, count: int, watch: StallWatch, ends_s: float) -> bytes:
    pieces: list[bytes] = []
    while count:
        _await(watch, ends_s, "it does not answer", to_read=fd)
        piece = os.read(fd, min(count, 1 << 20))
        if not piece:
            raise CompilerLost("it ended")
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _await(
    watch: StallWatch, ends_s: float, late: str, *, to_read: int | None = None, to_write: int | None = None
) -> None:
    """Wait until the pipe can be read or written. Raises CompilerLost at `ends_s`, and for a process that
    does nothing."""
    reads, writes = [fd for fd in (to_read,) if fd is not None], [fd for fd in (to_write,) if fd is not None]
    while (left_s := ends_s - time.monotonic()) > 0:
        if any(select.select(reads, writes, (), min(LOOK_S, left_s))):
            return
        watch.look()
    raise CompilerLost(late)


def _bury(group: int) -> None:
    """Take the exit status of the forks that were killed with their process, where this worker adopts
    orphans: as process 1 of a container, or as a subreaper."""
    ends_s = time.monotonic() + BURY_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < ends_s:
            if os.waitpid(-group, os.WNOHANG) == (0, 0):
                select.select((), (), (), 0.01)
