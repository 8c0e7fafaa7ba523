"""JSON from model and adapter folders, which may come from anybody. No torch here.

Reading is bounded in memory, and whatever is wrong is a SetupError that names the file.
"""

import json
import os
from pathlib import Path
from typing import Any, cast

from baton.core.errors import SetupError
from baton.files.structured_file import each_once

BYTES_MAX = 16 * 2**20
"""Largest config.json and adapter_config.json. Real ones have a few kilobytes."""


def read_json_object(
    path: Path, *, bytes_max: int = BYTES_MAX, what: str = "a JSON object"
) -> dict[str, Any] | None:
    """None if there is no such file. `what` names the kind of file in errors.

    Raises SetupError if the file is unreadable, no regular file, larger than `bytes_max`, or no JSON object.
    """
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise SetupError(f"{path} is no regular file; put the model's own file there")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(min(size, bytes_max) + 1)  # a read takes memory for all that it may get
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error}") from error
    if len(content) > bytes_max:
        raise SetupError(
            f"{path} has more than {bytes_max} bytes, which no such file needs; download it anew"
        )
    return parse_json_object(content, str(path), what=what)


def parse_json_object(
    content: bytes, where: str, *, what: str = "a JSON object", may_repeat: bool = True
) -> dict[str, Any]:
    """Parse a JSON object.

    Raises SetupError if the content is no JSON object, or gives two values to one name: programs differ in
    which of them they take. `may_repeat` accepts a name that is there again with the same value.
    """
    hook = _without_contradictions if may_repeat else each_once
    try:
        value: object = json.loads(content.decode("utf-8"), object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        raise SetupError(f"{where} is not {what}: {error}; download it anew") from error
    if not isinstance(value, dict):
        raise SetupError(f"{where} is not {what}: it must hold a JSON object")
    return cast(dict[str, Any], value)


def _without_contradictions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: dict[str, Any] = {}
        for name, value in pairs:
            if name in seen and seen[name] != value:
                raise ValueError(f"{name!r:.100} is there twice, with different values")
            seen[name] = value
    return found
