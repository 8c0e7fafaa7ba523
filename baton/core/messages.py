"""What processes say to each other, as closed unions of immutable values.

Routers, workers and the simulator speak in these. A message is declared here and nowhere else: `make proto`
writes the .proto file and the mapping to protobuf from these structs, documentation included, and no protobuf
object leaves `baton.wire`.

A sequence attempt is named by (seq_id, epoch) everywhere: the router raises the epoch whenever it starts a
sequence anew, and whatever carries a lower epoch than the receiver knows is stale and changes nothing.

Token indices count *generated* tokens of a sequence from 0, over all its attempts. An attempt whose
`tokens` already contain k generated ones continues at index k.
"""

from collections.abc import Sequence
from enum import StrEnum, auto
from typing import Annotated

import msgspec

from baton.core.costs import PhaseTimings, StepCosts
from baton.core.ids import BlockHash, RouterId, SequenceId, WorkerId
from baton.core.sampling import FinishReason, SamplingParams
from baton.core.sharing import RouterMember
from baton.core.steps import TokenLogprobs
from baton.core.wire_types import Fixed64, Float32, OneFor, SInt32, UInt64

WIRE_VERSION = 3
"""The version rises when a field changes its meaning or its type. A new field does not raise it: an older
process reads it as 0, False, empty or None."""


class Role(StrEnum):
    PREFILL = auto()
    DECODE = auto()
    AGGREGATED = auto()

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class Phase(StrEnum):
    """The part of a sequence that a worker is asked for."""

    PREFILL = auto()
    """Compute the KV, sample one token, and hold the blocks for the decode worker that asks."""
    DECODE = auto()
    """Pull the KV from `source`, then generate from the second token on."""
    AGGREGATED = auto()
    """Do both on this worker: nothing is handed over."""


class PeerRef(msgspec.Struct, frozen=True):
    """A worker as another worker must know it to connect."""

    worker_id: WorkerId
    address: str
    """The host:port of its gRPC server."""


class Task(StrEnum):
    GENERATE = auto()
    EMBED = auto()
    """One vector for the prompt and no token; on one worker for both phases only."""


class AdapterRef(msgspec.Struct, frozen=True):
    """A LoRA adapter as a worker must know it to load it.

    Every start that uses the adapter names it in full, so a worker that restarted needs nothing else.
    """

    name: str
    path: str
    """A PEFT folder or a hub id."""
    digest: str
    """The digest of its files. It is part of the block hash's root, so another adapter under the same name
    shares no KV."""

    @property
    def key(self) -> str:
        """The name by which a worker knows it (`StepItem.adapter`).

        Another adapter under the same name may be loaded while sequences still use this one.
        """
        return f"{self.name}@{self.digest}"


# --- router -> worker -----------------------------------------------------------------------------


class RouterHello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a session, from the router."""

    router_id: RouterId
    wire_version: int = WIRE_VERSION


class StartSequence(msgspec.Struct, frozen=True, tag=True):
    """Start an attempt. A second copy changes nothing; a lower epoch than the worker knows is refused."""

    seq_id: SequenceId
    epoch: int
    phase: Phase
    tokens: Sequence[int]
    """The prompt, then the generated tokens that the client already has."""
    prompt_token_count: int
    sampling: SamplingParams
    cache_root: BlockHash
    """The start of the block hash chain; it covers fingerprint and tenant, see `hashing.root_hash`."""
    time_left_s: float
    """The time from sending this message to the request's deadline."""
    source: PeerRef | None = None
    """The prefill worker to read KV from; for DECODE only."""
    traceparent: str = ""
    """The W3C trace context of the router's span; empty if the request is not traced."""
    task: Task = Task.GENERATE
    adapter: AdapterRef | None = None
    priority: SInt32 = 0
    """Lower numbers run first, as in vLLM. Waiting improves a sequence's place, so nobody starves."""
    tpot_slo_s: float = 0.0
    """The objective for the time per output token; 0: none. Chunks of prompts that run beside this sequence
    are chosen so that it holds."""
    fairness_key: str = ""
    """The tenant, or client, to whose fair share of the engine this sequence counts."""

    @property
    def generated_count(self) -> int:
        return len(self.tokens) - self.prompt_token_count


class CancelSequence(msgspec.Struct, frozen=True, tag=True):
    """Give everything back. There is no answer; an unknown or stale attempt changes nothing."""

    seq_id: SequenceId
    epoch: int


class ResyncBlocks(msgspec.Struct, frozen=True, tag=True):
    """The router missed block events: send a snapshot."""


RouterMessage = StartSequence | CancelSequence | ResyncBlocks


# --- worker -> router -----------------------------------------------------------------------------


