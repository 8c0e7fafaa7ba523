"""The file of sign-in sessions. A restarted dashboard keeps them, so that a screen on a wall goes on.

It has digests and names, no secret and no token.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from control_plane.dashboard.sessions import Session

log = logging.getLogger(__name__)

_decoder = msgspec.json.Decoder(dict[str, Session])


class SessionFile:
    def __init__(self, path: Path | None) -> None:
        """`path` None keeps nothing."""
        self._path = path

    def read(self) -> dict[str, Session]:
        if self._path is None:
            return {}
        try:
            return _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning(
                "sessions file %s cannot be read, so everybody has to sign in again: %s", self._path, error
            )
            return {}

    def write(self, sessions: Mapping[str, Session]) -> None:
        """Replace the file as a whole or not at all, readable by its owner only."""
        if self._path is None:
            return
        beside = self._path.with_suffix(".new")
        try:
            handle = os.open(beside, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(dict(sessions)))
            os.replace(beside, self._path)
        except OSError as error:
            log.warning(
                "sessions file %s cannot be written, so sessions end with this process: %s", self._path, error
            )
