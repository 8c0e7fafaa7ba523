"""The file that names the models of a cluster."""

from pathlib import Path
from typing import Any

import msgspec

from baton.core.errors import SetupError
from baton.files.structured_file import read_structured

FILE_BYTES_MAX = 2**20
HINT = "must say `models:`, then each name with its sections under it, and nothing else"


class _File(msgspec.Struct, forbid_unknown_fields=True):
    models: dict[str, dict[str, Any]]


def read_models(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of each model, by name, from the file's `models` (see `ModelEntry`). Raises SetupError."""
    fields = read_structured(path, what="models", bytes_max=FILE_BYTES_MAX)
    try:
        models = msgspec.convert(fields, _File).models
    except msgspec.ValidationError as error:
        raise SetupError(f"models: {path}: {HINT}; {error}") from None
    if not models:
        raise SetupError(f"models: {path}: {HINT}")
    return models
