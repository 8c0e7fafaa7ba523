"""Weight files: mapped to read tensors, and read in samples for a digest."""

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from baton.core.errors import SetupError

_SAMPLE_BYTES = 4096
_SAMPLES_PER_TENSOR = 16


def map_file(file: Path) -> mmap.mmap:
    """Raises SetupError."""
    try:
        with file.open("rb") as stream:
            # Memory that could be written to would count as this process's own, where that is limited.
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise SetupError(f"cannot read {file}: {error}") from error


def sample_ranges(start: int, end: int) -> list[tuple[int, int]]:
    """Byte ranges of a tensor that count for its digest: all of a small one, pages spread over a large
    one."""
    size = end - start
    if size <= _SAMPLE_BYTES * _SAMPLES_PER_TENSOR:
        return [(start, end)]
    step = (size - _SAMPLE_BYTES) / (_SAMPLES_PER_TENSOR - 1)
    begins = [start + round(i * step) for i in range(_SAMPLES_PER_TENSOR)]
    return [(begin, begin + _SAMPLE_BYTES) for begin in begins]


def refuse_if_shorter(file: Path, size: int) -> None:
    """Raises SetupError if a mapped file is not as long any more as it was. The system would end a process
    that reads the missing part, without a word; this finds it unless it happens at that very moment."""
    try:
        now = file.stat().st_size
    except OSError as error:
        raise SetupError(f"cannot read {file}: {error}") from error
    if now < size:
        raise SetupError(
            f"{file} became shorter while it was read, from {size} to {now} bytes; "
            "put the whole file back under a new name and start again"
        )


def sampled(ranges: Iterable[tuple[Path, int, int]]) -> Iterator[bytes]:
    """The content of byte ranges (file, start, end), which may be in several files in turn.

    It is read, and not taken from a mapping: whoever touches one page of a mapped file may get megabytes
    around it into its memory, so that samples of all tensors would be most of the checkpoint. Raises
    SetupError.
    """
    files: dict[Path, IO[bytes]] = {}
    with ExitStack() as stack:
        for file, start, end in ranges:
            try:
                if file not in files:
                    files[file] = stack.enter_context(file.open("rb", buffering=0))
                content = os.pread(files[file].fileno(), end - start, start)
            except OSError as error:
                raise SetupError(f"cannot read {file}: {error}") from error
            if len(content) < end - start:
                refuse_if_shorter(file, end)
                raise SetupError(f"cannot read {file}: {end - start} bytes at {start} are not there")
            yield content
