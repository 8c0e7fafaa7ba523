"""A file that names the models of a cluster: YAML, TOML or JSON, by the name's ending."""

import json
import tomllib
from pathlib import Path
from typing import Any

import yaml

from baton.core.errors import SetupError

FILE_BYTES_MAX = 2**20
ENDINGS = (".yaml", ".yml", ".toml", ".json")


def read_models(path: Path) -> dict[str, Any]:
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
    models = fields.get("models") if isinstance(fields, dict) else None
    if not isinstance(models, dict) or not models or not all(isinstance(m, dict) for m in models.values()):
        raise SetupError(f"models: {path}: must say `models:`, then each name with its sections under it")
    if unknown := sorted(set(fields) - {"models"}):
        raise SetupError(f"models: {path}: has `models` and nothing else, not {unknown[0]!r:.80}")
    return {str(name): dict(entry) for name, entry in models.items()}


def _parsed(text: str, ending: str) -> Any:
    if ending == ".toml":
        return tomllib.loads(text)
    return json.loads(text) if ending == ".json" else yaml.safe_load(text)