class WorkerHello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a session, from the worker."""

    worker_id: WorkerId
    role: Role
    fingerprint: str
    model: str
    block_tokens: int
    block_count: int
    max_model_tokens: int
    """The most tokens that one sequence may have, prompt and generated ones together."""
    wire_version: int = WIRE_VERSION
    costs: StepCosts | None = None
    """The worker's own timing of its steps at its start; None: it did not time itself."""
    block_bytes: UInt64 = 0
    """The size of one KV block; 0: not told."""
    step_tokens_max: int = 512
    """The token budget of one step, which is the longest chunk of a prompt."""
    batch_sequences_max: int = 64
    """The most sequences in one step."""
    tpot_slo_s: float = 0.0
    """The objective that its steps keep for sequences that name none; 0: it keeps none for them."""
    chunk_tokens_min: int = 16
    """The fewest prompt tokens that a step with prompts computes, whatever the objective."""
    host: str = ""
    """Workers of one host reach each other's memory fast."""


class SequenceOutput(msgspec.Struct, frozen=True):
    """Tokens of one sequence from one engine step."""

    seq_id: SequenceId
    epoch: int
    first_index: int
    """The generated index of tokens[0]."""
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    cached_token_count: int | None = None
    """Prompt tokens that the worker that prefilled found in its cache. An attempt's first output of either
    worker has it, since the router may hear the decode worker first."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token, if the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry per prompt token from the second on, with the first output, if the request asks for them."""
    embedding: tuple[Float32, ...] = ()
    """The result of task EMBED; it comes with finish STOP and no tokens."""
    timings: PhaseTimings | None = None
    """The worker that prefilled sets it on an attempt's first output."""

    @property
    def is_plain(self) -> bool:
        """True if it is tokens and nothing else, as nearly all are."""
        return (
            self.finish is None
            and self.cached_token_count is None
            and not self.logprobs
            and self.prompt_logprobs is None
            and not self.embedding
            and self.timings is None
        )


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """All tokens of one engine step for one router. There is one message per step, never one per sequence."""

    outputs: tuple[SequenceOutput, ...]


class SequenceJoined(msgspec.Struct, frozen=True, tag=True):
    """All KV of a decode phase has arrived, and the sequence is in the running batch."""

    seq_id: SequenceId
    epoch: int
    transferred_bytes: UInt64
    transfer_s: float
    """The time spent in reads."""
    handover_s: float
    """The time from the last grant's arrival to joining the batch."""


class RefusalReason(StrEnum):
    NO_ROOM = auto()
    DRAINING = auto()
    TOO_LONG = auto()
    STALE_EPOCH = auto()
    UNSUPPORTED = auto()
    """This worker cannot do what the request asks for (a grammar that does not compile, an adapter that does
    not load). No other worker can either, so the client gets a 400 with the message."""
    BUSY = auto()
    """The worker is busy with the grammars and adapters of others, or parked. Another worker may be free, and
    the worker is not at fault."""


STILL_COMPILED = "the grammar is still being compiled"
"""How the message of a BUSY refusal begins whose sequence waits for a compiler. The router tells its client
to come back for the grammar, and not for a place."""


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
    """The worker is leaving; the sequence can go on elsewhere."""
    INTERNAL = auto()


class SequenceFailed(msgspec.Struct, frozen=True, tag=True):
    """The worker gave up on an attempt that it had started, and holds nothing for it.

    Blocks that a reader may still touch are the exception: they come back by themselves.
    """

    seq_id: SequenceId
    epoch: int
    reason: FailureReason
    message: str


class BlockEvents(msgspec.Struct, frozen=True, tag=True):
    """Changes to the worker's prefix cache.

    `sequence_number` rises by one per message of a session; a gap means that the router must ask for a
    snapshot. A snapshot replaces all that was known.
    """

    sequence_number: UInt64
    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    is_snapshot: bool = False


