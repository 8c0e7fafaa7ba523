"""A folder of one cluster on this machine: its sockets, where its control plane is, what that remembers."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

FOLDER_PREFIX = "baton-"
SOCKET_NAME = "store.sock"
ADDRESS_NAME = "control"
RECORD_NAME = "record.json"
DASHBOARD_TOKEN_NAME = "dashboard.token"
DASHBOARD_SESSIONS_NAME = "sessions.json"
_LOCK_NAME = "lock"

FOLDER_BYTES_MAX = 80
"""Of the folder's path: a Unix socket's address has at most 107 bytes."""


class RuntimeFolder:
    """That nobody else can enter, gone with the cluster."""

    def __init__(self) -> None:
        """Raises OSError."""
        candidates = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp")
        able = [c for c in candidates if len(os.fsencode(c)) < FOLDER_BYTES_MAX and os.access(c, os.W_OK)]
        self.path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=next(iter(able), "/tmp")))
        self._lock = os.open(self.path / _LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

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

    def tell_address(self, address: str) -> None:
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
