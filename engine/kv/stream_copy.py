"""A copy past the caches, of the native library."""

import ctypes
from collections.abc import Callable

from engine.native.build import NativeUnavailable
from engine.native.library import library


def stream_copy() -> Callable[[int, int, int], object] | None:
    """Return the function (destination, source, bytes), which works without the GIL; None: the library cannot
    be made here."""
    try:
        copy = library().baton_stream_copy
    except NativeUnavailable:
        return None
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    copy.restype = None
    return copy
