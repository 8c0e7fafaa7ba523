"""The events that a router takes in, and the actions that it answers with.

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


class SequencePart(StrEnum):
    """What a sequence is within its client's request.

    A request is one arrival with one verdict, however many sequences compute it. Its TTFT objective is judged
    at the first token of any of them, and only the first sequence is admitted by it."""

    REQUEST = auto()
    """The first sequence of a request, which stands for the request."""
    PROMPT = auto()
    """A further prompt of the request."""
    ANSWER = auto()
    """A further answer to a prompt that another sequence of the request has."""
    STEP = auto()
    """A later step of a beam search: a prompt that was counted, and tokens generated since."""


class Submit(msgspec.Struct, frozen=True):
    """A validated and tokenised sequence. It ends with exactly one Finished or Failed."""

    seq_id: SequenceId
    request_id: RequestId
    prompt: Sequence[int]
    """Token ids of the prompt. Any sequence type will do."""
    sampling: SamplingParams
    salt: bytes
    """Salt of the tenant and of the adapter, see `baton.core.hashing.root_hash`."""
    deadline_s: float
    """Instant on the router's clock at which the request must be over."""
    traceparent: str = ""
    task: Task = Task.GENERATE
    adapter: AdapterRef | None = None
    priority: int = 0
    ttft_slo_s: float = 0.0
    """TTFT objective, counted from `arrived_s`; 0 if there is none."""
    tpot_slo_s: float = 0.0
    """TPOT objective; 0 if there is none."""
    slo_class: str = ""
    """The operator's name for this set of objectives."""
    refuse_late: bool = False
    """True if the sequence is refused once it cannot meet its objectives, instead of being served last."""
    tenant: str = ""
    """The authenticated tenant. Clients cannot choose it."""
    arrived_s: float | None = None
    """When the request came in, on the router's clock; None stands for the moment of this event."""
    weight: float = 1.0
    """The tenant's weight in fair sharing."""
    request_digest: str = ""
    """A digest that is the same when a client sends the same request again, and that all sequences of a
    request share; empty if it is not known."""
    fairness_key: str = ""
    part: SequencePart = SequencePart.REQUEST
    group: str = ""
    """Sequences of one group share their prompt and are placed together while there is room."""
    hashes: HashSource | None = None
    """Block hashes of this sequence that were computed off the event loop; None if they are to be computed
    when the sequence is placed."""
    stored: StoredPrefix | None = None
    """The blocks of the prompt that store nodes hold; None if there are none or nothing is known."""


class ClientGone(msgspec.Struct, frozen=True):
    """The client disconnected, was too slow, or has all it wants.

    The sequence is cancelled at its workers and ends without a further action towards the client."""

    seq_id: SequenceId
    is_answered: bool = False
    """The router ended the answer, at a stop string or after the tool calls that are wanted. Such a sequence
    ended well, as one that its worker finished."""


class WorkerJoined(msgspec.Struct, frozen=True):
    """A session to the worker is open, and its hello has arrived.

    It may be a known worker that connects again. Whatever ran there under the old session is lost."""

    hello: WorkerHello
    address: str


class WorkerLost(msgspec.Struct, frozen=True):
    """The worker's session broke or fell silent. The event is ignored if the worker is unknown."""

    worker_id: WorkerId
    reason: str


class WorkerUpdated(msgspec.Struct, frozen=True):
    """The directory reports another role or drain state for the worker."""

    worker_id: WorkerId
    role: Role
    is_draining: bool
    is_suspect: bool = False
    """The worker missed heartbeats. It gets nothing new, and what runs there goes on."""


class FromWorker(msgspec.Struct, frozen=True):
    worker_id: WorkerId
    message: WorkerMessage


class PeerUpdated(msgspec.Struct, frozen=True):
    """Another router reports its load at the workers."""

    update: RouterUpdate


class PeerLost(msgspec.Struct, frozen=True):
    """Another router is no longer followed. The event is ignored if the router is unknown."""

    router_id: RouterId


class Tick(msgspec.Struct, frozen=True):
    """The time that `next_tick_s` named has come. An early tick does no harm."""


RouterEvent = (
    Submit
    | ClientGone
    | WorkerJoined
    | WorkerLost
    | WorkerUpdated
    | FromWorker
    | PeerUpdated
    | PeerLost
    | Tick
)

# --- actions --------------------------------------------------------------------------------------


class ToWorker(msgspec.Struct, frozen=True):
    """A message for a worker. The adapter drops it if the session is gone, since WorkerLost then follows."""

    worker_id: WorkerId
    message: RouterMessage


class Deliver(msgspec.Struct, frozen=True):
    """New tokens for the client, in order, each exactly once. `first_index` counts generated tokens."""

    seq_id: SequenceId
    first_index: int
    tokens: tuple[int, ...]
    cached_token_count: int = 0
    """The count of Finished as far as it is known, since a stop string may end the sequence before it
    comes."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token if the request asks for logprobs."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Delivered once, with the first token, if the request asks for it."""