class LoadReport(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat, sent several times a second. A long silence means "unknown, assume busy"."""

    role: Role
    is_draining: bool
    free_blocks: int
    """Blocks that no sequence and no lease holds; cached blocks that nobody holds count as free."""
    running_count: int
    waiting_count: int
    waiting_tokens: UInt64
    """Prompt tokens that were accepted and are not computed yet."""
    step_s: float
    """The smoothed duration of one engine step; 0: none ran yet."""
    costs: StepCosts | None = None
    """The costs that its latest steps show."""
    decoding_count: int = 0
    """The running sequences whose prompt is computed."""
    context_tokens: UInt64 = 0
    """Positions of all decoding sequences together, which is what a decode step reads."""
    tokens_per_step: float = 1.0
    """The smoothed number of tokens that a decoding sequence gains in one step; more than 1 where draft
    tokens are accepted."""
    incoming_count: int = 0
    """Accepted decode phases whose KV has not all arrived."""
    is_parked: bool = False
    """No expert rank has experts that its steps need. Sequences wait there with their KV, and none is
    accepted."""


WorkerMessage = (
    WorkerHello | StepOutput | SequenceJoined | SequenceRefused | SequenceFailed | BlockEvents | LoadReport
)


class SessionEnds(msgspec.Struct, frozen=True, tag=True):
    """The last message of a session that the worker ends in good order. The router then hangs up.

    If the worker hung up, a router that writes at that moment would lose what it has not read yet, and with
    it the news that the worker drains.
    """


# --- decode worker -> prefill worker --------------------------------------------------------------


class KVRequest(msgspec.Struct, frozen=True, tag=True):
    """The decode worker asks for the blocks of this attempt from `first_block` on.

    The reader has already reserved the blocks that the KV will go to. A second copy changes nothing. The
    request may arrive before the prefill worker has heard of the sequence: it waits there for one lease.
    """

    seq_id: SequenceId
    epoch: int
    first_block: int
    """A position in the sequence's block table; the reader holds the blocks before it already."""
    request_number: int = 0
    """The number rises with every renewal. The reader asks again well before its lease ends; the owner
    answers each request with a grant, of no blocks if there is nothing new, which starts the lease anew."""


class KVReleased(msgspec.Struct, frozen=True, tag=True):
    """No read of this attempt is or will be in flight, so the owner may free its blocks.

    `taken` says whether everything granted was read well. A second copy changes nothing.
    """

    seq_id: SequenceId
    epoch: int
    taken: bool


ReaderMessage = KVRequest | KVReleased


# --- prefill worker -> decode worker --------------------------------------------------------------


class KVGrant(msgspec.Struct, frozen=True, tag=True):
    """The decode worker may read these full blocks, for this long.

    There is one grant per computed chunk, in order, and one per request. The prefill worker, which owns the
    blocks, holds them until KVReleased arrives or the lease runs out; every grant of an attempt starts the
    lease of all its blocks anew. Durations cross the wire, instants do not: the owner counts `lease_s` from
    when it granted, the reader from when it *sent* the request that the grant names in `answers_request`,
    which is earlier, so the reader stops first whatever the clocks and the network do. `generations[i]` is
    the generation of `source_blocks[i]`: the reader compares it with the owner's table after the read, since
    a one-sided read that ended late may have copied somebody else's block.
    """

    seq_id: SequenceId
    epoch: int
    first_block: int
    source_blocks: tuple[int, ...]
    generations: Annotated[tuple[UInt64, ...], OneFor("source_blocks")]
    lease_s: float
    answers_request: int = 0
    """The `request_number` of the latest request that the owner had received when it granted."""
    is_last: bool = False
    """All prompt positions are covered, and `first_token` is set."""
    first_token: int | None = None
    cached_token_count: int = 0
    first_logprobs: TokenLogprobs | None = None
    """The logprobs of `first_token`, if the request asks for them. They travel here too, since the router may
    hear the decode worker first."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    checksums: tuple[Fixed64, ...] = ()
    """The XXH3-64 of each source block's bytes; empty: not computed (`transfer.checksums`). Bytes that do not
    match are read again."""


class KVRefused(msgspec.Struct, frozen=True, tag=True):
    """There are no more grants for this attempt. The reader answers with KVReleased if it got any."""

    seq_id: SequenceId
    epoch: int
    message: str


OwnerMessage = KVGrant | KVRefused


class KVPart(msgspec.Struct, frozen=True):
    """What one rank of a worker holds of every KV block, some layers and of each some key-value heads of the
    whole model, and how it is read. Several ranks may hold the same."""

    first_layer: int
    layer_count: int
    first_head: int
    head_count: int
    transfer_offers: dict[str, bytes]
    """What each backend's `add_peer` needs, by the backend's name. The reader picks the first of its own
    preference list that both sides have."""


class PeerHello(msgspec.Struct, frozen=True):
    """The first message in both directions of a session between two workers."""

    worker_id: WorkerId
    fingerprint: str
    parts: tuple[KVPart, ...]
    """One for each rank. Together they hold the whole block."""
    wire_version: int = WIRE_VERSION


# --- membership -----------------------------------------------------------------------------------

INFO_NOTE = "info: "
MEMORY_NOTE = "memory: "
"""Beginning of a worker's note about where its memory went."""


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
    """What people should know about the worker, such as a transfer backend that does not work there. A note
    is one line; one that begins with `INFO_NOTE` is nothing to worry about."""
    node: str = ""
    """Ray's id of the node that it runs on; empty: Ray did not start it."""
    version: str = ""
    """The name of the version that it was started with (`operate.Version`)."""
    is_suspect: bool = False
    """The directory says so: the worker missed heartbeats, and gets nothing new until it is heard again."""
    shape: str = "1"
    """The arrangement of its ranks, see `baton.core.shape`."""


class MembershipView(msgspec.Struct, frozen=True):
    """All members at one version. Versions only rise within one life of the directory."""

    directory_life: str
    version: UInt64
    members: tuple[Member, ...]
    routers: tuple[RouterMember, ...] = ()
