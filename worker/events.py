"""The events of a worker, and its actions.

`worker.core.WorkerCore` is pure: `handle(event, now_s=…) -> list[Action]`. The asyncio process
(`worker.process`) and the simulator (`simulator.faults`) feed it events and perform its actions.
"""

import msgspec

from baton.core.ids import RouterId, SeqKey, WorkerId
from baton.core.messages import (
    OwnerMessage,
    PeerRef,
    Phase,
    ReaderMessage,
    Role,
    RouterMessage,
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
    """The session of a router broke. Its sequences are kept for `router_grace_s`, then freed."""

    router_id: RouterId


class FromRouter(msgspec.Struct, frozen=True):
    router_id: RouterId
    message: RouterMessage


class PreparationBegan(msgspec.Struct, frozen=True):
    """A phase came, and what it needs is made ready. Its start follows, or `PreparationEnded`. Until then the
    worker holds it: it is not idle, and a drain waits for it."""

    key: SeqKey
    phase: Phase


class PreparationEnded(msgspec.Struct, frozen=True):
    """The phase will not start: it was cancelled, or what it needs is not to be had."""

    key: SeqKey
    reason: str


class FromReader(msgspec.Struct, frozen=True):
    """A message of a decode worker that reads our KV."""

    reader: WorkerId
    message: ReaderMessage


class ReaderLost(msgspec.Struct, frozen=True):
    """The session of a KV reader broke. Its leases run on, since a one-sided read may still be under way."""

    reader: WorkerId


class FromOwner(msgspec.Struct, frozen=True):
    """A message of a prefill worker that owns KV we read."""

    source: WorkerId
    message: OwnerMessage


class OwnerLost(msgspec.Struct, frozen=True):
    """The session with a KV owner broke or could not be opened, or its fingerprint is not ours."""

    source: WorkerId
    message: str


class StepDone(msgspec.Struct, frozen=True):
    result: StepResult


class StoreJoined(msgspec.Struct, frozen=True):
    """The store node of this host welcomed us (again), and its arena is mapped. Nothing of an earlier session
    is valid any more."""

    welcome: StoreWelcome


class FromStore(msgspec.Struct, frozen=True):
    message: StoreToWorker


class StoreLost(msgspec.Struct, frozen=True):
    """The session with the store node ended. The mapping stays readable until copies under way are done."""


class CopyDone(msgspec.Struct, frozen=True):
    """A CopyToStore or CopyFromStore ended. It touches neither blocks nor slots from now on."""

    copy_id: int
    checksums: tuple[int, ...] = ()
    """CopyToStore: the checksum of each block, as it is in the arena; 0 where the store wants none."""
    corrupt: tuple[int, ...] = ()
    """CopyFromStore: positions whose checksum did not hold after the copy."""
    error: str = ""
    seconds: float = 0.0


class SetRole(msgspec.Struct, frozen=True):
    role: Role
    resumes: bool = False
    """Whether new sequences are taken again, after a Drain."""


class Drain(msgspec.Struct, frozen=True):
    """Refuse new sequences; those that are held run on."""


class SetParked(msgspec.Struct, frozen=True):
    """Rows of steps wait for experts that no rank holds, or do not any more. A parked worker refuses new
    sequences; those that it has wait with it, and their deadlines hold."""

    is_parked: bool


class WorkerTick(msgspec.Struct, frozen=True):
    """The time named by `next_tick_s` has come. An earlier tick is harmless."""


WorkerEvent = (
    RouterJoined
    | RouterLost
    | FromRouter
    | PreparationBegan
    | PreparationEnded
    | FromReader
    | ReaderLost
    | FromOwner
    | OwnerLost
    | ReadDone
    | ReadSettled
    | StepDone
    | StoreJoined
    | FromStore
    | StoreLost
    | CopyDone
    | SetRole
    | Drain
    | SetParked
    | WorkerTick
)

# --- actions --------------------------------------------------------------------------------------


class ToRouter(msgspec.Struct, frozen=True):
    """Send a message. The adapter drops it if the router's session is gone."""

    router_id: RouterId
    message: WorkerMessage


class ToReader(msgspec.Struct, frozen=True):
    reader: WorkerId
    message: OwnerMessage


class ToOwner(msgspec.Struct, frozen=True):
    """Send a message to a KV owner. The adapter opens a session if there is none; if that fails, OwnerLost
    follows."""

    source: PeerRef
    message: ReaderMessage


class RunStep(msgspec.Struct, frozen=True):
    """Compute a step, and answer with StepDone. The core has at most two in flight: the second begins when
    the first is done, and their answers come in order."""

    plan: StepPlan


class ToStore(msgspec.Struct, frozen=True):
    """Send a message. The adapter drops it if the session is gone."""

    message: WorkerToStore


class CopyToStore(msgspec.Struct, frozen=True):
    """Copy pool blocks[i] to the arena's slots[i], beside the engine's steps. It is always answered by one
    CopyDone."""

    copy_id: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


class CopyFromStore(msgspec.Struct, frozen=True):
    """Copy the arena's slots[i] to pool blocks[i], and verify checksums (0: none) on what arrived. It is
    always answered by one CopyDone."""

    copy_id: int
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    checksums: tuple[int, ...]


WorkerAction = ToRouter | ToReader | ToOwner | BlockRead | RunStep | ToStore | CopyToStore | CopyFromStore
