"""A model's vocabulary as xgrammar has it, remembered by all that it was read from.

Reading one takes a second and a half of a processor, for each worker and at each start. Workers that start at
the same time on a host without it read it each: none waits for another, which may have been stopped.
"""

import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from baton.files.cache import cache_folder, keep_in_cache
from engine.vocabulary_process import read_vocabulary

log = logging.getLogger(__name__)

LIBRARIES = ("transformers", "tokenizers", "xgrammar")
WEIGHTS = frozenset((".safetensors", ".gguf", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx"))
FILE_BYTES_MAX = 256 * 2**20
"""Larger files of a model's folder are no part of its tokenizer."""
KEPT = 16
"""Vocabularies in the cache, some megabytes each; the oldest makes room."""


def vocabulary_of(folder: Path, vocab: int, stop_token_ids: Sequence[int]) -> str:
    """Return what `read_vocabulary` returns, from the cache if it was read before. Raises what
    `read_vocabulary` raises."""
    try:
        key = _key(folder, vocab, stop_token_ids)
    except OSError as error:
        log.info("the vocabulary of %s is not remembered: %s", folder, error)
        return read_vocabulary(folder, vocab, stop_token_ids)
    file = cache_folder("vocabularies") / key
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text()
    text = read_vocabulary(folder, vocab, stop_token_ids)
    keep_in_cache(file, [text.encode()], kept=KEPT)
    return text


def forget_vocabulary(folder: Path, vocab: int, stop_token_ids: Sequence[int]) -> None:
    """Have the next call read the tokenizer, since what the cache holds is broken."""
    with suppress(OSError):
        (cache_folder("vocabularies") / _key(folder, vocab, stop_token_ids)).unlink(missing_ok=True)


def _key(folder: Path, vocab: int, stop_token_ids: Sequence[int]) -> str:
    """Return a name that changes with every file of the folder but its weights, and with the libraries.
    Raises OSError."""
    digest = hashlib.sha256()
    for one in (*(f"{name} {version(name)}" for name in LIBRARIES), str(vocab), repr(tuple(stop_token_ids))):
        digest.update(one.encode() + b"\0")
    for path in sorted(folder.iterdir()):
        if path.suffix in WEIGHTS or not path.is_file() or path.stat().st_size > FILE_BYTES_MAX:
            continue
        content = path.read_bytes()
        digest.update(path.name.encode("utf-8", "surrogateescape") + b"\0%d\0" % len(content))
        digest.update(content)
    return digest.hexdigest()
