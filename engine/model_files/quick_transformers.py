"""transformers, imported without reading the sources of all its models each time.

Whenever it is imported it reads the 2,000 files of its models for what each of them offers, and once more
when a model's module is asked for: 0.9 of 1.9 s of a core from its import to a tokenizer (AMD EPYC Zen 3,
2026-11-30). What it found is kept in the cache folder, for the version that is installed.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from baton.files.cache import cache_folder, keep_in_cache

log = logging.getLogger(__name__)

_NAME = "transformers"
KEPT_FILES = 4
"""Number of files of the cache: installations of this user."""


def import_transformers() -> None:
    """Import transformers unless it is imported already. It is imported in its own way where this one fails,
    as it may in another version."""
    if _NAME in sys.modules:
        return
    try:
        utils = _without_its_models("transformers.utils.import_utils")
        utils.create_import_structure_from_path = _Remembered(utils.create_import_structure_from_path)
    except Exception:
        log.debug("transformers is imported in its own way", exc_info=True)
        for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
            del sys.modules[name]
    importlib.import_module(_NAME)


def _without_its_models(module: str) -> Any:
    """Import a module of transformers before the package itself."""
    spec = importlib.util.find_spec(_NAME)
    assert spec is not None
    bare: Any = importlib.util.module_from_spec(spec)
    bare.__version__ = version(_NAME)
    sys.modules[_NAME] = bare
    try:
        return importlib.import_module(module)
    finally:
        del sys.modules[_NAME]


class _Remembered:
    """The function that reads what a folder of sources offers, which knows that of all models already."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __call__(self, module_path: Any) -> Any:
        folder = Path(os.path.dirname(module_path) if os.path.isfile(module_path) else module_path)
        if folder.name != "models":
            return self._theirs(module_path)
        try:
            file = cache_folder(_NAME) / _key(folder)
        except (OSError, RuntimeError):  # a user without a home, for example
            return self._theirs(module_path)
        if (known := _read(file)) is not None:
            return known
        found = self._theirs(module_path)
        with contextlib.suppress(TypeError):  # another version may find something else
            content = json.dumps(_to_json(found)).encode()
            keep_in_cache(file, [_digest(content), b"\n", content], kept=KEPT_FILES)
        return found


def _key(folder: Path) -> str:
    parts = (version(_NAME), str(folder.resolve()), str(folder.stat().st_mtime_ns))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32] + ".json"


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _read(file: Path) -> Any:
    """What the file says; None: it is not there, or is not as it was written."""
    try:
        digest, _, content = file.read_bytes().partition(b"\n")
    except OSError:
        return None
    return _from_json(json.loads(content)) if digest == _digest(content) else None


def _to_json(value: Any) -> Any:
    """Names, sets of them, and dicts whose keys are either, as JSON."""
    if isinstance(value, dict):
        pairs: Any = value.items()  # pyright: ignore[reportUnknownMemberType]
        return {"pairs": [[_to_json(key), _to_json(one)] for key, one in pairs]}
    if isinstance(value, (set, frozenset)):
        names: Any = value
        return [type(names).__name__, *sorted(names)]
    if isinstance(value, str):
        return value
    raise TypeError(f"a {type(value).__name__} is not known here")


_KINDS: dict[str, Any] = {"set": set, "frozenset": frozenset}


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        pairs: Any = value["pairs"]
        return {_from_json(key): _from_json(one) for key, one in pairs}
    if isinstance(value, list):
        kind, *names = value  # pyright: ignore[reportUnknownVariableType]
        return _KINDS[str(kind)](names)  # pyright: ignore[reportUnknownArgumentType]
    return value
