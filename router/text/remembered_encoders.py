"""Tests of quick encoders are remembered, so that later starts of a router need not repeat them.

A test takes half a second and leaves 30 MB of both libraries' caches behind. Its result is a file in the
cache, named after all that it depends on.
"""

import contextlib
import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from baton.files.cache import cache_folder
from baton.files.outputs import CannotWrite, write_whole
from router.text.quick_encoder import PROBES, QuickEncoder, quick_encoder

LIBRARIES = ("fastokens", "tokenizers")
TEST_VERSION = 1
"""A change of what is tested raises it; the probes count by themselves."""
REASON_BYTES_MAX = 1000


def remembered_encoder(rust: Any, tokenizer_json: str) -> tuple[QuickEncoder | None, str]:
    """Return what `quick_encoder` returns, which tests this tokenizer unless the cache has its test.
    The cache may be lost, or not be writable."""
    file = cache_folder("tokenizers") / _key(tokenizer_json)
    known = _read(file)
    if known:
        return None, known
    encoder, reason = quick_encoder(rust, tokenizer_json, is_tested=known is not None)
    if known is None:
        with contextlib.suppress(OSError, CannotWrite):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, [reason.encode()])
    return encoder, reason


def _key(tokenizer_json: str) -> str:
    parts = [*(f"{one} {version(one)}" for one in LIBRARIES), str(TEST_VERSION), *PROBES, tokenizer_json]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _read(file: Path) -> str | None:
    """The reason why there is no quick encoder; empty: it passed; None: nobody knows."""
    try:
        with file.open("rb") as opened:
            return opened.read(REASON_BYTES_MAX).decode(errors="replace")
    except OSError:
        return None
