"""A model's vocabulary as xgrammar has it, remembered by all that it was read from.

Reading one takes a second and a half of a processor, and every worker of a host needs the same one while it
starts. The first reads it, and the others find it in the cache.
"""

import fcntl
import hashlib
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from baton.files.cache import cache_folder
from baton.files.outputs import CannotWrite, write_whole
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
    with _alone(file):
        with suppress(OSError, UnicodeDecodeError):
            return file.read_text()
        text = read_vocabulary(folder, vocab, stop_token_ids)
        with suppress(OSError, CannotWrite):
            write_whole(file, [text.encode()])
            _make_room(file.parent)
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


@contextmanager
def _alone(file: Path) -> Generator[None]:
    """Keep other processes of this host from reading the same vocabulary meanwhile, where the cache can be
    written. The kernel ends the lock of a process that ends."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = (file.parent / f"{file.name}.lock").open("w")
    except OSError:
        yield
        return
    with lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_room(folder: Path) -> None:
    """Raises OSError."""
    files = [path for path in folder.iterdir() if path.suffix != ".lock"]
    for path in sorted(files, key=lambda path: path.stat().st_mtime)[:-KEPT]:
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
