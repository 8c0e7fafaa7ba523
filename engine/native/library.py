"""The loaded library. Each module that calls it declares the signatures of its own functions."""

import ctypes
import logging
import os
from functools import cache

from engine.native.build import NativeUnavailable, build_here, find_ahead
from engine.native.classes import CpuClass, candidates
from engine.native.recording import RecordableLibrary

log = logging.getLogger(__name__)

F32, BF16 = 0, 1
"""`enum Dtype` in src/runtime.h."""


@cache
def library() -> RecordableLibrary:
    """Find or compile, load, check. The fastest class of kernels that processor, compiler and operating
    system allow. Raises NativeUnavailable."""
    try:
        classes = candidates()
    except ValueError as error:
        raise NativeUnavailable(str(error)) from error
    for number, one in enumerate(classes):
        try:
            return _load(one)
        except NativeUnavailable as error:
            if number + 1 == len(classes):
                raise
            log.warning("no kernels of class %s: %s; trying %s", one.name, error, classes[number + 1].name)
    raise NativeUnavailable("no class of kernels for this processor")


def _load(cpu_class: CpuClass) -> RecordableLibrary:
    native = _opened_ahead(cpu_class)
    if native is None:
        path = build_here(cpu_class)
        try:
            native = RecordableLibrary(ctypes.CDLL(str(path)))
        except OSError as error:
            raise NativeUnavailable(f"cannot load {path}: {error}") from error
    native.baton_start.restype = ctypes.c_int32
    if native.baton_start():
        raise NativeUnavailable("the operating system gives this process no AMX tiles")
    native.baton_features.restype = ctypes.c_char_p
    native.baton_set_threads.argtypes = [ctypes.c_int]
    native.baton_thread_count.restype = ctypes.c_int
    return native


def _opened_ahead(cpu_class: CpuClass) -> RecordableLibrary | None:
    """The library of the class that was compiled ahead, if there is one and it can be loaded here."""
    path = find_ahead(cpu_class)
    if path is None:
        return None
    try:
        return RecordableLibrary(ctypes.CDLL(str(path)))
    except OSError as error:  # made for another C library, for example
        log.warning("kernels compiled ahead cannot be loaded, and are compiled here: %s", error)
        return None


def features() -> str:
    """The class of kernels in use, such as "avx512_bf16"."""
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
