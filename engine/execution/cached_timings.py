"""What a worker measured of itself when it started, kept in the cache for its next start.

Timing all shapes takes a second of every core. A worker that starts again with the same model, settings and
processor makes the first few steps, and those that there was no time for (`engine.execution.self_timing`).
"""

import hashlib
import logging
from collections.abc import Sequence
from typing import Annotated

import msgspec
import torch

from baton.core.version import VERSION
from baton.files.cache import cache_folder, keep_in_cache
from engine.native.classes import processor_key
from engine.scheduling.step_time import StepWork

log = logging.getLogger(__name__)

FOLDER = "timings"
STEP_S_MAX = 600.0
"""The longest time of a step that is believed."""
StepSeconds = Annotated[float, msgspec.Meta(gt=0, le=STEP_S_MAX)]
KEPT = 64
"""Files in the cache, some kilobytes each; the oldest makes room."""


class CachedTimings:
    """The file of one worker's timings. A file that cannot be read or written is as good as none."""

    def __init__(self, facts: Sequence[object]) -> None:
        """`facts`: everything that a step's time depends on but the processor and the versions of Baton and
        torch, which are added. Their `repr` must tell them apart."""
        self._file = cache_folder(FOLDER) / _name((*facts, VERSION, torch.__version__, processor_key()))

    def read(self) -> list[tuple[StepWork, float]]:
        """Return what an earlier start measured, in the order in which it was written; nothing if there was
        none."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=list[tuple[StepWork, StepSeconds]])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            log.info("%s: the timings of an earlier start are not used: %s", self._file, error)
            return []

    def write(self, timings: Sequence[tuple[StepWork, float]]) -> None:
        keep_in_cache(self._file, [msgspec.json.encode(timings)], kept=KEPT)


def _name(facts: Sequence[object]) -> str:
    digest = hashlib.sha256()
    for fact in facts:
        digest.update(repr(fact).encode() + b"\0")
    return f"{digest.hexdigest()}.json"
