"""A folder of one cluster on this machine: its sockets, where its control plane is, what that remembers."""

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
"""As `mkdtemp` makes them."""

log = logging.getLogger(__name__)

FOLDER_BYTES_MAX = 80
"""Of the folder's path: a Unix socket's address has at most 107 bytes."""


class RuntimeFolder:
    """That nobody else can enter, gone with the cluster."""

    def __init__(self) -> None:
        """Raises OSError."""
        candidates = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp")
        able = [c for c in candidates if len(os.fsencode(c)) < FOLDER_BYTES_MAX and os.access(c, os.W_OK)]
        parent = Path(next(iter(able), "/tmp"))
        remove_stale(parent)
        self.path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
        begun = self.path / f"{_LOCK_NAME}.new"
        self._lock = os.open(begun, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        begun.rename(self.path / _LOCK_NAME)  # never to be seen without its lock

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
        """For commands on this machine."""
        (self.path / ADDRESS_NAME).write_text(address, encoding="utf-8")

    def remove(self) -> None:
        """Idempotent."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self.path)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def is_in_use(folder: Path) -> bool:
    """Its cluster runs. Raises OSError."""
    file = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def remove_stale(parent: Path) -> None:
    """Folders of ours in there whose cluster was killed, with tokens and records in them."""
    for folder in sorted(parent.glob(f"{FOLDER_PREFIX}*")):
        with contextlib.suppress(OSError):  # not ours to open, or gone
            if _NAME.fullmatch(folder.name) and folder.stat().st_uid == os.getuid() and not is_in_use(folder):
                shutil.rmtree(folder)
                log.info("removed %s, which a killed run had left", folder)
