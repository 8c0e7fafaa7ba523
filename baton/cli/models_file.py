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
    if ending == ".toml":
        return tomllib.loads(text)
    return json.loads(text) if ending == ".json" else yaml.safe_load(text)
