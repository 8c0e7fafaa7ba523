"""A bound on the time that a chat template may take.

A template is a program that comes with a model, and models come from anybody. The sandbox keeps it from the
machine; it does not keep it from looping for ever. A single operation cannot be cut short, so
`router.text.template_sizes` bounds what each of them makes.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

R = TypeVar("R")

LOOP_S, THREAD_S = 2.0, 10.0
"""Longest time of one rendering on the event loop, where all others wait for it, and in a thread."""
LOOK_S = 0.25


class TookTooLong(Exception):
    def __init__(self) -> None:
        super().__init__("it takes too long")


class _TimeIsOver(BaseException):
    """Raised in the thread that renders. It is no Exception, because jinja takes any Exception of an
    expression that it works out in advance for a sign that the expression has to wait, and goes on."""


@dataclass(eq=False, slots=True)
class _Rendering:
    thread_id: int
    ends_s: float
    is_over: bool = False


_lock = threading.Lock()
_runs: set[_Rendering] = set()
_watcher: list[threading.Thread] = []


def run_bounded(work: Callable[[], R], *, seconds: float | None = None) -> R:
    """Run `work` in this thread. Raises TookTooLong when it takes longer than `seconds`; None: `LOOP_S` or
    `THREAD_S`, by the thread."""
    if seconds is None:
        seconds = LOOP_S if threading.current_thread() is threading.main_thread() else THREAD_S
    run = _Rendering(threading.get_ident(), time.monotonic() + seconds)
    with _lock:
        _runs.add(run)
        if not _watcher:
            _watcher.append(threading.Thread(target=_watch, name="template watch", daemon=True))
            _watcher[0].start()
    try:
        try:
            return work()
        finally:
            _leave(run)
    except _TimeIsOver:
        _leave(run)  # the first time may have been cut short
        raise TookTooLong from None


def _leave(run: _Rendering) -> None:
    with _lock:
        _runs.discard(run)
    if run.is_over:  # what was not raised yet must not be raised in the thread's next work
        _take_exception(run.thread_id)


def _take_exception(thread_id: int) -> None:
    """Raise what this thread still has to raise, and forget it.

    Setting no exception (NULL) would forget it too, but CPython 3.11 then goes on believing that one is to be
    raised: all bytecode of the process is slower from then on, and a function that is traced never starts
    (`PyThreadState_SetAsyncExc` raises the interpreter's flag, and only what is raised lowers it).
    """
    try:
        _set_exception(thread_id)
        while True:
            pass
    except _TimeIsOver:
        pass


def _set_exception(thread_id: int) -> None:
    error = ctypes.py_object(_TimeIsOver)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), error)


def _watch() -> None:
    """Look at the runs now and then. Nobody wakes this thread: a rendering would pay for that."""
    pause = threading.Event()
    while True:
        pause.wait(LOOK_S)
        now_s = time.monotonic()
        with _lock:
            for run in _runs:
                if now_s >= run.ends_s and not run.is_over:
                    run.is_over = True
                    _set_exception(run.thread_id)
