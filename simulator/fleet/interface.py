"""What a worker of the fleet is to the others, and they to it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton.core.ids import BlockHash, SequenceId, WorkerId
from baton.core.messages import RouterMessage, WorkerHello, WorkerMessage
from simulator.fleet.sequence import MacroSequence
from simulator.fleet.spec import WorkerSpec


class Surroundings(Protocol):
    """What a worker needs of the fleet."""

    def tell_router(self, worker: "FleetWorker", message: WorkerMessage) -> None: ...

    def worker(self, worker_id: WorkerId) -> "FleetWorker": ...

    def hashes_of(self, seq_id: SequenceId) -> list[BlockHash]:
        """Of the full blocks of its prompt; empty: not known any more."""
        ...

    def prompt_computed(self, seq_id: SequenceId, tokens: int) -> None: ...


class Usage(NamedTuple):
    """Of one worker at one moment."""

    busy_s: float
    """Since the start."""
    waiting_tokens: int
    decoding: int
    held_blocks: int


class FleetWorker(Protocol):
    """A worker as the fleet knows it."""

    @property
    def worker_id(self) -> WorkerId: ...

    @property
    def spec(self) -> WorkerSpec: ...

    def hello(self) -> WorkerHello: ...

    def begin(self, heartbeat_s: float, *, phase_s: float) -> None:
        """The router has heard its hello."""
        ...

    def hear(self, message: RouterMessage) -> None: ...

    def usage(self) -> Usage: ...


class LoadingStore(Protocol):
    """The tiers below the pool, as one worker uses them."""

    def find(self, seq: MacroSequence) -> None: ...

    def committed(self, hashes: Sequence[BlockHash], end: int) -> None: ...
