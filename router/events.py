"""What happens to a router, and what it does about it.

`router.core.RouterCore` is pure: `handle(event, now_s=…) -> list[Action]`. The asyncio driver
(`router.driver`) and the simulator (`baton.sim`) feed it events and perform its actions.
"""

from enum import StrEnum, auto

import msgspec

from baton.core.ids import RequestId, SequenceId, WorkerId
from baton.core.messages import AdapterRef, Role, RouterMessage, Task, WorkerHello, WorkerMessage
from baton.core.sampling import FinishReason, SamplingParams
from baton.core.steps import TokenLogprobs

# --- events ---------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True):
    """A checked, tokenised sequence. Answered, in the end, by exactly one Finished or Failed."""

    seq_id: SequenceId
    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: bytes
    """The tenant's and the adapter's, see `baton.core.hashing.root_hash`."""
    deadline_s: float
    """Instant on the router's clock."""
    traceparent: str = ""
    task: Task = Task.GENERATE
    adapter: AdapterRef | None = None
    priority: int = 0
    tpot_slo_s: float = 0.0
    fairness_key: str = ""
    group: str = ""
    """Sequences of one group share their prompt, and are placed together while there is room."""


class ClientGone(msgspec.Struct, frozen=True):
    """Disconnected, too slow, or satisfied early (a stop string was found): cancel what runs.
    The sequence ends with no further action towards the client."""

    seq_id: SequenceId


class WorkerJoined(msgspec.Struct, frozen=True):
    """A session to the worker is open and it said hello. It may be the same worker as before, after
    a broken session: whatever ran there under the old session is lost."""

    hello: WorkerHello
    address: str


class WorkerLost(msgspec.Struct, frozen=True):
    """Its session broke or fell silent. Unknown worker: nothing happens."""

    worker_id: WorkerId
    reason: str


class WorkerUpdated(msgspec.Struct, frozen=True):
    """The directory says that the worker's role or drain state changed."""

    worker_id: WorkerId
    role: Role
    is_draining: bool


class FromWorker(msgspec.Struct, frozen=True):
    worker_id: WorkerId
    message: WorkerMessage


class Tick(msgspec.Struct, frozen=True):
    """The time `next_tick_s` named has come (or an earlier one: harmless)."""


RouterEvent = Submit | ClientGone | WorkerJoined | WorkerLost | WorkerUpdated | FromWorker | Tick

# --- actions --------------------------------------------------------------------------------------


class ToWorker(msgspec.Struct, frozen=True):
    """Dropped by the adapter if the session is gone (a WorkerLost event is then on its way)."""

    worker_id: WorkerId
    message: RouterMessage


class Deliver(msgspec.Struct, frozen=True):
    """New tokens, in order, none twice, none missing: `first_index` counts generated tokens."""

    seq_id: SequenceId
    first_index: int
    tokens: tuple[int, ...]
    cached_token_count: int = 0
    """As in Finished, as far as it is known: a stop string may end the sequence before that comes."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """With the first token, once, if asked for."""


class RetryCause(StrEnum):
    """Why an attempt was lost, for metrics: closed, while `Note.because` is free text."""

    WORKER_LOST = auto()
    TRANSFER = auto()
    SOURCE_LOST = auto()
    SOURCE_REFUSED = auto()
    DRAINED = auto()
    INTERNAL = auto()
    STALE_EPOCH = auto()
    TOKENS_MISSING = auto()


class Finished(msgspec.Struct, frozen=True):
    """Terminal. All tokens were delivered before."""

    seq_id: SequenceId
    reason: FinishReason
    generated_count: int
    cached_token_count: int
    """Prompt tokens that the prefill worker found in its cache on the first attempt."""
    embedding: tuple[float, ...] = ()
    """Task EMBED."""


class FailureKind(StrEnum):
    QUEUE_FULL = auto()
    """503: refused at the door."""
    NO_CAPACITY = auto()
    """503: no place within `queue_wait_s`, or no worker at all."""
    TOO_LONG = auto()
    """400."""
    UNSUPPORTED = auto()
    """400: no worker can do what the request asks for, as the message says."""
    DEADLINE = auto()
    """504."""
    ATTEMPTS = auto()
    """503: placed `attempts_max` times, lost every time."""
    INTERNAL = auto()
    """500."""


class Failed(msgspec.Struct, frozen=True):
    """Terminal. `kind` decides status and error type at the edge."""

    seq_id: SequenceId
    kind: FailureKind
    message: str
    retry_after_s: float = 1.0


class Note(msgspec.Struct, frozen=True):
    """For metrics, spans and logs: a decision or a phase change, with its reason."""

    seq_id: SequenceId
    what: str
    """placed | first_token | joined | retried | fallback | refused"""
    because: str
    worker_ids: tuple[WorkerId, ...] = ()
    seconds: float = 0.0
    bytes: int = 0
    cause: RetryCause | None = None
    """Of `retried` only."""


RouterAction = ToWorker | Deliver | Finished | Failed | Note
