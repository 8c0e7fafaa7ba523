"""A failed write to standard output is reported in one line, whichever command prints."""

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
"""Errors that are passed on: the reader has gone, which ends a command quietly, or the write is to be
repeated."""


class _CheckedOutput(io.FileIO):
    """Raises CannotWrite once. Later text is dropped, so that the other outputs are still written."""

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
    except io.UnsupportedOperation:  # it is an in-memory stream
        return None


@contextmanager
def checked_stdout() -> Generator[None]:
    """Check writes to standard output, including the flush at the end. Raises CannotWrite."""
    before = sys.stdout
    handle = _handle_of(before)
    if handle is None or not isinstance(before, io.TextIOWrapper):  # there is none, or a test replaced it
        yield
        return
    before.flush()
    raw = _CheckedOutput(handle, "w", closefd=False)
    checked = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )
    sys.stdout = checked
    try:
        yield
    finally:
        try:
            checked.flush()
        except BrokenPipeError:
            raw.is_lost = True
        sys.stdout = before
