"""A process that must not outlive the one that started it (Linux)."""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int | None, sign: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to send `sign` when the parent is gone, however it ended. End now if it is gone already.

    `parent_pid` is the process id that the parent knows itself by, and it may be 1, as in a container. None:
    nobody said. The kernel means the parent's *thread* that started this process, which therefore has to live
    as long as the parent.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sign)
    if parent_pid not in (None, os.getppid()):
        raise SystemExit(0)  # the parent ended before the call
