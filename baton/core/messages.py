"""What processes say to each other, as closed unions of immutable values.

Routers, workers and the simulator speak in these; `baton.wire.codec` turns them into protobuf and
back, and no generated stub leaves that package. A sequence attempt is named by (seq_id, epoch)
everywhere: the router raises the epoch whenever it starts a sequence anew, and whatever carries a
lower epoch than the receiver knows is stale and changes nothing.

Token indices count *generated* tokens of a sequence from 0, over all its attempts. An attempt whose
`tokens` already contain k generated ones continues at index k.
"""

from collections.abc import Sequence
from enum import StrEnum, auto
from typing import Annotated

import msgspec

from baton.core.costs import LegTimings, StepCosts
from baton.core.ids import BlockHash, RouterId, SequenceId, WorkerId
from baton.core.sampling import FinishReason, SamplingParams
from baton.core.sharing import RouterMember
from baton.core.steps import TokenLogprobs
from baton.core.wire_types import Fixed64, Float32, OneFor, SInt32, UInt64

WIRE_VERSION = 3
"""Raised when a field changes meaning; a new field with a default does not raise it."""


class Role(StrEnum):
    PREFILL = auto()
    DECODE = auto()
    BOTH = auto()

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class Leg(StrEnum):
    """Which part of a sequence a worker is asked for."""

    PREFILL = auto()
    """Compute the KV, sample one token, hold the blocks for the decode worker that asks."""
    DECODE = auto()
    """Pull the KV from `source`, then generate from the second token on."""
    WHOLE = auto()
    """Both on this worker, nothing is handed over."""


class PeerRef(msgspec.Struct, frozen=True):
    """A worker as another worker must know it to connect."""

    worker_id: WorkerId
    address: str
    """host:port of its gRPC server."""


class Task(StrEnum):
    GENERATE = auto()
    EMBED = auto()
    """Leg WHOLE only: one vector for the prompt, no token."""


class AdapterRef(msgspec.Struct, frozen=True):
    """A LoRA adapter as a worker must know it to load it. Named in every start that uses it, so a
    worker that never heard of it (a restarted one) needs nothing else."""

    name: str
    path: str
    """PEFT folder or hub id."""
    digest: str
    """Of its files. Part of the block hash's root: another adapter under the same name shares no KV."""

    @property
    def key(self) -> str:
        """What a worker knows it by (`StepItem.adapter`): another one under the same name may be loaded
        while sequences still use this one."""
        return f"{self.name}@{self.digest}"


# --- router -> worker -----------------------------------------------------------------------------


class RouterHello(msgspec.Struct, frozen=True, tag=True):
    """First message of a session."""

    router_id: RouterId
    wire_version: int = WIRE_VERSION


class StartSequence(msgspec.Struct, frozen=True, tag=True):
    """Safe to receive twice: the second changes nothing. A lower epoch than known is refused."""

    seq_id: SequenceId
    epoch: int
    leg: Leg
    tokens: Sequence[int]
    """Prompt, then the generated tokens that the client already has."""
    prompt_token_count: int
    sampling: SamplingParams
    cache_root: BlockHash
    """Start of the block hash chain: fingerprint and tenant, see `hashing.root_hash`."""
    time_left_s: float
    """Until the request's deadline, from when this was sent."""
    source: PeerRef | None = None
    """DECODE only: the prefill worker to pull from."""
    traceparent: str = ""
    """W3C trace context of the router's span; empty when not traced."""
    task: Task = Task.GENERATE
    adapter: AdapterRef | None = None
    priority: SInt32 = 0
    """Lower runs first (vLLM's convention); waiting raises it, so nobody starves."""
    tpot_slo_s: float = 0.0
    """Objective of the time per output token, 0: none. Chunks of prompts that run beside this sequence
    are chosen so that it holds."""
    fairness_key: str = ""
    """Whose share of the engine this sequence counts to (tenant, or client)."""

    @property
    def generated_count(self) -> int:
        return len(self.tokens) - self.prompt_token_count


class CancelSequence(msgspec.Struct, frozen=True, tag=True):
    """Give everything back. Answered by nothing; unknown or stale changes nothing."""

    seq_id: SequenceId
    epoch: int


class ResyncBlocks(msgspec.Struct, frozen=True, tag=True):
    """The router missed block events: send a snapshot."""


RouterMessage = StartSequence | CancelSequence | ResyncBlocks


# --- worker -> router -----------------------------------------------------------------------------


