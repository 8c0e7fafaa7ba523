"""One store node per folder: two that wrote into the same files would ruin both's blocks."""

import fcntl
import os
import threading
from pathlib import Path

from baton.core.errors import SetupError

LOCK_NAME = "lock"

_held: dict[tuple[int, int], tuple[int, int]] = {}
"""The descriptor and the number of holders of each lock file this process holds, by (device, inode). A file
lock belongs to the process, which has one file open per block size."""
_guard = threading.Lock()


class FolderLock:
    """A lock that is held until `release`; the kernel releases it if the process dies, however it dies."""

    def __init__(self, directory: Path) -> None:
        """Raises SetupError if another process holds the lock, or the folder cannot be written."""
        path = directory / LOCK_NAME
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SetupError(f"store.ssd_dir: {path} cannot be opened: {error.strerror}") from error
        stat = os.fstat(fd)
        self._key = (stat.st_dev, stat.st_ino)
        with _guard:
            if held := _held.get(self._key):
                os.close(fd)
                _held[self._key] = (held[0], held[1] + 1)
            else:
                _lock(fd, directory)
                _held[self._key] = (fd, 1)

    def release(self) -> None:
        with _guard:
            fd, count = _held.pop(self._key)
            if count > 1:
                _held[self._key] = (fd, count - 1)
            else:
                os.close(fd)


def _lock(fd: int, directory: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        if isinstance(error, BlockingIOError):
            message = (
                f"store.ssd_dir: {directory} is in use by the store node with pid {pid}: one folder per node"
            )
        else:
            message = f"store.ssd_dir: {directory} cannot be locked: {error.strerror}"
        raise SetupError(message) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
