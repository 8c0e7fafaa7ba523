"""Reads the lines of a plain or gzip trace file one at a time, so that a file of any length needs little
memory.

Every error is a `SetupError` of one line that names file and line.
"""

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar, cast

import orjson

from baton.core.errors import SetupError

LINE_BYTES_MAX = 16 * 2**20
_SHOWN_CHARS = 60
_GZIP_MAGIC = b"\x1f\x8b"

_Raw = TypeVar("_Raw")
_Read = TypeVar("_Read")


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Turn an error of the file itself into a SetupError."""
    try:
        yield
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise SetupError(f"cannot read trace {path}: {error}") from None


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text) without blank lines. Raises SetupError."""
    with reading(path), _open(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline=None)
        number = 0
        while line := text.readline(LINE_BYTES_MAX):
            number += 1
            if len(line) == LINE_BYTES_MAX:
                raise SetupError(f"{path}:{number}: a line of more than {LINE_BYTES_MAX} characters")
            if line := line.strip():
                yield number, line


def first_line(path: Path) -> str:
    """The first line, or an empty text for an empty file. Raises SetupError."""
    return next((line for _, line in lines_of(path)), "")


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        magic = file.read(2)
    return cast("IO[bytes]", gzip.open(path, "rb")) if magic == _GZIP_MAGIC else path.open("rb")


def at_line(path: Path, number: int, read: Callable[[_Raw], _Read], raw: _Raw) -> _Read:
    """The result of `read(raw)`; its ValueError becomes a SetupError that names the line."""
    try:
        return read(raw)
    except ValueError as error:  # includes orjson.JSONDecodeError
        raise SetupError(f"{path}:{number}: {error}") from None


def json_object(line: str) -> dict[str, object]:
    """A line that is a JSON object. Raises ValueError."""
    if not line.startswith(("{", "[")):
        raise ValueError(f"not a JSON object: {line[:_SHOWN_CHARS]!r}")
    value: object = orjson.loads(line)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return cast("dict[str, object]", value)


def cells_of(line: str) -> list[str]:
    """The cells of one CSV line, without blanks around them. Raises ValueError."""
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:
        raise ValueError(str(error)) from None


def table_rows(path: Path, columns: Collection[str], what: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line number, cells by column) of a CSV file whose header has these columns. Raises
    SetupError."""
    header: Sequence[str] | None = None
    for number, line in lines_of(path):
        cells = at_line(path, number, cells_of, line)
        if header is None:
            header = cells
            if missing := sorted(set(columns) - set(cells)):
                raise SetupError(f"{path}:{number}: this is not {what}: no column {', '.join(missing)}")
            continue
        if len(cells) != len(header):
            raise SetupError(f"{path}:{number}: {len(cells)} cells under {len(header)} columns")
        yield number, dict(zip(header, cells, strict=True))
