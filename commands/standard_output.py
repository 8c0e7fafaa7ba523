"""Standard output that cannot be written to is told in one line, whichever command prints."""

import errno
import io
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from baton.core.errors import CannotWrite

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_GONE = (errno.EPIPE, errno.EAGAIN, errno.EINTR)
"""Nobody reads it any more, which ends a command quietly; or it is to be tried again."""


class _Told(io.FileIO):
    """Raises CannotWrite once; what is printed after that goes nowhere, and other outputs are written."""

    is_lost = False

    def write(self, b: "ReadableBuffer", /) -> int:
        if not self.is_lost:
            try:
                return super().write(b)
            except OSError as error:
                if error.errno in _GONE:
                    raise
                self.is_lost = True
                raise CannotWrite(f"cannot write standard output: {error.strerror}") from None
        return memoryview(b).nbytes


def _handle_of(stream: object) -> int | None:
    try:
        return stream.fileno() if isinstance(stream, io.TextIOWrapper) else None
    except io.UnsupportedOperation:  # it is kept in memory
        return None


@contextmanager
def telling() -> Generator[None]:
    """Raises CannotWrite, also for what is still to be flushed at the end."""
    before = sys.stdout
    handle = _handle_of(before)
    if handle is None or not isinstance(before, io.TextIOWrapper):  # there is none, or a test has it
        yield
        return
    before.flush()
    raw = _Told(handle, "w", closefd=False)
    told = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )
    sys.stdout = told
    try:
        yield
    finally:
        try:
            told.flush()
        except BrokenPipeError:
            raw.is_lost = True
        sys.stdout = before
