"""The runtime folder of one cluster on this machine: its sockets, the address of its control plane, and its
record."""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

FOLDER_PREFIX = "baton-"
SOCKET_NAME = "store.sock"
ADDRESS_NAME = "control"
RECORD_NAME = "record.json"
DASHBOARD_TOKEN_NAME = "dashboard.token"
DASHBOARD_SESSIONS_NAME = "sessions.json"
_LOCK_NAME = "cluster.lock"
_NAME = re.compile(re.escape(FOLDER_PREFIX) + r"[a-z0-9_]{8}")
"""Pattern of the names that `mkdtemp` makes."""

log = logging.getLogger(__name__)

FOLDER_BYTES_MAX = 80
"""Longest path of the folder: a Unix socket's address has at most 107 bytes."""


class RuntimeFolder:
    """A folder that no other user can enter, removed with the cluster."""

    def __init__(self) -> None:
        """Create the folder. Raises OSError."""
        candidates = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp")
        able = [c for c in candidates if len(os.fsencode(c)) < FOLDER_BYTES_MAX and os.access(c, os.W_OK)]
        parent = Path(next(iter(able), "/tmp"))
        remove_stale(parent)
        self.path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
        begun = self.path / f"{_LOCK_NAME}.new"
        self._lock = os.open(begun, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        begun.rename(self.path / _LOCK_NAME)  # the file appears under its name only once it is locked

    def socket(self) -> str:
        return str(self.path / SOCKET_NAME)

    @property
    def record(self) -> Path:
        return self.path / RECORD_NAME

    @property
    def dashboard_token(self) -> Path:
        return self.path / DASHBOARD_TOKEN_NAME

    @property
    def dashboard_sessions(self) -> Path:
        return self.path / DASHBOARD_SESSIONS_NAME

    def write_address(self, address: str) -> None:
        """Write the address of the control plane, for commands on this machine."""
        (self.path / ADDRESS_NAME).write_text(address, encoding="utf-8")

    def remove(self) -> None:
        """Remove the folder. Idempotent."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self.path)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def is_in_use(folder: Path) -> bool:
    """Return whether the cluster of this folder runs. Raises OSError."""
    file = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def remove_stale(parent: Path) -> None:
    """Remove our folders in `parent` whose cluster was killed, with the tokens and records in them."""
    for folder in sorted(parent.glob(f"{FOLDER_PREFIX}*")):
        with contextlib.suppress(OSError):  # it belongs to another user, or is gone
            if _NAME.fullmatch(folder.name) and folder.stat().st_uid == os.getuid() and not is_in_use(folder):
                shutil.rmtree(folder)
                log.info("folder %s of a killed run was removed", folder)