class WorkerHello(msgspec.Struct, frozen=True, tag=True):
    """First message of a session."""

    worker_id: WorkerId
    role: Role
    fingerprint: str
    model: str
    block_tokens: int
    block_count: int
    max_model_tokens: int
    """Prompt plus generated tokens of one sequence, at most."""
    wire_version: int = WIRE_VERSION
    costs: StepCosts | None = None
    """As it timed itself when it started; None: it did not."""
    block_bytes: UInt64 = 0
    """Of one KV block; 0: not told."""
    step_tokens_max: int = 512
    """Token budget of one step: the longest chunk of a prompt."""
    batch_sequences_max: int = 64
    """Sequences in one step."""
    tpot_slo_s: float = 0.0
    """Objective that its steps keep for sequences that name none; 0: it keeps none for them."""
    chunk_tokens_min: int = 128
    """Prompt tokens of a step with prompts, at least, whatever the objective."""
    host: str = ""
    """Workers of one host reach each other's memory fast."""


class SequenceOutput(msgspec.Struct, frozen=True):
    """Tokens of one sequence from one engine step."""

    seq_id: SequenceId
    epoch: int
    first_index: int
    """Generated index of tokens[0]."""
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    cached_token_count: int | None = None
    """Prompt tokens found in the cache; set on an attempt's first output by the worker that prefilled."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the prompt tokens from the second on; set with the first token, if asked for."""
    embedding: tuple[Float32, ...] = ()
    """Task EMBED; comes with finish STOP and no tokens."""
    timings: LegTimings | None = None
    """Set on an attempt's first output by the worker that prefilled."""


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """All tokens of one engine step for one router: one message per step, never one per sequence."""

    outputs: tuple[SequenceOutput, ...]


class SequenceJoined(msgspec.Struct, frozen=True, tag=True):
    """DECODE leg: all KV has arrived and the sequence is in the running batch."""

    seq_id: SequenceId
    epoch: int
    transferred_bytes: UInt64
    transfer_s: float
    """Time spent in reads."""
    handover_s: float
    """From the last grant's arrival to joining the batch."""


class RefusalReason(StrEnum):
    NO_ROOM = auto()
    DRAINING = auto()
    TOO_LONG = auto()
    STALE_EPOCH = auto()
    UNSUPPORTED = auto()
    """This worker cannot do what the request asks for (a grammar that does not compile, an adapter that
    does not load): no other worker can, the client gets a 400 with the message."""


class SequenceRefused(msgspec.Struct, frozen=True, tag=True):
    """The worker never started; it holds nothing for this attempt."""

    seq_id: SequenceId
    epoch: int
    reason: RefusalReason
    message: str


class FailureReason(StrEnum):
    TRANSFER = auto()
    """Reads failed, or the lease ran out."""
    SOURCE_LOST = auto()
    SOURCE_REFUSED = auto()
    DEADLINE = auto()
    DRAINED = auto()
    """The worker is leaving; go on elsewhere."""
    INTERNAL = auto()


class SequenceFailed(msgspec.Struct, frozen=True, tag=True):
    """The worker gave up on an attempt it had started; it holds nothing for it (except blocks a
    reader may still touch, which come back by themselves)."""

    seq_id: SequenceId
    epoch: int
    reason: FailureReason
    message: str


class BlockEvents(msgspec.Struct, frozen=True, tag=True):
    """Changes to the worker's prefix cache. `sequence_number` rises by one per message of a session;
    a gap means that the router must ask for a snapshot. A snapshot replaces all that was known."""

    sequence_number: UInt64
    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    is_snapshot: bool = False


