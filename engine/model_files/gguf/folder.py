"""A GGUF file presented as a Hugging Face folder: config, tokenizer and chat template are written out
once, into the user's cache; the weights stay where they are. No torch here.

So all that reads model folders (router, checks, model families) reads GGUF files too.
"""

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from baton.core.errors import SetupError
from baton.files.cache import cache_folder
from engine.model_files.gguf.config import hugging_face_config
from engine.model_files.gguf.reader import GgufHeader, read_gguf
from engine.model_files.json_files import read_json_object

POINTER = "gguf.json"
"""File in such a folder that says where the weights are."""
_LAYOUT = 2
"""Raised when what is written changes."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Names of sampling in GGUF's metadata and in a generation_config.json."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja")


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that a folder without config.json has; of several parts the first.

    Raises SetupError: a folder with several models.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if (path / "config.json").exists() or not path.is_dir():
        return None
    found = sorted(path.glob("*.gguf"))
    firsts = [file for file in found if "-of-" not in file.name or "-00001-of-" in file.name]
    if len(firsts) > 1:
        names = ", ".join(file.name for file in firsts)
        raise SetupError(f"{path} has several GGUF files ({names}): name one of them")
    return firsts[0] if firsts else None


def unpack_gguf(path: Path) -> Path:
    """The folder that stands for a GGUF file; made if it is not there yet, whole or not at all.

    A tokenizer beside the file comes before the one inside. Raises SetupError: see `read_gguf` and
    `hugging_face_config`, or the cache cannot be written.
    """
    path = path.resolve()
    folder = _cache() / f"{path.stem}-{_key(path)}"
    if folder.is_dir():
        return folder
    header = read_gguf(path)
    config = hugging_face_config(header)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _write(unfinished, header, config)
            with contextlib.suppress(OSError):  # somebody else was first: theirs is the same
                unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise SetupError(
            f"cannot write {folder}: {error}; set BATON_CACHE_DIR to a folder that can be"
        ) from error
    return folder


def weight_files_of(folder: Path) -> list[Path] | None:
    """Weight files behind a folder that was made here; None for any other folder."""
    pointer = read_json_object(folder / POINTER)
    if pointer is None:
        return None
    files: object = pointer.get("files")
    if (
        not isinstance(files, list)
        or not files
        or not all(isinstance(f, str) for f in cast(list[Any], files))
    ):
        raise SetupError(f"{folder / POINTER} is damaged: delete {folder}")
    return [Path(file) for file in cast(list[str], files)]


def _cache() -> Path:
    return cache_folder("gguf")


def _key(path: Path) -> str:
    """Changes with the file and with what lies beside it."""
    try:
        facts: list[object] = [_LAYOUT, str(path), path.stat().st_size, path.stat().st_mtime_ns]
        for name in TOKENIZER_FILES:
            beside = path.parent / name
            facts.append(beside.stat().st_mtime_ns if beside.is_file() else None)
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error}") from error
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling that the file recommends, under the names of a generation_config.json."""
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _write(folder: Path, header: GgufHeader, config: dict[str, Any]) -> None:
    source = header.files[0].parent
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {name: value for name, value in config.items() if name.endswith("_token_id")}
    generation |= _sampling(header.metadata)
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")
    (folder / POINTER).write_text(json.dumps({"files": [str(file) for file in header.files]}) + "\n")
    beside = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    if any(file.name in ("tokenizer.json", "tokenizer.model") for file in beside):
        for file in beside:
            shutil.copyfile(file, folder / file.name)
    elif "tokenizer.ggml.tokens" in header.metadata:
        from engine.model_files.gguf.tokenizer import write_tokenizer

        write_tokenizer(folder, header)
