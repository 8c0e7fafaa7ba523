from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_PREFILL: _ClassVar[Phase]
    PHASE_DECODE: _ClassVar[Phase]
    PHASE_AGGREGATED: _ClassVar[Phase]

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_KIND_EBNF: _ClassVar[GrammarKind]
    GRAMMAR_KIND_CHOICE: _ClassVar[GrammarKind]
    GRAMMAR_KIND_STRUCTURAL_TAG: _ClassVar[GrammarKind]

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_GENERATE: _ClassVar[Task]
    TASK_EMBED: _ClassVar[Task]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_AGGREGATED: _ClassVar[Role]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class RefusalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_REASON_UNSPECIFIED: _ClassVar[RefusalReason]
    REFUSAL_REASON_NO_ROOM: _ClassVar[RefusalReason]
    REFUSAL_REASON_DRAINING: _ClassVar[RefusalReason]
    REFUSAL_REASON_TOO_LONG: _ClassVar[RefusalReason]
    REFUSAL_REASON_STALE_EPOCH: _ClassVar[RefusalReason]
    REFUSAL_REASON_UNSUPPORTED: _ClassVar[RefusalReason]
    REFUSAL_REASON_BUSY: _ClassVar[RefusalReason]

class FailureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_REASON_UNSPECIFIED: _ClassVar[FailureReason]
    FAILURE_REASON_TRANSFER: _ClassVar[FailureReason]
    FAILURE_REASON_SOURCE_LOST: _ClassVar[FailureReason]
    FAILURE_REASON_SOURCE_REFUSED: _ClassVar[FailureReason]
    FAILURE_REASON_DEADLINE: _ClassVar[FailureReason]
    FAILURE_REASON_DRAINED: _ClassVar[FailureReason]
    FAILURE_REASON_INTERNAL: _ClassVar[FailureReason]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_SSD: _ClassVar[Tier]
    TIER_PEER: _ClassVar[Tier]

