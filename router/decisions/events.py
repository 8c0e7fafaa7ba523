"""What happens to a router, and what it does about it.

`router.decisions.core.RouterCore` is pure: `handle(event, now_s=…) -> list[Action]`. The asyncio driver
(`router.live.driver`) and the simulator (`simulator.faults`) feed it events and perform its actions.
"""

from collections.abc import Sequence
from enum import StrEnum, auto

import msgspec

from baton.core.ids import RequestId, RouterId, SequenceId, WorkerId
from baton.core.messages import AdapterRef, Role, RouterMessage, Task, WorkerHello, WorkerMessage
from baton.core.sampling import FinishReason, SamplingParams
from baton.core.sharing import RouterUpdate
from baton.core.steps import TokenLogprobs
from router.decisions.prompt_hashes import HashSource
from router.decisions.stored_prefix import StoredPrefix

# --- events ---------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True):
    """A checked, tokenised sequence. Answered, in the end, by exactly one Finished or Failed."""

    seq_id: SequenceId
    request_id: RequestId
    prompt: Sequence[int]
    """Only counted, cut and walked along: it need not be a tuple."""
    sampling: SamplingParams
    salt: bytes
    """The tenant's and the adapter's, see `baton.core.hashing.root_hash`."""
    deadline_s: float
    """Instant on the router's clock."""
    traceparent: str = ""
    task: Task = Task.GENERATE
    adapter: AdapterRef | None = None
    priority: int = 0
    ttft_slo_s: float = 0.0
    """Objective, counted from `arrived_s`; 0: none."""
    tpot_slo_s: float = 0.0
    """Objective; 0: none."""
    slo_class: str = ""
    """The set of objectives that these are, by the operator's name for it."""
    refuse_late: bool = False
    """Once its objectives are lost, it is refused rather than served last."""
    tenant: str = ""
    """As authenticated; clients cannot choose it."""
    arrived_s: float | None = None
    """When the request came in, on the router's clock; None: as it was submitted."""
    weight: float = 1.0
    """The tenant's share in relation to others'."""
    request_digest: str = ""
    """The same for a request that is sent again; "": not known."""
    fairness_key: str = ""
    group: str = ""
    """Sequences of one group share their prompt, and are placed together while there is room."""
    hashes: HashSource | None = None
    """Hashes of the blocks of this sequence alone, computed where it holds nobody up; None: computed when the
    sequence is placed."""
    stored: StoredPrefix | None = None
    """What the hosts' stores have of the prompt; None: nothing, or it is not known."""


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


class PeerTold(msgspec.Struct, frozen=True):
    """Another router says what it has where."""

    update: RouterUpdate


class PeerLost(msgspec.Struct, frozen=True):
    """Another router is not followed any more. Unknown router: nothing happens."""

    router_id: RouterId


class Tick(msgspec.Struct, frozen=True):
    """The time `next_tick_s` named has come (or an earlier one: harmless)."""


RouterEvent = (
    Submit | ClientGone | WorkerJoined | WorkerLost | WorkerUpdated | FromWorker | PeerTold | PeerLost | Tick
)

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
    """Delivered with the first token, once, if asked for."""


class RetryCause(StrEnum):
    """Why an attempt was lost, for metrics: closed, while `Note.reason` is free text."""

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
    latency_breakdown: "LatencyBreakdown | None" = None
    """Times of the first token; None: it came from an attempt that told no timings."""
    served: "Served | None" = None


class LatencyBreakdown(msgspec.Struct, frozen=True):
    """Where the time to the first token, and to the first one of the decode worker, went; seconds. Parts
    follow one another, and nothing is counted twice; those of earlier, lost attempts are in `retries_s`."""

    queue_s: float
    """From being submitted to being placed, and again after each loss."""
    retries_s: float
    """In attempts that were lost."""
    wait_s: float
    """At the prefill worker, before its first step."""
    load_s: float
    """Waiting for blocks of the store."""
    prefill_s: float
    first_hop_s: float
    """From placing to the first token, less what the worker tells: messages, and where there is one the
    grammar that is compiled, or the adapter that is read."""
    transfer_s: float = 0.0
    """From the first token to the decode worker having joined its batch."""
    first_decode_s: float = 0.0
    """From then, or from the first token on one worker, to the second token."""

    @property
    def ttft_s(self) -> float:
        return (
            self.queue_s + self.retries_s + self.wait_s + self.load_s + self.prefill_s + self.first_hop_s
        )  # fmt: skip


class Served(msgspec.Struct, frozen=True):
    """The workers that served a sequence, and what was expected of them."""

    prefill_worker: WorkerId
    """Worker of the attempt that brought the first token."""
    decode_worker: WorkerId
    """Worker of the last attempt; the same where one worker runs both phases."""
    predicted_ttft_s: float | None
    """When it was placed, counted from its arrival; None: nothing was predicted."""
    predicted_tpot_s: float | None
    attempts: int
    """Times that it was placed."""


class FailureKind(StrEnum):
    QUEUE_FULL = auto()
    """503: refused at the door."""
    NO_CAPACITY = auto()
    """503: no place within `queue_wait_s`, or no worker at all."""
    UNMET = auto()
    """503: it would miss its objectives, and its class says that it is of no use then."""
    TOO_LONG = auto()
    """400."""
    UNSUPPORTED = auto()
    """400: no worker can do what the request asks for, as the message says."""
    DEADLINE = auto()
    """504."""
    RETRIES_SPENT = auto()
    """503: too many attempts of all sequences fail, see `router.retry_share`."""
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
    """A decision or a change of state, with its reason, for metrics, spans and logs."""

    seq_id: SequenceId
    what: str
    """placed | first_token | joined | retried | fallback | refused | hedged | hedge_won | hedge_lost"""
    reason: str
    worker_ids: tuple[WorkerId, ...] = ()
    seconds: float = 0.0
    bytes: int = 0
    cause: RetryCause | None = None
    """Set for `retried` only."""


RouterAction = ToWorker | Deliver | Finished | Failed | Note
