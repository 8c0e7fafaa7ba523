"""The findings of `baton doctor`."""

from typing import Literal

import msgspec

Level = Literal["ok", "note", "bad"]


class Finding(msgspec.Struct, frozen=True):
    level: Level
    text: str
