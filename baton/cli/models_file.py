"""A file that names the models of a cluster: YAML, TOML or JSON, by the name's ending."""

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import yaml

from baton.core.errors import SetupError

FILE_BYTES_MAX = 2**20
HINT = "must say `models:`, then each name with its sections under it, and nothing else"
ENDINGS = (".yaml", ".yml", ".toml", ".json")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    models: dict[str, dict[str, Any]]


def read_models(path: Path) -> dict[str, dict[str, Any]]:
    """What its `models` says: name to sections, see `config_models.ModelEntry`. Raises SetupError."""
    if path.suffix not in ENDINGS:
        raise SetupError(f"models: {path}: the name must end in {', '.join(ENDINGS)}")
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise SetupError(f"models: {path}: more than {FILE_BYTES_MAX} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"models: cannot read {path}: {error}") from None
    try:
        fields = _parsed(text, path.suffix)
    except (ValueError, yaml.YAMLError) as error:
        raise SetupError(f"models: {path}: {' '.join(str(error).split())}") from None
    try:
        models = msgspec.convert(fields, _File).models
    except msgspec.ValidationError as error:
        raise SetupError(f"models: {path}: {HINT}; {error}") from None
    if not models:
        raise SetupError(f"models: {path}: {HINT}")
    return models


def _parsed(text: str, ending: str) -> Any:
    """Raises ValueError, yaml.YAMLError; also for a name that is there twice, of which one would be lost."""
    if ending == ".toml":
        return tomllib.loads(text)
    if ending == ".json":
        return json.loads(text, object_pairs_hook=_each_once)
    loader = _YamlLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _each_once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is there twice")
    return found


class _YamlLoader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != _MERGE_TAG]
        _each_once([(str(name), None) for name in names])
        return super().construct_mapping(node, deep=deep)


_MERGE_TAG = "tag:yaml.org,2002:merge"
