"""What was ordered, in a file: for the next control plane."""

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from control_plane.orders import ControlRecord

log = logging.getLogger(__name__)

_decoder = msgspec.json.Decoder(ControlRecord)


class RecordFile:
    def __init__(self, path: Path | None) -> None:
        """None: nothing is remembered."""
        self._path = path

    def read(self) -> ControlRecord | None:
        """None: there is none, or none that can be read."""
        if self._path is None:
            return None
        try:
            return _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("what was ordered before is forgotten, %s cannot be read: %s", self._path, error)
            return None

    def write(self, record: ControlRecord) -> None:
        """Whole or not at all. A file that cannot be written costs memory of orders only, and is told."""
        if self._path is None:
            return
        beside = self._path.with_suffix(".new")
        try:
            beside.write_bytes(msgspec.json.encode(record))
            os.replace(beside, self._path)
        except OSError as error:
            log.warning("orders will be forgotten by the next control plane: %s", error)

    def remove(self) -> None:
        """Idempotent."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
