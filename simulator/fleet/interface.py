"""The interfaces between the fleet, its workers and their engines."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton.core.ids import BlockHash, SequenceId, WorkerId
from baton.core.messages import RouterMessage, WorkerHello, WorkerMessage
from simulator.fleet.sequence import MacroSequence
from simulator.fleet.spec import FleetWorkerSpec


class FleetServices(Protocol):
    """The services that a worker has of the fleet."""

    def send_to_router(self, worker: "FleetWorker", message: WorkerMessage) -> None: ...

    def worker(self, worker_id: WorkerId) -> "FleetWorker": ...

    def hashes_of(self, seq_id: SequenceId) -> list[BlockHash]:
        """Return the hashes of the full blocks of a prompt; empty when they are not known any more."""
        ...

    def prompt_computed(self, seq_id: SequenceId, tokens: int) -> None: ...


class WorkerUsage(NamedTuple):
    """Use of one worker at one moment."""

    busy_s: float
    """Busy time since the start."""
    waiting_tokens: int
    decoding: int
    held_blocks: int


class FleetWorker(Protocol):
    """A worker as the fleet knows it."""

    @property
    def worker_id(self) -> WorkerId: ...

    @property
    def spec(self) -> FleetWorkerSpec: ...

    def hello(self) -> WorkerHello: ...

    def begin(self, heartbeat_s: float, *, phase_s: float) -> None:
        """Begin to send heartbeats, now that the router has heard the worker's hello."""
        ...

    def on_message(self, message: RouterMessage) -> None: ...

    def usage(self) -> WorkerUsage: ...


class LoadingStore(Protocol):
    """The tiers below the pool, as one worker uses them."""

    def find(self, seq: MacroSequence) -> None: ...

    def committed(self, hashes: Sequence[BlockHash], end: int) -> None: ...


class EngineListener(Protocol):
    """The object that hears what a step did, after it."""

    def admitted(self, seq: MacroSequence) -> None: ...

    def committed(self, seq: MacroSequence) -> None: ...

    def sampled(self, seq: MacroSequence) -> None:
        """Hear that a sequence has its first token on this worker. The blocks of a prefill phase are the
        listener's from now on."""
        ...

    def second_token(self, seq: MacroSequence) -> None: ...

    def finished(self, seq: MacroSequence) -> None:
        """Hear that all tokens are there, and that the sequence's blocks were given back."""
        ...

    def step_ended(self) -> None: ...

    def planned(self) -> None:
        """Hear that whatever can run does; what is left of the pool may go to others."""
        ...
