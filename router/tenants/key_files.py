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
    """Raises SetupError: it cannot be read, or something in it is wrong."""
    fields = read_structured(path, what="keys", bytes_max=FILE_BYTES_MAX)
    if fields is None:
        fields = {}
    if not isinstance(fields, dict):
        raise SetupError(f"keys: {path}: must have `tenants` and `keys`")
    return read_book(cast("dict[str, Any]", fields), str(path))


@contextmanager
def changing(path: Path) -> Generator[None]:
    """From reading a file to writing it: one at a time, or what another has written in between is lost. The
    folder is locked, where links lead to, not the file, which is replaced. Raises SetupError: no folder, or
    others hold it too long."""
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
    """Until it is closed. Raises SetupError."""
    deadline_s = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise SetupError(f"keys: somebody else has been changing {path} for {LOCK_S:g} s") from None
        except OSError:  # a file system without locks: no worse than before there was one
            return None
        time.sleep(LOCK_LOOK_S)


def write_file(path: Path, book: KeyBook) -> None:
    """In one step: whoever reads it sees the old one or the new one. For its owner only, if it is new."""
    fields = msgspec.to_builtins(book)
    if path.suffix == ".toml":
        text = _toml(book)
    elif path.suffix == ".json":
        text = json.dumps(fields, indent=2) + "\n"
    else:
        text = yaml.safe_dump(fields, sort_keys=False)
    write_whole(path, (text.encode(),), mode=0o600)


def _toml(book: KeyBook) -> str:
    """Tables of strings, numbers and lists of strings, which are JSON as TOML has them."""
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