class LoadReport(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat, several a second. No report for long means "unknown, assume busy"."""

    role: Role
    is_draining: bool
    free_blocks: int
    """Blocks not held by any sequence or lease; cached but unheld ones count as free."""
    running_count: int
    waiting_count: int
    waiting_tokens: UInt64
    """Prompt tokens accepted and not computed yet."""
    step_s: float
    """Smoothed duration of one engine step; 0 when none ran yet."""
    costs: StepCosts | None = None
    """As its steps show it now."""
    decoding_count: int = 0
    """Of the running sequences, those whose prompt is computed."""
    context_tokens: UInt64 = 0
    """Positions of the decoding sequences, together: what a decode step reads."""
    tokens_per_step: float = 1.0
    """Smoothed: tokens that a decoding sequence gains in one step, more than 1 where guesses are right."""
    incoming_count: int = 0
    """Decode legs accepted whose KV has not all arrived."""


WorkerMessage = (
    WorkerHello | StepOutput | SequenceJoined | SequenceRefused | SequenceFailed | BlockEvents | LoadReport
)


# --- decode worker -> prefill worker --------------------------------------------------------------


class AskKV(msgspec.Struct, frozen=True, tag=True):
    """ "I run the decode leg of this attempt: grant me its blocks from `first_block` on."

    The asker has already reserved the blocks that the KV will go to. Safe to receive twice. May
    arrive before the prefill worker has heard of the sequence: it waits there for one lease.
    """

    seq_id: SequenceId
    epoch: int
    first_block: int
    """Position in the sequence's block table; earlier blocks the asker holds already."""
    ask_number: int = 0
    """Rises with every renewal. The asker asks again well before its lease ends; the source answers
    each ask with a grant (of nothing, if there is nothing new), which starts the lease anew."""


class KVReleased(msgspec.Struct, frozen=True, tag=True):
    """No read of this attempt is or will be in flight: the source may free its blocks.

    `taken` says whether everything granted was read well. Safe to receive twice.
    """

    seq_id: SequenceId
    epoch: int
    taken: bool


AskerMessage = AskKV | KVReleased


# --- prefill worker -> decode worker --------------------------------------------------------------


class KVGrant(msgspec.Struct, frozen=True, tag=True):
    """ "Read these sealed blocks, for this long." One per computed chunk, in order, and one per ask.

    Source blocks: held by the prefill worker until KVReleased arrives or the lease runs out; every
    grant of an attempt starts the lease of all its blocks anew. Durations cross the wire, instants do
    not: the source counts `lease_s` from when it granted, the reader from when it *sent* the ask that
    the grant names in `answers_ask`, which is earlier, so the reader stops first whatever the clocks
    and the network do. `generations[i]` is the generation of `source_blocks[i]`: the reader compares
    it with the source's own table after the read, since a one-sided read that ended late may have
    copied somebody else's block.
    """

    seq_id: SequenceId
    epoch: int
    first_block: int
    source_blocks: tuple[int, ...]
    generations: Annotated[tuple[UInt64, ...], OneFor("source_blocks")]
    lease_s: float
    answers_ask: int = 0
    """`ask_number` of the latest ask the source had received when it granted."""
    is_last: bool = False
    """All prompt positions are covered; `first_token` is set."""
    first_token: int | None = None
    cached_token_count: int = 0
    first_logprobs: TokenLogprobs | None = None
    """Of `first_token`, if asked for: the router may hear the decode worker first."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    checksums: tuple[Fixed64, ...] = ()
    """XXH3-64 of each source block's bytes; empty: not computed (`transfer.checksums`). Bytes that arrive
    otherwise are read again."""


class KVRefused(msgspec.Struct, frozen=True, tag=True):
    """No (more) grants for this attempt. The asker answers with KVReleased if it was granted any."""

    seq_id: SequenceId
    epoch: int
    message: str


SourceMessage = KVGrant | KVRefused


class PeerHello(msgspec.Struct, frozen=True):
    """First message in both directions of a session between two workers."""

    worker_id: WorkerId
    fingerprint: str
    transfer_offers: dict[str, bytes]
    """Backend name -> what that backend's `add_peer` needs; the asker picks the first of its own
    preference list that both have."""
    wire_version: int = WIRE_VERSION


# --- membership -----------------------------------------------------------------------------------

INFO_NOTE = "info: "


class Member(msgspec.Struct, frozen=True):
    """A worker as the directory lists it. The lease lapses when the worker stops renewing it."""

    worker_id: WorkerId
    role: Role
    address: str
    model: str
    fingerprint: str
    is_draining: bool = False
    metrics_address: str = ""
    host: str = ""
    pid: int = 0
    notes: tuple[str, ...] = ()
    """What people should know of it, such as a transfer backend that does not work there. One line each;
    what begins with `INFO_NOTE` is nothing to worry about."""
    node: str = ""
    """Ray's id of the node it runs on; empty: it was not started by Ray."""
    version: str = ""
    """Name of the version it was started with (`operate.Version`)."""
    is_suspect: bool = False
    """Said by the directory: it missed heartbeats, and gets nothing new until it is heard again."""


class MembershipView(msgspec.Struct, frozen=True):
    """All members at one version. Versions of one directory life only rise."""

    directory_life: str
    version: UInt64
    members: tuple[Member, ...]
    routers: tuple[RouterMember, ...] = ()
