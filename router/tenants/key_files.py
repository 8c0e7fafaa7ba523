"""Files of keys."""

import fcntl
import json
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml

from baton.core.errors import SetupError
from baton.files.outputs import write_whole
from baton.files.structured_file import read_structured
from router.tenants.keys import KeyBook, read_book

FILE_BYTES_MAX = 256 * 2**20
LOCK_S = 10.0
LOCK_LOOK_S = 0.02


def read_file(path: Path) -> KeyBook:
    """Read a file of keys. Raises SetupError if it cannot be read or has an error."""
    fields = read_structured(path, what="keys", bytes_max=FILE_BYTES_MAX)
    if fields is None:
        fields = {}
    if not isinstance(fields, dict):
        raise SetupError(f"keys: {path}: must have `tenants` and `keys`")
    return read_book(cast("dict[str, Any]", fields), str(path))


@contextmanager
def changing(path: Path) -> Generator[None]:
    """Hold the lock of a file from reading to writing it. Without it, changes that others write in between
    would be lost. The lock is on the folder that links lead to, since the file itself is replaced. Raises
    SetupError if there is no folder, or others hold the lock too long."""
    try:
        folder = os.open(Path(os.path.realpath(path)).parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise SetupError(f"keys: cannot write {path}: {error.strerror or error}") from None
    try:
        _lock(folder, path)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, path: Path) -> None:
    """Lock an open folder until it is closed. Raises SetupError."""
    deadline_s = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise SetupError(f"keys: somebody else has been changing {path} for {LOCK_S:g} s") from None
        except OSError:  # Some file systems have no locks; a change then goes unprotected.
            return None
        time.sleep(LOCK_LOOK_S)


def write_file(path: Path, book: KeyBook) -> None:
    """Write a file in one step: readers see the old one or the new one. Only its owner may read a new
    file."""
    fields = msgspec.to_builtins(book)
    if path.suffix == ".toml":
        text = _toml(book)
    elif path.suffix == ".json":
        text = json.dumps(fields, indent=2) + "\n"
    else:
        text = yaml.safe_dump(fields, sort_keys=False)
    write_whole(path, (text.encode(),), mode=0o600)


def _toml(book: KeyBook) -> str:
    """Return the keys as TOML. Strings, numbers and lists of strings are written in it as in JSON."""
    lines: list[str] = []
    for name, tenant in book.tenants.items():
        lines.append(f"[tenants.{json.dumps(name)}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in msgspec.to_builtins(tenant).items()]
        lines.append("")
    for record in book.keys:
        lines.append("[[keys]]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in msgspec.to_builtins(record).items()]
        lines.append("")
    return "\n".join(lines)
