"""Memory that the kernel gives while other work goes on, rather than when it is first written.

Zeroed pages cost a second per GiB or more on a machine that is busy or virtual. A worker's start waits for
none of them. When it serves, a thread asks for them one large page at a time, and pauses in between. It has
the niceness of all others: the kernel holds a lock of the process meanwhile, and a thread that gives way to
everybody would hold it for as long as others run.
"""

import ctypes
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

log = logging.getLogger(__name__)

PIECE_BYTES = 2 * 2**20
"""Bytes of one request, a large page."""
PAUSES = 4
"""The thread pauses for so many times as long as the last request took."""
_MADV_POPULATE_WRITE = 23
"""Makes pages writable without changing what is in them, madvise(2); Linux 5.14."""
SMALLEST_BYTES = 32 * PIECE_BYTES
"""Less is left to the first writer, since it costs less than a thread is worth."""


def populate_in_background(address: int, size: int, *, owner: object) -> threading.Thread | None:
    """Have the kernel give all pages of a mapping, in a daemon thread, which is returned; None: it is small.
    `address` is a multiple of the page size. The memory must stay mapped while `owner` lives, which the
    thread keeps for a page at a time.

    Pages may be used meanwhile, and what is written into them stays. A lack of memory is logged; the kernel
    would show it at the first write otherwise.
    """
    if size < SMALLEST_BYTES:
        return None
    arguments = (address, size, weakref.ref(owner))
    thread = threading.Thread(target=_populate, args=arguments, name="populate", daemon=True)
    thread.start()
    return thread


def _populate(address: int, size: int, owner: Callable[[], object | None]) -> None:
    pause = threading.Event()  # which nobody sets
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start in range(0, size, PIECE_BYTES):
        if (keeps_mapped := owner()) is None:
            return
        started_s = time.monotonic()
        failed = advise(address + start, min(PIECE_BYTES, size - start), _MADV_POPULATE_WRITE)
        del keeps_mapped
        number = ctypes.get_errno() if failed else 0
        if number == errno.EINVAL:  # an older kernel gives pages when they are first written
            return
        if number not in (0, errno.EINTR):
            log.error("memory lacks for %d of %d bytes: %s", size - start, size, os.strerror(number))
            return
        pause.wait(PAUSES * (time.monotonic() - started_s))
