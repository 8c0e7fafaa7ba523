"""What the leader of a worker tells the followers of its ranks to do, and what they report."""

from typing import Annotated

import msgspec

from baton.core.messages import AdapterRef
from baton.core.steps import StepPlan

TEXT_CHARS_MAX = 4096
"""The longest text of a report over TCP."""


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read the rank's part of a LoRA adapter beside the steps, and report `AdapterRead`."""

    ref: AdapterRef


class InstallAdapter(msgspec.Struct, frozen=True, tag=True):
    """Put an adapter that was read into a slot: later steps use it."""

    key: str


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Forget an adapter, whether it is installed or only read."""

    key: str


class RaiseGenerations(msgspec.Struct, frozen=True, tag=True):
    """Blocks were given out for new content, which later orders write: see `engine.kv.generations`."""

    blocks: tuple[int, ...]
    generations: tuple[int, ...]


AdapterOrder = ReadAdapter | InstallAdapter | DropAdapter
RareOrder = AdapterOrder | RaiseGenerations
RankOrder = StepPlan | RareOrder
"""Orders are carried out in the order in which they were sent, the same on every rank."""


class FollowerReady(msgspec.Struct, frozen=True, tag=True):
    """A follower can execute plans."""

    pool_address: str
    """Memory of its KV pool, for `KVPool.attach`."""
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Time that it took to read its part of the model."""
    floor_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Least time of a step, in which it reads the weights that it streams."""


class FollowerFailed(msgspec.Struct, frozen=True, tag=True):
    """A follower cannot go on."""

    reason: str
    is_setup: bool = False
    """Somebody must change something first: another start would fail alike."""


class AdapterRead(msgspec.Struct, frozen=True, tag=True):
    """How `ReadAdapter` ended."""

    key: str
    error: str = ""


FollowerReport = FollowerReady | FollowerFailed | AdapterRead


def shortened(report: FollowerReport) -> FollowerReport:
    """The report with texts that fit into a message of bounded size."""
    match report:
        case FollowerReady():
            return report
        case FollowerFailed():
            return msgspec.structs.replace(report, reason=report.reason[:TEXT_CHARS_MAX])
        case AdapterRead():
            return msgspec.structs.replace(report, error=report.error[:TEXT_CHARS_MAX])
