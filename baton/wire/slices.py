"""How soon a thread runs once it has something to do, beside threads that compute without end.

Linux gives a core to the thread whose turn ends first (EEVDF). A thread with a short slice has short turns
that end soon, so it runs almost as soon as it wakes, also in the middle of another's turn; its share of the
core does not change, and no privilege is needed. Linux before 6.12 knows no such slices and takes no notice.

Threads inherit the slice of the thread that starts them. See sched_setattr(2) and "EEVDF Scheduler" of the
kernel's documentation; figures are in decision 0061.
"""

import ctypes
import platform

SHORT_NS = 100_000
"""The shortest slice that the kernel knows. Messages take less; whoever computes for longer is interrupted
more often, and loses nothing by it but a few switches."""
_USUAL_NS = 0
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""Numbers of sched_setattr and sched_getattr, which not every C library wraps, by machine."""
_CALLING_THREAD = 0


class _Attributes(ctypes.Structure):
    """`struct sched_attr` of Linux 5.3."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
        ("util_min", ctypes.c_uint32),
        ("util_max", ctypes.c_uint32),
    )


def answer_soon() -> bool:
    """Give the calling thread a short slice: it waits for messages and computes little. Returns whether the
    system took it."""
    return _set_slice(SHORT_NS)


def compute_long() -> bool:
    """Give the calling thread the usual slice again, which it does not have if a thread started it that
    answers soon. Returns whether the system took it."""
    return _set_slice(_USUAL_NS)


def slice_ns() -> int:
    """The calling thread's slice; 0: the system does not say."""
    found = _attributes()
    return 0 if found is None else int(found.runtime)


def _attributes() -> _Attributes | None:
    calls = _CALLS.get(platform.machine())
    if platform.system() != "Linux" or calls is None:
        return None
    found = _Attributes()
    size = ctypes.sizeof(found)
    failed = ctypes.CDLL(None).syscall(calls[1], _CALLING_THREAD, ctypes.byref(found), size, 0)
    return None if failed else found


def _set_slice(nanoseconds: int) -> bool:
    """Policy and niceness stay as they are."""
    attributes = _attributes()
    if attributes is None or attributes.policy != 0:  # an operator's real-time policy is stronger anyway
        return False
    attributes.size, attributes.flags, attributes.runtime = ctypes.sizeof(attributes), 0, nanoseconds
    attributes.deadline = attributes.period = 0
    call, _ = _CALLS[platform.machine()]
    return ctypes.CDLL(None).syscall(call, _CALLING_THREAD, ctypes.byref(attributes), 0) == 0
