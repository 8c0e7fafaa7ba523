"""Pages and disk space of a file's ranges, taken and given back (Linux: fallocate)."""

import ctypes
import os

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def allocate(fd: int, offset: int, size: int) -> bool:
    """Take the space of a range within the file, and keep its content. False means that the file system
    cannot."""
    return _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE, offset, size) == 0


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Make the range read as zeros and take no space. Raises OSError."""
    if _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, size):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
