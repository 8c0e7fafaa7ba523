"""The file that keeps orders for the next control plane."""

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
        """`path` None keeps nothing."""
        self._path = path

    def read(self) -> ControlRecord | None:
        """Return the record. None: there is no file, or it cannot be read."""
        if self._path is None:
            return None
        try:
            return _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("record %s cannot be read, so earlier orders are lost: %s", self._path, error)
            return None

    def write(self, record: ControlRecord) -> None:
        """Replace the file as a whole or not at all. If it cannot be written, only the memory of orders is
        lost, and a warning is logged."""
        if self._path is None:
            return
        beside = self._path.with_suffix(".new")
        try:
            beside.write_bytes(msgspec.json.encode(record))
            os.replace(beside, self._path)
        except OSError as error:
            log.warning("record %s cannot be written, so orders are lost at a restart: %s", self._path, error)

    def remove(self) -> None:
        """Remove the file. Idempotent."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
