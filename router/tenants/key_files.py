"""Files of keys: TOML, YAML or JSON, by the name's ending."""

import json
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import yaml

from baton.core.errors import SetupError
from router.tenants.keys import KeyBook, read_book

FILE_BYTES_MAX = 256 * 2**20
ENDINGS = (".toml", ".yaml", ".yml", ".json")


def read_file(path: Path) -> KeyBook:
    """Raises SetupError: it cannot be read, or something in it is wrong."""
    check_ending(path)
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise SetupError(f"{path}: more than {FILE_BYTES_MAX} bytes")
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"keys: cannot read {path}: {error}") from None
    try:
        fields = _parse(text, path.suffix)
    except (ValueError, yaml.YAMLError) as error:
        raise SetupError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict):
        raise SetupError(f"{path}: must have `tenants` and `keys`")
    return read_book(fields, str(path))


def check_ending(path: Path) -> None:
    if path.suffix not in ENDINGS:
        raise SetupError(f"keys: {path}: the name must end in {', '.join(ENDINGS)}")


def _parse(text: str, ending: str) -> Any:
    if ending == ".toml":
        return tomllib.loads(text)
    if ending == ".json":
        return json.loads(text) if text.strip() else {}
    return yaml.safe_load(text) or {}


def write_file(path: Path, book: KeyBook) -> None:
    """In one step: whoever reads it sees the old one or the new one. For its owner only, if it is new."""
    fields = msgspec.to_builtins(book)
    if path.suffix == ".toml":
        text = _toml(book)
    elif path.suffix == ".json":
        text = json.dumps(fields, indent=2) + "\n"
    else:
        text = yaml.safe_dump(fields, sort_keys=False)
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        handle, name = tempfile.mkstemp(dir=path.parent or Path(), prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError as error:
        raise SetupError(f"keys: cannot write {path}: {error.strerror or error}") from None


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
