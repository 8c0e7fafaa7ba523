"""Copies of the native library: past the caches, and with a checksum made in the same pass."""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import xxhash

from engine.native.build import NativeUnavailable
from engine.native.library import library

_SHORT_BYTES = 240
"""`SHORT_BYTES` in src/xxh3.h: XXH3 of so many bytes is another algorithm."""


def stream_copies() -> Sequence[Callable[[int, int, int], object]]:
    """Return functions (destination, source, bytes), which work without the GIL: one page after another, and
    two in turn. They go past the caches with AVX2. There are none where the library cannot be made."""
    try:
        copy = library().baton_stream_copy
    except NativeUnavailable:
        return ()
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
    copy.restype = None
    return [partial(_streamed, copy, pages) for pages in (1, 2)]


def checked_copies() -> Sequence[Callable[[int, int, int], int]]:
    """Return two functions (destination, source, bytes) -> XXH3-64 of what arrived, which work without the
    GIL: past the caches, with AVX2 and where `destination` is a multiple of 64, and by way of them. There are
    none where the library cannot be made."""
    try:
        copy = library().baton_copy_checked
    except NativeUnavailable:
        return ()
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
    copy.restype = ctypes.c_uint64
    return [partial(_checked, copy, is_streamed) for is_streamed in (True, False)]


def _streamed(
    copy: Callable[[int, int, int, int], None], pages: int, to: int, origin: int, size: int
) -> None:
    copy(to, origin, size, pages)


def _checked(
    copy: Callable[[int, int, int, bool], int], is_streamed: bool, to: int, origin: int, size: int
) -> int:
    if size > _SHORT_BYTES:
        return copy(to, origin, size, is_streamed)
    ctypes.memmove(to, origin, size)
    return xxhash.xxh3_64_intdigest((ctypes.c_char * size).from_address(to))
