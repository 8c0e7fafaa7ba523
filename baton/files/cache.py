"""The folder for what can be made again: compiled kernels, unpacked GGUF files, streamed layers,
vocabularies, timings of steps, and what transformers finds in its own sources."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from baton.core.errors import CannotWrite
from baton.files.outputs import write_whole


def cache_folder(name: str) -> Path:
    """Return the folder `name` of the cache: in $BATON_CACHE_DIR, else in $XDG_CACHE_HOME/baton, else in
    ~/.cache/baton. It need not exist."""
    if root := os.environ.get("BATON_CACHE_DIR"):
        return Path(root) / name
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "baton" / name


def keep_in_cache(file: Path, chunks: Iterable[bytes], *, kept: int) -> None:
    """Write a file of the cache whole, and remove the oldest of its folder beyond `kept`. A cache that cannot
    be written keeps nothing, which is no error."""
    with suppress(OSError, CannotWrite):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, chunks)
        for path in sorted(file.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-kept]:
            path.unlink(missing_ok=True)
