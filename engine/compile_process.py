"""The process that compiles grammars for one worker, see `engine.compiling`.

It has one thread and forks for each grammar. The fork's timers have the kernel's default action, which ends
it in the middle of anything. The kernel ends both when the worker is gone, even if a signal has stopped them.
"""

import contextlib
import importlib
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from baton.wire.parent import end_with_parent
from baton.wire.slices import compute_long
from engine.compiling import (
    LENGTH_BYTES,
    CompileFailed,
    CompileJob,
    CompilerAnswer,
    CompilerReady,
    CompilerSetup,
    GrammarCompiled,
    GrammarExceeded,
    GrammarRefused,
    frame,
)
from engine.grammar_compile import GrammarError, check_start, compile_grammar
from engine.stand_ins import leave_out

NICENESS = 10
"""A long compilation must not take the processor from those who compute or answer."""
URGENT_S = 1.0
"""The processor time after which a compilation is a long one. Until then it is as urgent as the request that
waits for it: at this niceness a busy machine leaves it a fiftieth of a core."""
LOOK_S = 0.1
"""The time after which the processor time of a compilation is looked at again."""
MEMORY_BYTES_MAX = 2 * 2**30
"""Memory that one compilation may take."""
AGAIN_S = 0.1
"""What took less is compiled again by the worker: writing and reading a compiled grammar takes some ten times
as long as compiling a small one."""


LEFT_OUT = ("torch", "transformers")
"""Packages that xgrammar imports and that compiling needs nothing of: 1.5 s and 200 MB."""
WHOLE = "--whole"
"""Argument with which nothing is left out, in case that this version of xgrammar does not bear it."""


def main(parent_pid: int, *, is_whole: bool) -> None:
    end_with_parent(parent_pid, signal.SIGKILL)
    compute_long()
    # Whatever prints must not come between the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    xgrammar = _xgrammar(answers, is_whole=is_whole)
    payload = _read()
    if payload is None:
        return
    setup = msgspec.msgpack.decode(payload, type=CompilerSetup)
    info = xgrammar.TokenizerInfo.deserialize_json(setup.tokenizer)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    _write(answers, CompilerReady())
    while (payload := _read()) is not None:
        job = msgspec.msgpack.decode(payload, type=CompileJob)
        ours = os.getpid()
        pid = os.fork()
        if pid == 0:
            _work(compiler, setup, job, answers, ours)
        status = _wait(pid)
        if status:
            _write(answers, _verdict(os.waitstatus_to_exitcode(status), job))


def _wait(pid: int) -> int:
    """Wait for the fork, which gives way to others once it has computed for long. Returns its status."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:  # an old kernel, or a sandbox that forbids it: the fork keeps its priority
        return os.waitpid(pid, 0)[1]
    try:
        while not select.select([fd], (), (), LOOK_S)[0]:
            if _processor_s(pid) >= URGENT_S:
                mine = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PROCESS, pid, min(19, mine + NICENESS))
                break
    finally:
        os.close(fd)
    return os.waitpid(pid, 0)[1]


def _processor_s(pid: int) -> float:
    """Return the processor time of a process that has not been waited for, see proc_pid_stat(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _xgrammar(answers: int, *, is_whole: bool) -> Any:
    """Return xgrammar, loaded without what is left out where that works."""
    if is_whole:
        return importlib.import_module("xgrammar")
    try:
        leave_out(*LEFT_OUT)
        return importlib.import_module("xgrammar")
    except Exception:
        os.dup2(answers, 1)
        os.execv(sys.executable, [sys.executable, "-m", "engine.compile_process", *sys.argv[1:], WHOLE])


def _work(compiler: Any, setup: CompilerSetup, job: CompileJob, answers: int, parent_pid: int) -> NoReturn:
    """Compile in the fork, and end it."""
    end_with_parent(parent_pid, signal.SIGKILL)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, job.cpu_s)
    signal.setitimer(signal.ITIMER_REAL, job.wall_s)
    status = 1
    try:
        answer = _compiled(compiler, setup, job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, answer)
        status = 0
    finally:
        os._exit(status)  # Nothing of the parent's may be cleaned up twice.


def _compiled(compiler: Any, setup: CompilerSetup, job: CompileJob) -> CompilerAnswer:
    began_s = time.process_time()
    try:
        compiled = compile_grammar(compiler, job.grammar)
        check_start(compiled, setup.vocab, has_end=setup.has_end)
        took_s = time.process_time() - began_s
        return GrammarCompiled(compiled.serialize_json() if took_s > AGAIN_S else "")
    except GrammarError as error:
        if "bad_alloc" in str(error):
            return _too_much_memory()
        return GrammarRefused(str(error))
    except MemoryError:
        return _too_much_memory()


def _too_much_memory() -> GrammarExceeded:
    return GrammarExceeded(
        f"the grammar takes more than {MEMORY_BYTES_MAX // 2**20} MiB of memory to compile"
    )


def _verdict(exit_code: int, job: CompileJob) -> CompilerAnswer:
    """Why the fork ended without an answer."""
    match -exit_code:
        case signal.SIGPROF:
            return GrammarExceeded(
                f"the grammar takes longer to compile than {job.cpu_s:g} s (engine.compile_s); make it "
                "simpler: fewer optional parts in a row, fewer alternatives that begin alike, less nesting"
            )
        case signal.SIGSEGV | signal.SIGABRT | signal.SIGBUS | signal.SIGFPE | signal.SIGILL:
            return GrammarExceeded("the compiler of grammars breaks down over this grammar; make it simpler")
        case _:
            return CompileFailed(f"compiling the grammar ended with status {exit_code}")


def _read() -> bytes | None:
    """Return the next message, or None when the worker has ended."""
    head = sys.stdin.buffer.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "big")
    payload = sys.stdin.buffer.read(length)
    return payload if len(payload) == length else None


def _write(fd: int, answer: CompilerAnswer) -> None:
    data = memoryview(frame(msgspec.msgpack.encode(answer)))
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the worker has ended, and nobody waits for an answer
        main(int(sys.argv[1]), is_whole=WHOLE in sys.argv)
