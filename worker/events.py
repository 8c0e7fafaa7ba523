"""What happens to a worker, and what it does about it.

`worker.core.WorkerCore` is pure: `handle(event, now_s=…) -> list[Action]`. The asyncio process
(`worker.process`) and the simulator (`simulator.faults`) feed it events and perform its actions.
"""

import msgspec

from baton.core.ids import RouterId, WorkerId
from baton.core.messages import (
    PeerRef,
    ReaderMessage,
    Role,
    RouterMessage,
    SourceMessage,
    WorkerMessage,
)
from baton.core.steps import StepPlan, StepResult
from baton.core.store import StoreToWorker, StoreWelcome, WorkerToStore
from kv_transfer.read import BlockRead, ReadDone, ReadSettled

# --- events ---------------------------------------------------------------------------------------


class RouterJoined(msgspec.Struct, frozen=True):
    """A router opened a session (again). The core answers with WorkerHello and a block snapshot."""

    router_id: RouterId


class RouterLost(msgspec.Struct, frozen=True):
    """Its session broke. Its sequences are kept for `router_grace_s`, then freed."""

    router_id: RouterId


class FromRouter(msgspec.Struct, frozen=True):
    router_id: RouterId
    message: RouterMessage


class FromReader(msgspec.Struct, frozen=True):
    """A decode worker speaks to us, its source."""

    reader: WorkerId
    message: ReaderMessage


class ReaderLost(msgspec.Struct, frozen=True):
    """Its peer session broke; its leases run on (a one-sided read may still be under way)."""

    reader: WorkerId


class FromSource(msgspec.Struct, frozen=True):
    """A prefill worker speaks to us, its reader."""

    source: WorkerId
    message: SourceMessage


class SourceLost(msgspec.Struct, frozen=True):
    """Its peer session broke, could not be opened, or its fingerprint is not ours."""

    source: WorkerId
    message: str


class StepDone(msgspec.Struct, frozen=True):
    result: StepResult


class StoreJoined(msgspec.Struct, frozen=True):
    """The store node of this host welcomed us, (again): its arena is mapped. Nothing of an earlier session is
    valid any more."""

    welcome: StoreWelcome


class FromStore(msgspec.Struct, frozen=True):
    message: StoreToWorker


class StoreLost(msgspec.Struct, frozen=True):
    """The session with the store node ended. The mapping stays readable until copies under way are done."""


class CopyDone(msgspec.Struct, frozen=True):
    """A CopyToStore or CopyFromStore ended; it touches neither blocks nor slots from now on."""

    copy_id: int
    checksums: tuple[int, ...] = ()
    """CopyToStore: of each block, as it is in the arena; 0 where the store wants none."""
    corrupt: tuple[int, ...] = ()
    """CopyFromStore: positions whose checksum did not hold after the copy."""
    error: str = ""
    seconds: float = 0.0


class SetRole(msgspec.Struct, frozen=True):
    role: Role
    resumes: bool = False
    """Take new sequences again, after a Drain."""


class Drain(msgspec.Struct, frozen=True):
    """Refuse new sequences; those held run on."""


class Tick(msgspec.Struct, frozen=True):
    """The time `next_tick_s` named has come (or an earlier one: harmless)."""


WorkerEvent = (
    RouterJoined
    | RouterLost
    | FromRouter
    | FromReader
    | ReaderLost
    | FromSource
    | SourceLost
    | ReadDone
    | ReadSettled
    | StepDone
    | StoreJoined
    | FromStore
    | StoreLost
    | CopyDone
    | SetRole
    | Drain
    | Tick
)

# --- actions --------------------------------------------------------------------------------------


class ToRouter(msgspec.Struct, frozen=True):
    """Dropped by the adapter if the router's session is gone."""

    router_id: RouterId
    message: WorkerMessage


class ToReader(msgspec.Struct, frozen=True):
    reader: WorkerId
    message: SourceMessage


class ToSource(msgspec.Struct, frozen=True):
    """The adapter opens a session to the source if there is none; failing that, SourceLost."""

    source: PeerRef
    message: ReaderMessage


class RunStep(msgspec.Struct, frozen=True):
    """Compute it and answer with StepDone. The core has at most two in flight: the second begins when
    the first is done, and their answers come in order."""

    plan: StepPlan


class ToStore(msgspec.Struct, frozen=True):
    """Dropped by the adapter if the session is gone."""

    message: WorkerToStore


class CopyToStore(msgspec.Struct, frozen=True):
    """Pool blocks[i] to the arena's slots[i], beside the engine's steps. Always answered by one CopyDone."""

    copy_id: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


class CopyFromStore(msgspec.Struct, frozen=True):
    """The arena's slots[i] to pool blocks[i], checksums (0: none) verified on what arrived. Always answered
    by one CopyDone."""

    copy_id: int
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    checksums: tuple[int, ...]


WorkerAction = ToRouter | ToReader | ToSource | BlockRead | RunStep | ToStore | CopyToStore | CopyFromStore