class RetryCause(StrEnum):
    """The cause of a lost attempt as a metric label. `Note.reason` says the same in free text."""

    WORKER_LOST = auto()
    TRANSFER = auto()
    SOURCE_LOST = auto()
    SOURCE_REFUSED = auto()
    DRAINED = auto()
    """A draining worker ended before the sequence did. It counts as no loss and is charged to no budget."""
    INTERNAL = auto()
    STALE_EPOCH = auto()
    TOKENS_MISSING = auto()


class Finished(msgspec.Struct, frozen=True):
    """The sequence ended well, and all its tokens were delivered before. Terminal."""

    seq_id: SequenceId
    reason: FinishReason
    generated_count: int
    cached_token_count: int
    """Prompt tokens that the prefill worker of the first attempt found in its prefix cache."""
    embedding: tuple[float, ...] = ()
    """The result of an embedding task."""
    latency_breakdown: "LatencyBreakdown | None" = None
    """Where the time went; None if the worker of the first token reported no timings."""
    served: "Served | None" = None


class LatencyBreakdown(msgspec.Struct, frozen=True):
    """Where the time went until the first token, and until the first token of the decode worker. Seconds.

    The parts follow one another, and nothing is counted twice. Lost attempts are counted in `retries_s`."""

    queue_s: float
    """Time in the admission queue, before the first attempt and after each lost one."""
    retries_s: float
    """Time spent in attempts that were lost."""
    wait_s: float
    """Wait at the prefill worker before the sequence's first step."""
    load_s: float
    """Wait for blocks that are loaded from the store."""
    prefill_s: float
    first_hop_s: float
    """Time from placement to the first token that the worker's own timings do not cover: messages, the
    compilation of a grammar, the loading of an adapter."""
    transfer_s: float = 0.0
    """Time from the first token until the sequence joined the decode worker's batch."""
    first_decode_s: float = 0.0
    """Time from then until the second token. On one worker it counts from the first token."""

    @property
    def ttft_s(self) -> float:
        return (
            self.queue_s + self.retries_s + self.wait_s + self.load_s + self.prefill_s + self.first_hop_s
        )  # fmt: skip


class Served(msgspec.Struct, frozen=True):
    """The workers that served a sequence, and what was predicted for them."""

    prefill_worker: WorkerId
    """Prefill worker of the attempt that produced the first token."""
    decode_worker: WorkerId
    """Decode worker of the last attempt. It equals the prefill worker if one worker runs both phases."""
    predicted_ttft_s: float | None
    """TTFT predicted at placement, counted from arrival; None if nothing was predicted."""
    predicted_tpot_s: float | None
    attempts: int
    """Number of times that the sequence was placed."""
    predicted_ttft_p90_s: float | None = None
    """TTFT from arrival that was predicted not to be exceeded in 90 of 100 cases."""
    predicted_tpot_p90_s: float | None = None
    predicted_meets: float | None = None
    """Predicted probability that both objectives hold; 1 without objectives."""

    def predictions(self) -> dict[str, float]:
        """Return what was predicted, by name, in the order in which answers show it; empty if nothing was."""
        found = {name: getattr(self, name) for name in PREDICTIONS}
        return {name: value for name, value in found.items() if value is not None}


PREDICTIONS = (
    "predicted_ttft_s",
    "predicted_ttft_p90_s",
    "predicted_tpot_s",
    "predicted_tpot_p90_s",
    "predicted_meets",
)
"""Fields of `Served`, which answers report by these names."""


class FailureKind(StrEnum):
    QUEUE_FULL = auto()
    """503: the admission queue was full on arrival."""
    NO_CAPACITY = auto()
    """503: no worker had room within `queue_wait_s`, or there is no worker at all."""
    UNMET = auto()
    """503: the sequence would miss its objectives, and its class asks for a refusal in that case."""
    TOO_LONG = auto()
    """400: prompt and answer are longer than any worker can hold."""
    UNSUPPORTED = auto()
    """400: no worker supports what the request asks for. The message names it."""
    DEADLINE = auto()
    """504: the deadline of the request passed."""
    RETRIES_SPENT = auto()
    """503: the retry budget is used up because too many attempts fail, see `router.retry_share`."""
    ATTEMPTS = auto()
    """503: the sequence was placed `attempts_max` times, and every attempt was lost."""
    INTERNAL = auto()
    """500: a fault of the software."""


class Failed(msgspec.Struct, frozen=True):
    """The sequence failed. `kind` decides the HTTP status and the error type. Terminal."""

    seq_id: SequenceId
    kind: FailureKind
    message: str
    retry_after_s: float = 1.0
    was_computing: bool = False
    """True if workers were computing the sequence when it failed."""


class Note(msgspec.Struct, frozen=True):
    """A decision or a change of state, with its reason, for metrics, spans and logs."""

    seq_id: SequenceId
    what: str
    """placed | first_token | joined | retried | migrated | fallback | refused | hedged | hedge_won |
    hedge_lost"""
    reason: str
    worker_ids: tuple[WorkerId, ...] = ()
    seconds: float = 0.0
    bytes: int = 0
    cause: RetryCause | None = None
    """Set only if `what` is `retried`."""


RouterAction = ToWorker | Deliver | Finished | Failed | Note
