"""Bounds on what a chat template may take: time, and the size of what one operation makes.

A template is a program that comes with a model, and models come from anybody. The sandbox keeps it from the
machine; it does not keep it from looping for ever or from making a text of ten gigabytes.
"""

import ctypes
import operator
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from jinja2.sandbox import ImmutableSandboxedEnvironment

R = TypeVar("R")

LOOP_S, THREAD_S = 2.0, 10.0
"""Longest time of one rendering on the event loop, where all others wait for it, and in a thread."""
LOOK_S = 0.25
ITEMS_MAX = 1 << 24
"""Most characters or items that one multiplication may make."""
BITS_MAX = 4096
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)")


class TookTooLong(Exception):
    """Raised in the thread that renders."""

    def __init__(self) -> None:
        super().__init__("it takes too long")


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
    except TookTooLong:
        _leave(run)  # the first time may have been cut short
        raise


def _leave(run: _Rendering) -> None:
    with _lock:
        _runs.discard(run)
        if run.is_over:  # what was not raised yet must not be raised in the thread's next work
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(run.thread_id), None)


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
                    error = ctypes.py_object(TookTooLong)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(run.thread_id), error)


def bound_operations() -> None:
    """Bound the operations of all templates of this process that make much of little. transformers makes
    their environments from this class, and has no way to hand in another."""
    table = ImmutableSandboxedEnvironment.default_binop_table
    bounded = {"*": _product, "**": _power, "%": _remainder}
    ImmutableSandboxedEnvironment.default_binop_table = {**table, **bounded}
    ImmutableSandboxedEnvironment.intercepted_binops = frozenset(bounded)


def _product(left: Any, right: Any) -> Any:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            if len(sequence) * count > ITEMS_MAX:
                raise OverflowError(f"{len(sequence)} x {count} is more than {ITEMS_MAX}")
        elif isinstance(count, int) and count.bit_length() > BITS_MAX:
            raise OverflowError("a number is too large")
    return operator.mul(left, right)


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > BITS_MAX:
        raise OverflowError("a power is too large")
    return operator.pow(left, right)


def _remainder(left: Any, right: Any) -> Any:
    if isinstance(left, str) and _WIDE.search(left):
        raise OverflowError("a format is too wide")
    return operator.mod(left, right)
