"""Files that users write in TOML, YAML or JSON. The ending of the name decides."""

import json
import tomllib
from pathlib import Path
from typing import Any

import yaml

from baton.core.errors import SetupError

ENDINGS = (".yaml", ".yml", ".toml", ".json")


def read_structured(path: Path, *, what: str, bytes_max: int) -> Any:
    """The parsed content; None if the file is empty. `what` begins every error message.

    Raises SetupError if the file cannot be read, is too large or malformed, or has one name twice in one
    place (one of the two values would be lost).
    """
    check_ending(path, what=what)
    try:
        if path.stat().st_size > bytes_max:
            raise SetupError(f"{what}: {path}: more than {bytes_max} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{what}: cannot read {path}: {error}") from None
    try:
        return _parsed(text, path.suffix)
    except (ValueError, yaml.YAMLError) as error:
        raise SetupError(f"{what}: {path}: {' '.join(str(error).split())}") from None


def check_ending(path: Path, *, what: str) -> None:
    """Raises SetupError."""
    if path.suffix not in ENDINGS:
        raise SetupError(f"{what}: {path}: the name must end in {', '.join(ENDINGS)}")


def _parsed(text: str, ending: str) -> Any:
    """Raises ValueError, yaml.YAMLError."""
    if not text.strip():
        return None
    if ending == ".toml":
        return tomllib.loads(text)
    if ending == ".json":
        return json.loads(text, object_pairs_hook=each_once)
    loader = _YamlLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def each_once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the mapping of these pairs. Raises ValueError for a name that is there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is there twice")
    return found


class _YamlLoader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != _MERGE_TAG]
        each_once([(str(name), None) for name in names])
        return super().construct_mapping(node, deep=deep)


_MERGE_TAG = "tag:yaml.org,2002:merge"
