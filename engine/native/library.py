"""The loaded library. Each module that calls it declares the signatures of its own functions."""

import ctypes
import os
from functools import cache

from engine.native.build import NativeUnavailable, build

F32, BF16 = 0, 1
"""`enum Dtype` in src/runtime.h."""


@cache
def library() -> ctypes.CDLL:
    """Compile if needed, load, check. Raises NativeUnavailable."""
    path = build()
    try:
        native = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"cannot load {path}: {error}") from error
    native.baton_features.restype = ctypes.c_char_p
    native.baton_set_threads.argtypes = [ctypes.c_int]
    native.baton_thread_count.restype = ctypes.c_int
    return native


def features() -> str:
    """Code paths that the processor allowed, such as "avx512_bf16"."""
    text: bytes = library().baton_features()
    return text.decode()


def set_threads(count: int) -> int:
    """Set the number of threads that compute, the caller's included, and return it. 0 means as many as this
    process may run on."""
    count = count or usable_cores()
    library().baton_set_threads(count)
    return count


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
