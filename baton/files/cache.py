"""The folder for what can be made again: compiled kernels, unpacked GGUF files, streamed layers,
vocabularies, timings of steps."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the folder `name` of the cache: in $BATON_CACHE_DIR, else in $XDG_CACHE_HOME/baton, else in
    ~/.cache/baton. It need not exist."""
    if root := os.environ.get("BATON_CACHE_DIR"):
        return Path(root) / name
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "baton" / name