class Scarce(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCARCE_UNSPECIFIED: _ClassVar[Scarce]
    SCARCE_REQUESTS: _ClassVar[Scarce]
    SCARCE_TOKENS: _ClassVar[Scarce]
    SCARCE_CONCURRENT: _ClassVar[Scarce]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_ACCEPTED: _ClassVar[Outcome]
    OUTCOME_REFUSED: _ClassVar[Outcome]
    OUTCOME_ADVISED: _ClassVar[Outcome]
    OUTCOME_DONE: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_WAITING: _ClassVar[ReplicaState]
    REPLICA_STATE_STARTING: _ClassVar[ReplicaState]
    REPLICA_STATE_RUNNING: _ClassVar[ReplicaState]
    REPLICA_STATE_SUSPECT: _ClassVar[ReplicaState]
    REPLICA_STATE_SWITCHING: _ClassVar[ReplicaState]
    REPLICA_STATE_DRAINING: _ClassVar[ReplicaState]
    REPLICA_STATE_KILLING: _ClassVar[ReplicaState]

class ExpertRankPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPERT_RANK_PHASE_UNSPECIFIED: _ClassVar[ExpertRankPhase]
    EXPERT_RANK_PHASE_STARTING: _ClassVar[ExpertRankPhase]
    EXPERT_RANK_PHASE_READY: _ClassVar[ExpertRankPhase]
    EXPERT_RANK_PHASE_DRAINING: _ClassVar[ExpertRankPhase]
    EXPERT_RANK_PHASE_LOST: _ClassVar[ExpertRankPhase]
PHASE_UNSPECIFIED: Phase
PHASE_PREFILL: Phase
PHASE_DECODE: Phase
PHASE_AGGREGATED: Phase
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind
GRAMMAR_KIND_EBNF: GrammarKind
GRAMMAR_KIND_CHOICE: GrammarKind
GRAMMAR_KIND_STRUCTURAL_TAG: GrammarKind
TASK_UNSPECIFIED: Task
TASK_GENERATE: Task
TASK_EMBED: Task
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_AGGREGATED: Role
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
REFUSAL_REASON_UNSPECIFIED: RefusalReason
REFUSAL_REASON_NO_ROOM: RefusalReason
REFUSAL_REASON_DRAINING: RefusalReason
REFUSAL_REASON_TOO_LONG: RefusalReason
REFUSAL_REASON_STALE_EPOCH: RefusalReason
REFUSAL_REASON_UNSUPPORTED: RefusalReason
REFUSAL_REASON_BUSY: RefusalReason
FAILURE_REASON_UNSPECIFIED: FailureReason
FAILURE_REASON_TRANSFER: FailureReason
FAILURE_REASON_SOURCE_LOST: FailureReason
FAILURE_REASON_SOURCE_REFUSED: FailureReason
FAILURE_REASON_DEADLINE: FailureReason
FAILURE_REASON_DRAINED: FailureReason
FAILURE_REASON_INTERNAL: FailureReason
TIER_UNSPECIFIED: Tier
TIER_HOST: Tier
TIER_SSD: Tier
TIER_PEER: Tier
SCARCE_UNSPECIFIED: Scarce
SCARCE_REQUESTS: Scarce
SCARCE_TOKENS: Scarce
SCARCE_CONCURRENT: Scarce
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_ACCEPTED: Outcome
OUTCOME_REFUSED: Outcome
OUTCOME_ADVISED: Outcome
OUTCOME_DONE: Outcome
OUTCOME_FAILED: Outcome
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_WAITING: ReplicaState
REPLICA_STATE_STARTING: ReplicaState
REPLICA_STATE_RUNNING: ReplicaState
REPLICA_STATE_SUSPECT: ReplicaState
REPLICA_STATE_SWITCHING: ReplicaState
REPLICA_STATE_DRAINING: ReplicaState
REPLICA_STATE_KILLING: ReplicaState
EXPERT_RANK_PHASE_UNSPECIFIED: ExpertRankPhase
EXPERT_RANK_PHASE_STARTING: ExpertRankPhase
EXPERT_RANK_PHASE_READY: ExpertRankPhase
EXPERT_RANK_PHASE_DRAINING: ExpertRankPhase
EXPERT_RANK_PHASE_LOST: ExpertRankPhase

class RouterEnvelope(_message.Message):
    __slots__ = ("router_hello", "start_sequence", "cancel_sequence", "resync_blocks")
    ROUTER_HELLO_FIELD_NUMBER: _ClassVar[int]
    START_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESYNC_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    router_hello: RouterHello
    start_sequence: StartSequence
    cancel_sequence: CancelSequence
    resync_blocks: ResyncBlocks
    def __init__(self, router_hello: _Optional[_Union[RouterHello, _Mapping]] = ..., start_sequence: _Optional[_Union[StartSequence, _Mapping]] = ..., cancel_sequence: _Optional[_Union[CancelSequence, _Mapping]] = ..., resync_blocks: _Optional[_Union[ResyncBlocks, _Mapping]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id", "wire_version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    wire_version: int
    def __init__(self, router_id: _Optional[str] = ..., wire_version: _Optional[int] = ...) -> None: ...

class StartSequence(_message.Message):
    __slots__ = ("seq_id", "epoch", "phase", "tokens", "prompt_token_count", "sampling", "cache_root", "time_left_s", "source", "traceparent", "task", "adapter", "priority", "tpot_slo_s", "fairness_key")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_ROOT_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TPOT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    FAIRNESS_KEY_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    phase: Phase
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_token_count: int
    sampling: SamplingParams
    cache_root: bytes
    time_left_s: float
    source: PeerRef
    traceparent: str
    task: Task
    adapter: AdapterRef
    priority: int
    tpot_slo_s: float
    fairness_key: str
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_token_count: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., cache_root: _Optional[bytes] = ..., time_left_s: _Optional[float] = ..., source: _Optional[_Union[PeerRef, _Mapping]] = ..., traceparent: _Optional[str] = ..., task: _Optional[_Union[Task, str]] = ..., adapter: _Optional[_Union[AdapterRef, _Mapping]] = ..., priority: _Optional[int] = ..., tpot_slo_s: _Optional[float] = ..., fairness_key: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "ignore_eos", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias_ids", "logit_bias_values", "allowed_token_ids", "min_tokens", "logprobs", "prompt_logprobs", "grammar")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias_values: _containers.RepeatedScalarFieldContainer[float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    grammar: Grammar
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias_ids: _Optional[_Iterable[int]] = ..., logit_bias_values: _Optional[_Iterable[float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text", "after_token_ids")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AFTER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    text: str
    after_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., text: _Optional[str] = ..., after_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PeerRef(_message.Message):
    __slots__ = ("worker_id", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class AdapterRef(_message.Message):
    __slots__ = ("name", "path", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class CancelSequence(_message.Message):
    __slots__ = ("seq_id", "epoch")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ResyncBlocks(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerEnvelope(_message.Message):
    __slots__ = ("worker_hello", "step_columns", "sequence_joined", "sequence_refused", "sequence_failed", "block_events", "load_report", "session_ends")
    WORKER_HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_JOINED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_REFUSED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FAILED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_REPORT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ENDS_FIELD_NUMBER: _ClassVar[int]
    worker_hello: WorkerHello
    step_columns: StepColumns
    sequence_joined: SequenceJoined
    sequence_refused: SequenceRefused
    sequence_failed: SequenceFailed
    block_events: BlockEvents
    load_report: LoadReport
    session_ends: SessionEnds
    def __init__(self, worker_hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., step_columns: _Optional[_Union[StepColumns, _Mapping]] = ..., sequence_joined: _Optional[_Union[SequenceJoined, _Mapping]] = ..., sequence_refused: _Optional[_Union[SequenceRefused, _Mapping]] = ..., sequence_failed: _Optional[_Union[SequenceFailed, _Mapping]] = ..., block_events: _Optional[_Union[BlockEvents, _Mapping]] = ..., load_report: _Optional[_Union[LoadReport, _Mapping]] = ..., session_ends: _Optional[_Union[SessionEnds, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("worker_id", "role", "fingerprint", "model", "block_tokens", "block_count", "max_model_tokens", "wire_version", "costs", "block_bytes", "step_tokens_max", "batch_sequences_max", "tpot_slo_s", "chunk_tokens_min", "host")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    BATCH_SEQUENCES_MAX_FIELD_NUMBER: _ClassVar[int]
    TPOT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_MIN_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: Role
    fingerprint: str
    model: str
    block_tokens: int
    block_count: int
    max_model_tokens: int
    wire_version: int
    costs: StepCosts
    block_bytes: int
    step_tokens_max: int
    batch_sequences_max: int
    tpot_slo_s: float
    chunk_tokens_min: int
    host: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., fingerprint: _Optional[str] = ..., model: _Optional[str] = ..., block_tokens: _Optional[int] = ..., block_count: _Optional[int] = ..., max_model_tokens: _Optional[int] = ..., wire_version: _Optional[int] = ..., costs: _Optional[_Union[StepCosts, _Mapping]] = ..., block_bytes: _Optional[int] = ..., step_tokens_max: _Optional[int] = ..., batch_sequences_max: _Optional[int] = ..., tpot_slo_s: _Optional[float] = ..., chunk_tokens_min: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class StepCosts(_message.Message):
    __slots__ = ("base_s", "prompt_token_s", "decode_s", "context_token_s", "pair_s", "stages", "floor_s", "few_decode_s")
    BASE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PAIR_S_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    FLOOR_S_FIELD_NUMBER: _ClassVar[int]
    FEW_DECODE_S_FIELD_NUMBER: _ClassVar[int]
    base_s: float
    prompt_token_s: float
    decode_s: float
    context_token_s: float
    pair_s: float
    stages: int
    floor_s: float
    few_decode_s: float
    def __init__(self, base_s: _Optional[float] = ..., prompt_token_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., context_token_s: _Optional[float] = ..., pair_s: _Optional[float] = ..., stages: _Optional[int] = ..., floor_s: _Optional[float] = ..., few_decode_s: _Optional[float] = ...) -> None: ...

class StepColumns(_message.Message):
    __slots__ = ("outputs", "plain")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    plain: PlainOutputs
    def __init__(self, outputs: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ..., plain: _Optional[_Union[PlainOutputs, _Mapping]] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("seq_id", "epoch", "first_index", "tokens", "finish", "cached_token_count", "logprobs", "prompt_logprobs", "embedding", "timings")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    first_index: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    finish: FinishReason
    cached_token_count: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: TokenLogprobsList
    embedding: _containers.RepeatedScalarFieldContainer[float]
    timings: PhaseTimings
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., first_index: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[FinishReason, str]] = ..., cached_token_count: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Union[TokenLogprobsList, _Mapping]] = ..., embedding: _Optional[_Iterable[float]] = ..., timings: _Optional[_Union[PhaseTimings, _Mapping]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token", "logprob", "rank", "top_ids", "top_logprobs")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    rank: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenLogprobsList(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, items: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class PhaseTimings(_message.Message):
    __slots__ = ("wait_s", "load_s", "compute_s")
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    wait_s: float
    load_s: float
    compute_s: float
    def __init__(self, wait_s: _Optional[float] = ..., load_s: _Optional[float] = ..., compute_s: _Optional[float] = ...) -> None: ...

class PlainOutputs(_message.Message):
    __slots__ = ("seq_ids", "epochs", "first_indices", "token_counts", "tokens")
    SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDICES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    seq_ids: _containers.RepeatedScalarFieldContainer[str]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    first_indices: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq_ids: _Optional[_Iterable[str]] = ..., epochs: _Optional[_Iterable[int]] = ..., first_indices: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceJoined(_message.Message):
    __slots__ = ("seq_id", "epoch", "transferred_bytes", "transfer_s", "handover_s")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_S_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    transferred_bytes: int
    transfer_s: float
    handover_s: float
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., transferred_bytes: _Optional[int] = ..., transfer_s: _Optional[float] = ..., handover_s: _Optional[float] = ...) -> None: ...

class SequenceRefused(_message.Message):
    __slots__ = ("seq_id", "epoch", "reason", "message")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    reason: RefusalReason
    message: str
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[_Union[RefusalReason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class SequenceFailed(_message.Message):
    __slots__ = ("seq_id", "epoch", "reason", "message")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    reason: FailureReason
    message: str
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[_Union[FailureReason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class BlockEvents(_message.Message):
    __slots__ = ("sequence_number", "stored", "removed", "is_snapshot")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    stored: bytes
    removed: bytes
    is_snapshot: bool
    def __init__(self, sequence_number: _Optional[int] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., is_snapshot: _Optional[bool] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("role", "is_draining", "free_blocks", "running_count", "waiting_count", "waiting_tokens", "step_s", "costs", "decoding_count", "context_tokens", "tokens_per_step", "incoming_count", "is_parked")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    DECODING_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    INCOMING_COUNT_FIELD_NUMBER: _ClassVar[int]
    IS_PARKED_FIELD_NUMBER: _ClassVar[int]
    role: Role
    is_draining: bool
    free_blocks: int
    running_count: int
    waiting_count: int
    waiting_tokens: int
    step_s: float
    costs: StepCosts
    decoding_count: int
    context_tokens: int
    tokens_per_step: float
    incoming_count: int
    is_parked: bool
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., is_draining: _Optional[bool] = ..., free_blocks: _Optional[int] = ..., running_count: _Optional[int] = ..., waiting_count: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., step_s: _Optional[float] = ..., costs: _Optional[_Union[StepCosts, _Mapping]] = ..., decoding_count: _Optional[int] = ..., context_tokens: _Optional[int] = ..., tokens_per_step: _Optional[float] = ..., incoming_count: _Optional[int] = ..., is_parked: _Optional[bool] = ...) -> None: ...

class SessionEnds(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RoleRequest(_message.Message):
    __slots__ = ("role", "drain_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    role: Role
    drain_s: float
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., drain_s: _Optional[float] = ...) -> None: ...

class WorkerStatusReply(_message.Message):
    __slots__ = ("worker_id", "role", "is_draining", "fingerprint", "accounts", "notes")
    class AccountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: Role
    is_draining: bool
    fingerprint: str
    accounts: _containers.ScalarMap[str, float]
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., is_draining: _Optional[bool] = ..., fingerprint: _Optional[str] = ..., accounts: _Optional[_Mapping[str, float]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class ReaderEnvelope(_message.Message):
    __slots__ = ("peer_hello", "kv_request", "kv_released")
    PEER_HELLO_FIELD_NUMBER: _ClassVar[int]
    KV_REQUEST_FIELD_NUMBER: _ClassVar[int]
    KV_RELEASED_FIELD_NUMBER: _ClassVar[int]
    peer_hello: PeerHello
    kv_request: KVRequest
    kv_released: KVReleased
    def __init__(self, peer_hello: _Optional[_Union[PeerHello, _Mapping]] = ..., kv_request: _Optional[_Union[KVRequest, _Mapping]] = ..., kv_released: _Optional[_Union[KVReleased, _Mapping]] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("worker_id", "fingerprint", "parts", "wire_version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    fingerprint: str
    parts: _containers.RepeatedCompositeFieldContainer[KVPart]
    wire_version: int
    def __init__(self, worker_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[KVPart, _Mapping]]] = ..., wire_version: _Optional[int] = ...) -> None: ...

class KVPart(_message.Message):
    __slots__ = ("first_layer", "layer_count", "first_head", "head_count", "transfer_offers")
    class TransferOffersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_OFFERS_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    layer_count: int
    first_head: int
    head_count: int
    transfer_offers: _containers.ScalarMap[str, bytes]
    def __init__(self, first_layer: _Optional[int] = ..., layer_count: _Optional[int] = ..., first_head: _Optional[int] = ..., head_count: _Optional[int] = ..., transfer_offers: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class KVRequest(_message.Message):
    __slots__ = ("seq_id", "epoch", "first_block", "request_number")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    first_block: int
    request_number: int
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., first_block: _Optional[int] = ..., request_number: _Optional[int] = ...) -> None: ...

class KVReleased(_message.Message):
    __slots__ = ("seq_id", "epoch", "taken")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    taken: bool
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., taken: _Optional[bool] = ...) -> None: ...

class OwnerEnvelope(_message.Message):
    __slots__ = ("peer_hello", "kv_grant", "kv_refused")
    PEER_HELLO_FIELD_NUMBER: _ClassVar[int]
    KV_GRANT_FIELD_NUMBER: _ClassVar[int]
    KV_REFUSED_FIELD_NUMBER: _ClassVar[int]
    peer_hello: PeerHello
    kv_grant: KVGrant
    kv_refused: KVRefused
    def __init__(self, peer_hello: _Optional[_Union[PeerHello, _Mapping]] = ..., kv_grant: _Optional[_Union[KVGrant, _Mapping]] = ..., kv_refused: _Optional[_Union[KVRefused, _Mapping]] = ...) -> None: ...

class KVGrant(_message.Message):
    __slots__ = ("seq_id", "epoch", "first_block", "source_blocks", "generations", "lease_s", "answers_request", "is_last", "first_token", "cached_token_count", "first_logprobs", "prompt_logprobs", "checksums")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_REQUEST_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    first_block: int
    source_blocks: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    lease_s: float
    answers_request: int
    is_last: bool
    first_token: int
    cached_token_count: int
    first_logprobs: TokenLogprobs
    prompt_logprobs: TokenLogprobsList
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., first_block: _Optional[int] = ..., source_blocks: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., lease_s: _Optional[float] = ..., answers_request: _Optional[int] = ..., is_last: _Optional[bool] = ..., first_token: _Optional[int] = ..., cached_token_count: _Optional[int] = ..., first_logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[TokenLogprobsList, _Mapping]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class KVRefused(_message.Message):
    __slots__ = ("seq_id", "epoch", "message")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    seq_id: str
    epoch: int
    message: str
    def __init__(self, seq_id: _Optional[str] = ..., epoch: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class StoreFrame(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("worker_id", "role", "address", "model", "fingerprint", "is_draining", "metrics_address", "host", "pid", "notes", "node", "version", "is_suspect", "shape")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_SUSPECT_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: Role
    address: str
    model: str
    fingerprint: str
    is_draining: bool
    metrics_address: str
    host: str
    pid: int
    notes: _containers.RepeatedScalarFieldContainer[str]
    node: str
    version: str
    is_suspect: bool
    shape: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., is_draining: _Optional[bool] = ..., metrics_address: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., notes: _Optional[_Iterable[str]] = ..., node: _Optional[str] = ..., version: _Optional[str] = ..., is_suspect: _Optional[bool] = ..., shape: _Optional[str] = ...) -> None: ...

class WorkerLeaves(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class RouterMember(_message.Message):
    __slots__ = ("router_id", "address", "metrics_address", "host", "pid")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    address: str
    metrics_address: str
    host: str
    pid: int
    def __init__(self, router_id: _Optional[str] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class MembershipView(_message.Message):
    __slots__ = ("directory_life", "version", "members", "routers")
    DIRECTORY_LIFE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    directory_life: str
    version: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    routers: _containers.RepeatedCompositeFieldContainer[RouterMember]
    def __init__(self, directory_life: _Optional[str] = ..., version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., routers: _Optional[_Iterable[_Union[RouterMember, _Mapping]]] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("router_id", "wire_version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    wire_version: int
    def __init__(self, router_id: _Optional[str] = ..., wire_version: _Optional[int] = ...) -> None: ...

class RouterUpdate(_message.Message):
    __slots__ = ("router_id", "is_snapshot", "loads", "expected")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    is_snapshot: bool
    loads: _containers.RepeatedCompositeFieldContainer[UnreportedLoad]
    expected: _containers.RepeatedCompositeFieldContainer[ExpectedBlocks]
    def __init__(self, router_id: _Optional[str] = ..., is_snapshot: _Optional[bool] = ..., loads: _Optional[_Iterable[_Union[UnreportedLoad, _Mapping]]] = ..., expected: _Optional[_Iterable[_Union[ExpectedBlocks, _Mapping]]] = ...) -> None: ...

class UnreportedLoad(_message.Message):
    __slots__ = ("worker_id", "sequences", "tokens", "blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    sequences: int
    tokens: int
    blocks: int
    def __init__(self, worker_id: _Optional[str] = ..., sequences: _Optional[int] = ..., tokens: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class ExpectedBlocks(_message.Message):
    __slots__ = ("worker_id", "hashes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    hashes: bytes
    def __init__(self, worker_id: _Optional[str] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class RecentRequestsQuery(_message.Message):
    __slots__ = ("request_id", "limit")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    limit: int
    def __init__(self, request_id: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class RecentRequestsReply(_message.Message):
    __slots__ = ("router_id", "recent_requests")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    RECENT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    recent_requests: _containers.RepeatedCompositeFieldContainer[RecentRequest]
    def __init__(self, router_id: _Optional[str] = ..., recent_requests: _Optional[_Iterable[_Union[RecentRequest, _Mapping]]] = ...) -> None: ...

class RecentRequest(_message.Message):
    __slots__ = ("request_id", "arrived_s", "took_s", "outcome", "verdict", "error", "model", "slo_class", "tenant", "ttft_slo_s", "tpot_slo_s", "prompt_tokens", "cached_tokens", "completion_tokens", "ttft_s", "tpot_s", "parts", "prefill_worker", "decode_worker", "predicted_ttft_s", "predicted_tpot_s", "attempts", "moments", "client_request_id")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_S_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TPOT_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    arrived_s: float
    took_s: float
    outcome: str
    verdict: str
    error: str
    model: str
    slo_class: str
    tenant: str
    ttft_slo_s: float
    tpot_slo_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    tpot_s: float
    parts: _containers.ScalarMap[str, float]
    prefill_worker: str
    decode_worker: str
    predicted_ttft_s: float
    predicted_tpot_s: float
    attempts: int
    moments: _containers.RepeatedCompositeFieldContainer[Moment]
    client_request_id: str
    def __init__(self, request_id: _Optional[str] = ..., arrived_s: _Optional[float] = ..., took_s: _Optional[float] = ..., outcome: _Optional[str] = ..., verdict: _Optional[str] = ..., error: _Optional[str] = ..., model: _Optional[str] = ..., slo_class: _Optional[str] = ..., tenant: _Optional[str] = ..., ttft_slo_s: _Optional[float] = ..., tpot_slo_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., parts: _Optional[_Mapping[str, float]] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., predicted_ttft_s: _Optional[float] = ..., predicted_tpot_s: _Optional[float] = ..., attempts: _Optional[int] = ..., moments: _Optional[_Iterable[_Union[Moment, _Mapping]]] = ..., client_request_id: _Optional[str] = ...) -> None: ...

class Moment(_message.Message):
    __slots__ = ("after_s", "what", "reason", "sequence", "workers", "seconds", "bytes")
    AFTER_S_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    after_s: float
    what: str
    reason: str
    sequence: str
    workers: _containers.RepeatedScalarFieldContainer[str]
    seconds: float
    bytes: int
    def __init__(self, after_s: _Optional[float] = ..., what: _Optional[str] = ..., reason: _Optional[str] = ..., sequence: _Optional[str] = ..., workers: _Optional[_Iterable[str]] = ..., seconds: _Optional[float] = ..., bytes: _Optional[int] = ...) -> None: ...

class RenewStoreRequest(_message.Message):
    __slots__ = ("member", "lease_s")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    member: StoreMember
    lease_s: float
    def __init__(self, member: _Optional[_Union[StoreMember, _Mapping]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class StoreMember(_message.Message):
    __slots__ = ("node", "host", "pid", "is_draining", "host_bytes", "ssd_bytes", "metrics_address", "notes")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    node: NodeRef
    host: str
    pid: int
    is_draining: bool
    host_bytes: int
    ssd_bytes: int
    metrics_address: str
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[_Union[NodeRef, _Mapping]] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., is_draining: _Optional[bool] = ..., host_bytes: _Optional[int] = ..., ssd_bytes: _Optional[int] = ..., metrics_address: _Optional[str] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class NodeRef(_message.Message):
    __slots__ = ("node_id", "address")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class StoreKnown(_message.Message):
    __slots__ = ("is_known",)
    IS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    is_known: bool
    def __init__(self, is_known: _Optional[bool] = ...) -> None: ...

class StoreLeaves(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class StoreMembers(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[StoreMember]
    def __init__(self, members: _Optional[_Iterable[_Union[StoreMember, _Mapping]]] = ...) -> None: ...

class StoreChanges(_message.Message):
    __slots__ = ("node_id", "sequence_number", "stored", "stored_tiers", "removed", "is_snapshot", "is_first", "is_last")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    STORED_TIERS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    IS_FIRST_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    sequence_number: int
    stored: bytes
    stored_tiers: _containers.RepeatedScalarFieldContainer[Tier]
    removed: bytes
    is_snapshot: bool
    is_first: bool
    is_last: bool
    def __init__(self, node_id: _Optional[str] = ..., sequence_number: _Optional[int] = ..., stored: _Optional[bytes] = ..., stored_tiers: _Optional[_Iterable[_Union[Tier, str]]] = ..., removed: _Optional[bytes] = ..., is_snapshot: _Optional[bool] = ..., is_first: _Optional[bool] = ..., is_last: _Optional[bool] = ...) -> None: ...

class LookUpRequest(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    def __init__(self, hashes: _Optional[bytes] = ...) -> None: ...

class LookUpReply(_message.Message):
    __slots__ = ("count", "nodes")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    count: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeLocations]
    def __init__(self, count: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeLocations, _Mapping]]] = ...) -> None: ...

class NodeLocations(_message.Message):
    __slots__ = ("node", "tiers")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    node: NodeRef
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    def __init__(self, node: _Optional[_Union[NodeRef, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[Tier, str]]] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("tenant", "lease", "lease_s", "tokens", "requests_per_minute", "tokens_per_minute", "concurrent_max", "router_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    CONCURRENT_MAX_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    lease: str
    lease_s: float
    tokens: int
    requests_per_minute: int
    tokens_per_minute: int
    concurrent_max: int
    router_id: str
    def __init__(self, tenant: _Optional[str] = ..., lease: _Optional[str] = ..., lease_s: _Optional[float] = ..., tokens: _Optional[int] = ..., requests_per_minute: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., concurrent_max: _Optional[int] = ..., router_id: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("scarce", "retry_after_s", "requests_left_s", "tokens_left_s", "router_count")
    SCARCE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    ROUTER_COUNT_FIELD_NUMBER: _ClassVar[int]
    scarce: Scarce
    retry_after_s: float
    requests_left_s: float
    tokens_left_s: float
    router_count: int
    def __init__(self, scarce: _Optional[_Union[Scarce, str]] = ..., retry_after_s: _Optional[float] = ..., requests_left_s: _Optional[float] = ..., tokens_left_s: _Optional[float] = ..., router_count: _Optional[int] = ...) -> None: ...

class Settle(_message.Message):
    __slots__ = ("tenant", "lease", "refund_tokens", "tokens_per_minute")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REFUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    lease: str
    refund_tokens: int
    tokens_per_minute: int
    def __init__(self, tenant: _Optional[str] = ..., lease: _Optional[str] = ..., refund_tokens: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ...) -> None: ...

class DemandReport(_message.Message):
    __slots__ = ("router_id", "up_s", "classes", "queued", "queued_prompt_tokens", "workers", "model")
    class ClassesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ClassLoad
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ClassLoad, _Mapping]] = ...) -> None: ...
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    UP_S_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    up_s: float
    classes: _containers.MessageMap[str, ClassLoad]
    queued: int
    queued_prompt_tokens: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerLoad]
    model: str
    def __init__(self, router_id: _Optional[str] = ..., up_s: _Optional[float] = ..., classes: _Optional[_Mapping[str, ClassLoad]] = ..., queued: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerLoad, _Mapping]]] = ..., model: _Optional[str] = ...) -> None: ...

class ClassLoad(_message.Message):
    __slots__ = ("arrived", "started", "started_prompt_tokens", "cached_tokens", "ttft_missed", "ended", "output_tokens", "context_tokens", "tpot_missed")
    class ArrivedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: Bin
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[Bin, _Mapping]] = ...) -> None: ...
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    STARTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MISSED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MISSED_FIELD_NUMBER: _ClassVar[int]
    arrived: _containers.MessageMap[int, Bin]
    started: int
    started_prompt_tokens: int
    cached_tokens: int
    ttft_missed: int
    ended: int
    output_tokens: int
    context_tokens: int
    tpot_missed: int
    def __init__(self, arrived: _Optional[_Mapping[int, Bin]] = ..., started: _Optional[int] = ..., started_prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., ttft_missed: _Optional[int] = ..., ended: _Optional[int] = ..., output_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., tpot_missed: _Optional[int] = ...) -> None: ...

class Bin(_message.Message):
    __slots__ = ("requests", "prompt_tokens", "further_prompts")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FURTHER_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    prompt_tokens: int
    further_prompts: int
    def __init__(self, requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., further_prompts: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("worker_id", "role", "age_s", "waiting_tokens", "decoding", "context_tokens", "held_share", "traits")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_SHARE_FIELD_NUMBER: _ClassVar[int]
    TRAITS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: Role
    age_s: float
    waiting_tokens: int
    decoding: int
    context_tokens: int
    held_share: float
    traits: Traits
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., age_s: _Optional[float] = ..., waiting_tokens: _Optional[int] = ..., decoding: _Optional[int] = ..., context_tokens: _Optional[int] = ..., held_share: _Optional[float] = ..., traits: _Optional[_Union[Traits, _Mapping]] = ...) -> None: ...

class Traits(_message.Message):
    __slots__ = ("costs", "chunk_tokens", "batch_max", "pool_tokens")
    COSTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_MAX_FIELD_NUMBER: _ClassVar[int]
    POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    costs: StepCosts
    chunk_tokens: int
    batch_max: int
    pool_tokens: int
    def __init__(self, costs: _Optional[_Union[StepCosts, _Mapping]] = ..., chunk_tokens: _Optional[int] = ..., batch_max: _Optional[int] = ..., pool_tokens: _Optional[int] = ...) -> None: ...

class DemandReply(_message.Message):
    __slots__ = ("every_s",)
    EVERY_S_FIELD_NUMBER: _ClassVar[int]
    every_s: float
    def __init__(self, every_s: _Optional[float] = ...) -> None: ...

class ExpertRankEnvelope(_message.Message):
    __slots__ = ("expert_rank_hello", "expert_loaded", "expert_load_failed", "expert_rank_beat")
    EXPERT_RANK_HELLO_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LOADED_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LOAD_FAILED_FIELD_NUMBER: _ClassVar[int]
    EXPERT_RANK_BEAT_FIELD_NUMBER: _ClassVar[int]
    expert_rank_hello: ExpertRankHello
    expert_loaded: ExpertLoaded
    expert_load_failed: ExpertLoadFailed
    expert_rank_beat: ExpertRankBeat
    def __init__(self, expert_rank_hello: _Optional[_Union[ExpertRankHello, _Mapping]] = ..., expert_loaded: _Optional[_Union[ExpertLoaded, _Mapping]] = ..., expert_load_failed: _Optional[_Union[ExpertLoadFailed, _Mapping]] = ..., expert_rank_beat: _Optional[_Union[ExpertRankBeat, _Mapping]] = ...) -> None: ...

class ExpertRankHello(_message.Message):
    __slots__ = ("ref", "group", "node", "pid", "layer_count", "expert_count", "expert_bytes", "slots", "held", "group_count", "slots_max")
    REF_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXPERT_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_MAX_FIELD_NUMBER: _ClassVar[int]
    ref: ExpertRankRef
    group: str
    node: str
    pid: int
    layer_count: int
    expert_count: int
    expert_bytes: int
    slots: int
    held: _containers.RepeatedScalarFieldContainer[int]
    group_count: int
    slots_max: int
    def __init__(self, ref: _Optional[_Union[ExpertRankRef, _Mapping]] = ..., group: _Optional[str] = ..., node: _Optional[str] = ..., pid: _Optional[int] = ..., layer_count: _Optional[int] = ..., expert_count: _Optional[int] = ..., expert_bytes: _Optional[int] = ..., slots: _Optional[int] = ..., held: _Optional[_Iterable[int]] = ..., group_count: _Optional[int] = ..., slots_max: _Optional[int] = ...) -> None: ...

class ExpertRankRef(_message.Message):
    __slots__ = ("rank_id", "host", "socket", "address", "secret")
    RANK_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    rank_id: str
    host: str
    socket: str
    address: str
    secret: str
    def __init__(self, rank_id: _Optional[str] = ..., host: _Optional[str] = ..., socket: _Optional[str] = ..., address: _Optional[str] = ..., secret: _Optional[str] = ...) -> None: ...

class ExpertLoaded(_message.Message):
    __slots__ = ("load_id", "expert", "is_copied")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    IS_COPIED_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    expert: int
    is_copied: bool
    def __init__(self, load_id: _Optional[int] = ..., expert: _Optional[int] = ..., is_copied: _Optional[bool] = ...) -> None: ...

class ExpertLoadFailed(_message.Message):
    __slots__ = ("load_id", "expert", "reason", "is_full")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_FULL_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    expert: int
    reason: str
    is_full: bool
    def __init__(self, load_id: _Optional[int] = ..., expert: _Optional[int] = ..., reason: _Optional[str] = ..., is_full: _Optional[bool] = ...) -> None: ...

class ExpertRankBeat(_message.Message):
    __slots__ = ("rows", "busy_s")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    rows: int
    busy_s: float
    def __init__(self, rows: _Optional[int] = ..., busy_s: _Optional[float] = ...) -> None: ...

class ExpertRankOrderEnvelope(_message.Message):
    __slots__ = ("expert_load_order", "expert_drop_order", "expert_rank_retired")
    EXPERT_LOAD_ORDER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_DROP_ORDER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_RANK_RETIRED_FIELD_NUMBER: _ClassVar[int]
    expert_load_order: ExpertLoadOrder
    expert_drop_order: ExpertDropOrder
    expert_rank_retired: ExpertRankRetired
    def __init__(self, expert_load_order: _Optional[_Union[ExpertLoadOrder, _Mapping]] = ..., expert_drop_order: _Optional[_Union[ExpertDropOrder, _Mapping]] = ..., expert_rank_retired: _Optional[_Union[ExpertRankRetired, _Mapping]] = ...) -> None: ...

class ExpertLoadOrder(_message.Message):
    __slots__ = ("load_id", "expert", "source")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    expert: int
    source: ExpertRankRef
    def __init__(self, load_id: _Optional[int] = ..., expert: _Optional[int] = ..., source: _Optional[_Union[ExpertRankRef, _Mapping]] = ...) -> None: ...

class ExpertDropOrder(_message.Message):
    __slots__ = ("expert",)
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    expert: int
    def __init__(self, expert: _Optional[int] = ...) -> None: ...

class ExpertRankRetired(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ExpertCallerEnvelope(_message.Message):
    __slots__ = ("expert_caller_hello", "expert_epoch_used", "expert_counts_report", "expert_rank_suspected")
    EXPERT_CALLER_HELLO_FIELD_NUMBER: _ClassVar[int]
    EXPERT_EPOCH_USED_FIELD_NUMBER: _ClassVar[int]
    EXPERT_COUNTS_REPORT_FIELD_NUMBER: _ClassVar[int]
    EXPERT_RANK_SUSPECTED_FIELD_NUMBER: _ClassVar[int]
    expert_caller_hello: ExpertCallerHello
    expert_epoch_used: ExpertEpochUsed
    expert_counts_report: ExpertCountsReport
    expert_rank_suspected: ExpertRankSuspected
    def __init__(self, expert_caller_hello: _Optional[_Union[ExpertCallerHello, _Mapping]] = ..., expert_epoch_used: _Optional[_Union[ExpertEpochUsed, _Mapping]] = ..., expert_counts_report: _Optional[_Union[ExpertCountsReport, _Mapping]] = ..., expert_rank_suspected: _Optional[_Union[ExpertRankSuspected, _Mapping]] = ...) -> None: ...

class ExpertCallerHello(_message.Message):
    __slots__ = ("caller", "worker_id", "group", "epoch")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    caller: str
    worker_id: str
    group: str
    epoch: int
    def __init__(self, caller: _Optional[str] = ..., worker_id: _Optional[str] = ..., group: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ExpertEpochUsed(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class ExpertCountsReport(_message.Message):
    __slots__ = ("layer_count", "expert_count", "counts")
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXPERT_COUNT_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    layer_count: int
    expert_count: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer_count: _Optional[int] = ..., expert_count: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class ExpertRankSuspected(_message.Message):
    __slots__ = ("rank_id", "is_gone", "reason")
    RANK_ID_FIELD_NUMBER: _ClassVar[int]
    IS_GONE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rank_id: str
    is_gone: bool
    reason: str
    def __init__(self, rank_id: _Optional[str] = ..., is_gone: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class ExpertMapUpdate(_message.Message):
    __slots__ = ("epoch", "layer_count", "expert_count", "ranks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXPERT_COUNT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    layer_count: int
    expert_count: int
    ranks: _containers.RepeatedCompositeFieldContainer[ExpertMapRank]
    def __init__(self, epoch: _Optional[int] = ..., layer_count: _Optional[int] = ..., expert_count: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[ExpertMapRank, _Mapping]]] = ...) -> None: ...

class ExpertMapRank(_message.Message):
    __slots__ = ("ref", "experts")
    REF_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ref: ExpertRankRef
    experts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ref: _Optional[_Union[ExpertRankRef, _Mapping]] = ..., experts: _Optional[_Iterable[int]] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("action", "who", "reason", "is_advice")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_ADVICE_FIELD_NUMBER: _ClassVar[int]
    action: Action
    who: str
    reason: str
    is_advice: bool
    def __init__(self, action: _Optional[_Union[Action, _Mapping]] = ..., who: _Optional[str] = ..., reason: _Optional[str] = ..., is_advice: _Optional[bool] = ...) -> None: ...

class Action(_message.Message):
    __slots__ = ("scale", "resize", "switch_role", "drain_worker", "drain_node", "roll_out", "rebalance_experts", "drain_expert_rank", "scale_experts")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    RESIZE_FIELD_NUMBER: _ClassVar[int]
    SWITCH_ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_WORKER_FIELD_NUMBER: _ClassVar[int]
    DRAIN_NODE_FIELD_NUMBER: _ClassVar[int]
    ROLL_OUT_FIELD_NUMBER: _ClassVar[int]
    REBALANCE_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_EXPERT_RANK_FIELD_NUMBER: _ClassVar[int]
    SCALE_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    scale: Scale
    resize: Resize
    switch_role: SwitchRole
    drain_worker: DrainWorker
    drain_node: DrainNode
    roll_out: RollOut
    rebalance_experts: RebalanceExperts
    drain_expert_rank: DrainExpertRank
    scale_experts: ScaleExperts
    def __init__(self, scale: _Optional[_Union[Scale, _Mapping]] = ..., resize: _Optional[_Union[Resize, _Mapping]] = ..., switch_role: _Optional[_Union[SwitchRole, _Mapping]] = ..., drain_worker: _Optional[_Union[DrainWorker, _Mapping]] = ..., drain_node: _Optional[_Union[DrainNode, _Mapping]] = ..., roll_out: _Optional[_Union[RollOut, _Mapping]] = ..., rebalance_experts: _Optional[_Union[RebalanceExperts, _Mapping]] = ..., drain_expert_rank: _Optional[_Union[DrainExpertRank, _Mapping]] = ..., scale_experts: _Optional[_Union[ScaleExperts, _Mapping]] = ...) -> None: ...

class Scale(_message.Message):
    __slots__ = ("role", "count", "model")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    role: Role
    count: int
    model: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., count: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class Resize(_message.Message):
    __slots__ = ("counts", "model")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.ScalarMap[str, int]
    model: str
    def __init__(self, counts: _Optional[_Mapping[str, int]] = ..., model: _Optional[str] = ...) -> None: ...

class SwitchRole(_message.Message):
    __slots__ = ("worker", "role")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    role: Role
    def __init__(self, worker: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ...) -> None: ...

class DrainWorker(_message.Message):
    __slots__ = ("worker", "is_replaced")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    IS_REPLACED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    is_replaced: bool
    def __init__(self, worker: _Optional[str] = ..., is_replaced: _Optional[bool] = ...) -> None: ...

class DrainNode(_message.Message):
    __slots__ = ("node", "is_undone")
    NODE_FIELD_NUMBER: _ClassVar[int]
    IS_UNDONE_FIELD_NUMBER: _ClassVar[int]
    node: str
    is_undone: bool
    def __init__(self, node: _Optional[str] = ..., is_undone: _Optional[bool] = ...) -> None: ...

class RollOut(_message.Message):
    __slots__ = ("version", "model", "surge_max", "unavailable_max")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SURGE_MAX_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_MAX_FIELD_NUMBER: _ClassVar[int]
    version: Version
    model: str
    surge_max: int
    unavailable_max: int
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., model: _Optional[str] = ..., surge_max: _Optional[int] = ..., unavailable_max: _Optional[int] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("name", "sets")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    name: str
    sets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., sets: _Optional[_Iterable[str]] = ...) -> None: ...

class RebalanceExperts(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class DrainExpertRank(_message.Message):
    __slots__ = ("rank", "is_replaced")
    RANK_FIELD_NUMBER: _ClassVar[int]
    IS_REPLACED_FIELD_NUMBER: _ClassVar[int]
    rank: str
    is_replaced: bool
    def __init__(self, rank: _Optional[str] = ..., is_replaced: _Optional[bool] = ...) -> None: ...

class ScaleExperts(_message.Message):
    __slots__ = ("count", "group")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    count: int
    group: str
    def __init__(self, count: _Optional[int] = ..., group: _Optional[str] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("number", "at_s", "who", "reason", "action", "outcome", "text", "done_after_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DONE_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    at_s: float
    who: str
    reason: str
    action: Action
    outcome: Outcome
    text: str
    done_after_s: float
    def __init__(self, number: _Optional[int] = ..., at_s: _Optional[float] = ..., who: _Optional[str] = ..., reason: _Optional[str] = ..., action: _Optional[_Union[Action, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., text: _Optional[str] = ..., done_after_s: _Optional[float] = ...) -> None: ...

class ClusterState(_message.Message):
    __slots__ = ("life", "pools", "replicas", "nodes", "decisions", "is_settled", "autoscale", "routers", "experts")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    IS_SETTLED_FIELD_NUMBER: _ClassVar[int]
    AUTOSCALE_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    life: str
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeState]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    is_settled: bool
    autoscale: _containers.RepeatedCompositeFieldContainer[AutoscaleState]
    routers: _containers.RepeatedCompositeFieldContainer[RouterState]
    experts: _containers.RepeatedCompositeFieldContainer[ExpertGroupState]
    def __init__(self, life: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[NodeState, _Mapping]]] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., is_settled: _Optional[bool] = ..., autoscale: _Optional[_Iterable[_Union[AutoscaleState, _Mapping]]] = ..., routers: _Optional[_Iterable[_Union[RouterState, _Mapping]]] = ..., experts: _Optional[_Iterable[_Union[ExpertGroupState, _Mapping]]] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("model", "counts", "version", "surge_max", "unavailable_max")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SURGE_MAX_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_MAX_FIELD_NUMBER: _ClassVar[int]
    model: str
    counts: _containers.ScalarMap[str, int]
    version: Version
    surge_max: int
    unavailable_max: int
    def __init__(self, model: _Optional[str] = ..., counts: _Optional[_Mapping[str, int]] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., surge_max: _Optional[int] = ..., unavailable_max: _Optional[int] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("name", "model", "role", "state", "for_s", "version", "worker_id", "node", "deaths_in_a_row", "last_exit", "reason", "address", "metrics_address", "shape", "memory")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DEATHS_IN_A_ROW_FIELD_NUMBER: _ClassVar[int]
    LAST_EXIT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    role: Role
    state: ReplicaState
    for_s: float
    version: str
    worker_id: str
    node: str
    deaths_in_a_row: int
    last_exit: str
    reason: str
    address: str
    metrics_address: str
    shape: str
    memory: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., for_s: _Optional[float] = ..., version: _Optional[str] = ..., worker_id: _Optional[str] = ..., node: _Optional[str] = ..., deaths_in_a_row: _Optional[int] = ..., last_exit: _Optional[str] = ..., reason: _Optional[str] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., shape: _Optional[str] = ..., memory: _Optional[str] = ...) -> None: ...

class NodeState(_message.Message):
    __slots__ = ("node", "host", "is_alive", "is_drained", "cpus", "gpus")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    IS_ALIVE_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINED_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    node: str
    host: str
    is_alive: bool
    is_drained: bool
    cpus: float
    gpus: float
    def __init__(self, node: _Optional[str] = ..., host: _Optional[str] = ..., is_alive: _Optional[bool] = ..., is_drained: _Optional[bool] = ..., cpus: _Optional[float] = ..., gpus: _Optional[float] = ...) -> None: ...

class AutoscaleState(_message.Message):
    __slots__ = ("mode", "text", "roles", "start_s", "drain_s", "switch_s", "model")
    MODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    SWITCH_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    mode: str
    text: str
    roles: _containers.RepeatedCompositeFieldContainer[RoleOutlook]
    start_s: float
    drain_s: float
    switch_s: float
    model: str
    def __init__(self, mode: _Optional[str] = ..., text: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[RoleOutlook, _Mapping]]] = ..., start_s: _Optional[float] = ..., drain_s: _Optional[float] = ..., switch_s: _Optional[float] = ..., model: _Optional[str] = ...) -> None: ...

class RoleOutlook(_message.Message):
    __slots__ = ("role", "demand", "forecast", "unit", "correction", "needed", "wanted")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    FORECAST_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    role: Role
    demand: float
    forecast: float
    unit: str
    correction: float
    needed: int
    wanted: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., demand: _Optional[float] = ..., forecast: _Optional[float] = ..., unit: _Optional[str] = ..., correction: _Optional[float] = ..., needed: _Optional[int] = ..., wanted: _Optional[int] = ...) -> None: ...

class RouterState(_message.Message):
    __slots__ = ("router_id", "address", "metrics_address", "host")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    address: str
    metrics_address: str
    host: str
    def __init__(self, router_id: _Optional[str] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., host: _Optional[str] = ...) -> None: ...

class ExpertGroupState(_message.Message):
    __slots__ = ("group", "model", "role", "epoch", "layer_count", "expert_count", "ranks", "wanted_ranks", "replicas_min", "replicas_mean", "missing", "single", "balance", "balance_worst", "balance_worst_layer", "expert_replicas", "expert_loads", "loads_running", "migrations", "migrated_bytes", "copied", "losses", "rebalances", "callers", "is_ready", "lacks_memory")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXPERT_COUNT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WANTED_RANKS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_MIN_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_MEAN_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    SINGLE_FIELD_NUMBER: _ClassVar[int]
    BALANCE_FIELD_NUMBER: _ClassVar[int]
    BALANCE_WORST_FIELD_NUMBER: _ClassVar[int]
    BALANCE_WORST_LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LOADS_FIELD_NUMBER: _ClassVar[int]
    LOADS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    MIGRATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    REBALANCES_FIELD_NUMBER: _ClassVar[int]
    CALLERS_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    LACKS_MEMORY_FIELD_NUMBER: _ClassVar[int]
    group: str
    model: str
    role: str
    epoch: int
    layer_count: int
    expert_count: int
    ranks: _containers.RepeatedCompositeFieldContainer[ExpertRankStatus]
    wanted_ranks: int
    replicas_min: int
    replicas_mean: float
    missing: int
    single: int
    balance: float
    balance_worst: float
    balance_worst_layer: int
    expert_replicas: _containers.RepeatedScalarFieldContainer[int]
    expert_loads: _containers.RepeatedScalarFieldContainer[float]
    loads_running: int
    migrations: int
    migrated_bytes: int
    copied: int
    losses: int
    rebalances: int
    callers: int
    is_ready: bool
    lacks_memory: bool
    def __init__(self, group: _Optional[str] = ..., model: _Optional[str] = ..., role: _Optional[str] = ..., epoch: _Optional[int] = ..., layer_count: _Optional[int] = ..., expert_count: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[ExpertRankStatus, _Mapping]]] = ..., wanted_ranks: _Optional[int] = ..., replicas_min: _Optional[int] = ..., replicas_mean: _Optional[float] = ..., missing: _Optional[int] = ..., single: _Optional[int] = ..., balance: _Optional[float] = ..., balance_worst: _Optional[float] = ..., balance_worst_layer: _Optional[int] = ..., expert_replicas: _Optional[_Iterable[int]] = ..., expert_loads: _Optional[_Iterable[float]] = ..., loads_running: _Optional[int] = ..., migrations: _Optional[int] = ..., migrated_bytes: _Optional[int] = ..., copied: _Optional[int] = ..., losses: _Optional[int] = ..., rebalances: _Optional[int] = ..., callers: _Optional[int] = ..., is_ready: _Optional[bool] = ..., lacks_memory: _Optional[bool] = ...) -> None: ...

class ExpertRankStatus(_message.Message):
    __slots__ = ("name", "rank_id", "phase", "node", "host", "slots", "held", "loading", "load", "rows", "busy_s", "for_s", "slots_max")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    SLOTS_MAX_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank_id: str
    phase: ExpertRankPhase
    node: str
    host: str
    slots: int
    held: int
    loading: int
    load: float
    rows: int
    busy_s: float
    for_s: float
    slots_max: int
    def __init__(self, name: _Optional[str] = ..., rank_id: _Optional[str] = ..., phase: _Optional[_Union[ExpertRankPhase, str]] = ..., node: _Optional[str] = ..., host: _Optional[str] = ..., slots: _Optional[int] = ..., held: _Optional[int] = ..., loading: _Optional[int] = ..., load: _Optional[float] = ..., rows: _Optional[int] = ..., busy_s: _Optional[float] = ..., for_s: _Optional[float] = ..., slots_max: _Optional[int] = ...) -> None: ...
