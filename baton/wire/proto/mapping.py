"""Values of our messages to protobuf and back. `make proto` writes this file, see `baton.wire.generate`.

Each message has three functions: `..._fields` returns the arguments of its protobuf message, `..._to_pb` that
message, and `..._from_pb` the value. The last raises WireError for what a correct peer never sends: an empty
oneof, an unspecified enum, a block hash of the wrong size, columns of different lengths.
"""

from typing import Any, assert_never


from baton.core.budgets import Ask, Grant, Scarce, Settle
from baton.core.costs import PhaseTimings, StepCosts
from baton.core.demand import Bin, ClassLoad, DemandReply, DemandReport, Traits, WorkerLoad
from baton.core.experts import ExpertCallerHello, ExpertCountsReport, ExpertDropOrder, ExpertEpochUsed, ExpertGroupState, ExpertLoadFailed, ExpertLoadOrder, ExpertLoaded, ExpertMapRank, ExpertMapUpdate, ExpertRankBeat, ExpertRankHello, ExpertRankPhase, ExpertRankRef, ExpertRankRetired, ExpertRankStatus, ExpertRankSuspected
from baton.core.messages import AdapterRef, BlockEvents, CancelSequence, FailureReason, KVGrant, KVPart, KVRefused, KVReleased, KVRequest, LoadReport, Member, MembershipView, PeerHello, PeerRef, Phase, RefusalReason, ResyncBlocks, Role, RouterHello, SequenceFailed, SequenceJoined, SequenceOutput, SequenceRefused, SessionEnds, StartSequence, StepOutput, Task, WorkerHello
from baton.core.operate import AutoscaleState, ClusterState, Decision, DrainExpertRank, DrainNode, DrainWorker, NodeState, Order, Outcome, Pool, RebalanceExperts, ReplicaState, ReplicaStatus, Resize, RoleOutlook, RollOut, RouterState, Scale, ScaleExperts, SwitchRole, Version
from baton.core.recent_requests import Moment, RecentRequest, RecentRequestsQuery, RecentRequestsReply
from baton.core.sampling import FinishReason, Grammar, GrammarKind, SamplingParams
from baton.core.sharing import ExpectedBlocks, RouterMember, RouterUpdate, UnreportedLoad
from baton.core.steps import TokenLogprobs
from baton.core.store import NodeRef, StoreChanges, StoreMember, Tier
from baton.wire.block_locations import LookUpReply, NodeLocations
from baton.wire.decoding import WireError, block_hash, block_hashes, enum_member, enum_named, pairs
from baton.wire.proto import baton_pb2 as pb
from baton.wire.services import Empty, FollowRequest, LookUpRequest, RenewStoreRequest, RoleRequest, StoreFrame, StoreKnown, StoreLeaves, StoreMembers, WorkerLeaves, WorkerStatusReply
from baton.wire.step_columns import PlainOutputs, StepColumns, pack, unpack

_PHASE_NUMBERS = {
    Phase.PREFILL: 1,
    Phase.DECODE: 2,
    Phase.AGGREGATED: 3,
}
_PHASE_MEMBERS = {number: member for member, number in _PHASE_NUMBERS.items()}

_GRAMMAR_KIND_NUMBERS = {
    GrammarKind.JSON_SCHEMA: 1,
    GrammarKind.REGEX: 2,
    GrammarKind.EBNF: 3,
    GrammarKind.CHOICE: 4,
    GrammarKind.STRUCTURAL_TAG: 5,
}
_GRAMMAR_KIND_MEMBERS = {number: member for member, number in _GRAMMAR_KIND_NUMBERS.items()}

_TASK_NUMBERS = {
    Task.GENERATE: 1,
    Task.EMBED: 2,
}
_TASK_MEMBERS = {number: member for member, number in _TASK_NUMBERS.items()}

_ROLE_NUMBERS = {
    Role.PREFILL: 1,
    Role.DECODE: 2,
    Role.AGGREGATED: 3,
}
_ROLE_MEMBERS = {number: member for member, number in _ROLE_NUMBERS.items()}

_FINISH_REASON_NUMBERS = {
    FinishReason.STOP: 1,
    FinishReason.LENGTH: 2,
}
_FINISH_REASON_MEMBERS = {number: member for member, number in _FINISH_REASON_NUMBERS.items()}

_REFUSAL_REASON_NUMBERS = {
    RefusalReason.NO_ROOM: 1,
    RefusalReason.DRAINING: 2,
    RefusalReason.TOO_LONG: 3,
    RefusalReason.STALE_EPOCH: 4,
    RefusalReason.UNSUPPORTED: 5,
    RefusalReason.BUSY: 6,
}
_REFUSAL_REASON_MEMBERS = {number: member for member, number in _REFUSAL_REASON_NUMBERS.items()}

_FAILURE_REASON_NUMBERS = {
    FailureReason.TRANSFER: 1,
    FailureReason.SOURCE_LOST: 2,
    FailureReason.SOURCE_REFUSED: 3,
    FailureReason.DEADLINE: 4,
    FailureReason.DRAINED: 5,
    FailureReason.INTERNAL: 6,
}
_FAILURE_REASON_MEMBERS = {number: member for member, number in _FAILURE_REASON_NUMBERS.items()}

_TIER_NUMBERS = {
    Tier.HOST: 1,
    Tier.SSD: 2,
    Tier.PEER: 3,
}
_TIER_MEMBERS = {number: member for member, number in _TIER_NUMBERS.items()}

_SCARCE_NUMBERS = {
    Scarce.REQUESTS: 1,
    Scarce.TOKENS: 2,
    Scarce.CONCURRENT: 3,
}
_SCARCE_MEMBERS = {number: member for member, number in _SCARCE_NUMBERS.items()}

_OUTCOME_NUMBERS = {
    Outcome.ACCEPTED: 1,
    Outcome.REFUSED: 2,
    Outcome.ADVISED: 3,
    Outcome.DONE: 4,
    Outcome.FAILED: 5,
}
_OUTCOME_MEMBERS = {number: member for member, number in _OUTCOME_NUMBERS.items()}

_REPLICA_STATE_NUMBERS = {
    ReplicaState.WAITING: 1,
    ReplicaState.STARTING: 2,
    ReplicaState.RUNNING: 3,
    ReplicaState.SUSPECT: 4,
    ReplicaState.SWITCHING: 5,
    ReplicaState.DRAINING: 6,
    ReplicaState.KILLING: 7,
}
_REPLICA_STATE_MEMBERS = {number: member for member, number in _REPLICA_STATE_NUMBERS.items()}

_EXPERT_RANK_PHASE_NUMBERS = {
    ExpertRankPhase.STARTING: 1,
    ExpertRankPhase.READY: 2,
    ExpertRankPhase.DRAINING: 3,
    ExpertRankPhase.LOST: 4,
}
_EXPERT_RANK_PHASE_MEMBERS = {number: member for member, number in _EXPERT_RANK_PHASE_NUMBERS.items()}


def router_envelope_fields(x: RouterHello | StartSequence | CancelSequence | ResyncBlocks) -> dict[str, Any]:
    match x:
        case RouterHello():
            return {"router_hello": router_hello_fields(x)}
        case StartSequence():
            return {"start_sequence": start_sequence_fields(x)}
        case CancelSequence():
            return {"cancel_sequence": cancel_sequence_fields(x)}
        case ResyncBlocks():
            return {"resync_blocks": resync_blocks_fields(x)}
        case _:
            assert_never(x)


def router_envelope_to_pb(x: RouterHello | StartSequence | CancelSequence | ResyncBlocks) -> pb.RouterEnvelope:
    return pb.RouterEnvelope(**router_envelope_fields(x))


def router_envelope_from_pb(x: pb.RouterEnvelope) -> StartSequence | CancelSequence | ResyncBlocks:
    match x.WhichOneof("message"):
        case "start_sequence":
            return start_sequence_from_pb(x.start_sequence)
        case "cancel_sequence":
            return cancel_sequence_from_pb(x.cancel_sequence)
        case "resync_blocks":
            return resync_blocks_from_pb(x.resync_blocks)
        case other:
            raise WireError(f"RouterEnvelope: message {other!r} is not allowed here")


def router_hello_fields(x: RouterHello) -> dict[str, Any]:
    return {
        "router_id": x.router_id,
        "wire_version": x.wire_version,
    }


def router_hello_to_pb(x: RouterHello) -> pb.RouterHello:
    return pb.RouterHello(**router_hello_fields(x))


def router_hello_from_pb(x: pb.RouterHello) -> RouterHello:
    return RouterHello(
        router_id=x.router_id,
        wire_version=x.wire_version,
    )


def start_sequence_fields(x: StartSequence) -> dict[str, Any]:
    return {
        "seq_id": x.seq_id,
        "epoch": x.epoch,
        "phase": _PHASE_NUMBERS[x.phase],
        "tokens": x.tokens,
        "prompt_token_count": x.prompt_token_count,
        "sampling": sampling_params_fields(x.sampling),
        "cache_root": x.cache_root,
        "time_left_s": x.time_left_s,
        "source": None if x.source is None else peer_ref_fields(x.source),
        "traceparent": x.traceparent,
        "task": _TASK_NUMBERS[x.task],
        "adapter": None if x.adapter is None else adapter_ref_fields(x.adapter),
        "priority": x.priority,
        "tpot_slo_s": x.tpot_slo_s,
        "fairness_key": x.fairness_key,
    }


def start_sequence_to_pb(x: StartSequence) -> pb.StartSequence:
    return pb.StartSequence(**start_sequence_fields(x))


def start_sequence_from_pb(x: pb.StartSequence) -> StartSequence:
    return StartSequence(
        seq_id=x.seq_id,
        epoch=x.epoch,
        phase=enum_member(_PHASE_MEMBERS, x.phase),
        tokens=tuple(x.tokens[:]),
        prompt_token_count=x.prompt_token_count,
        sampling=sampling_params_from_pb(x.sampling),
        cache_root=block_hash(x.cache_root),
        time_left_s=x.time_left_s,
        source=peer_ref_from_pb(x.source) if x.HasField("source") else None,
        traceparent=x.traceparent,
        task=enum_member(_TASK_MEMBERS, x.task),
        adapter=adapter_ref_from_pb(x.adapter) if x.HasField("adapter") else None,
        priority=x.priority,
        tpot_slo_s=x.tpot_slo_s,
        fairness_key=x.fairness_key,
    )


def sampling_params_fields(x: SamplingParams) -> dict[str, Any]:
    return {
        "max_tokens": x.max_tokens,
        "temperature": x.temperature,
        "top_p": x.top_p,
        "top_k": x.top_k,
        "seed": x.seed,
        "stop_token_ids": x.stop_token_ids,
        "ignore_eos": x.ignore_eos,
        "min_p": x.min_p,
        "repetition_penalty": x.repetition_penalty,
        "presence_penalty": x.presence_penalty,
        "frequency_penalty": x.frequency_penalty,
        "logit_bias_ids": [v for v, _ in x.logit_bias],
        "logit_bias_values": [v for _, v in x.logit_bias],
        "allowed_token_ids": x.allowed_token_ids,
        "min_tokens": x.min_tokens,
        "logprobs": x.logprobs,
        "prompt_logprobs": x.prompt_logprobs,
        "grammar": None if x.grammar is None else grammar_fields(x.grammar),
    }


def sampling_params_to_pb(x: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(**sampling_params_fields(x))


def sampling_params_from_pb(x: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=x.max_tokens,
        temperature=x.temperature,
        top_p=x.top_p,
        top_k=x.top_k,
        seed=x.seed,
        stop_token_ids=tuple(x.stop_token_ids[:]),
        ignore_eos=x.ignore_eos,
        min_p=x.min_p,
        repetition_penalty=x.repetition_penalty,
        presence_penalty=x.presence_penalty,
        frequency_penalty=x.frequency_penalty,
        logit_bias=pairs("SamplingParams.logit_bias", x.logit_bias_ids[:], x.logit_bias_values[:]),
        allowed_token_ids=tuple(x.allowed_token_ids[:]),
        min_tokens=x.min_tokens,
        logprobs=x.logprobs if x.HasField("logprobs") else None,
        prompt_logprobs=x.prompt_logprobs if x.HasField("prompt_logprobs") else None,
        grammar=grammar_from_pb(x.grammar) if x.HasField("grammar") else None,
    )


def grammar_fields(x: Grammar) -> dict[str, Any]:
    return {
        "kind": _GRAMMAR_KIND_NUMBERS[x.kind],
        "text": x.text,
        "after_token_ids": x.after_token_ids,
    }


def grammar_to_pb(x: Grammar) -> pb.Grammar:
    return pb.Grammar(**grammar_fields(x))


def grammar_from_pb(x: pb.Grammar) -> Grammar:
    return Grammar(
        kind=enum_member(_GRAMMAR_KIND_MEMBERS, x.kind),
        text=x.text,
        after_token_ids=tuple(x.after_token_ids[:]),
    )


def peer_ref_fields(x: PeerRef) -> dict[str, Any]:
    return {
        "worker_id": x.worker_id,
        "address": x.address,
    }


def peer_ref_to_pb(x: PeerRef) -> pb.PeerRef:
    return pb.PeerRef(**peer_ref_fields(x))


def peer_ref_from_pb(x: pb.PeerRef) -> PeerRef:
    return PeerRef(
        worker_id=x.worker_id,
        address=x.address,
    )


def adapter_ref_fields(x: AdapterRef) -> dict[str, Any]:
    return {
        "name": x.name,
        "path": x.path,
        "digest": x.digest,
    }


def adapter_ref_to_pb(x: AdapterRef) -> pb.AdapterRef:
    return pb.AdapterRef(**adapter_ref_fields(x))


def adapter_ref_from_pb(x: pb.AdapterRef) -> AdapterRef:
    return AdapterRef(
        name=x.name,
        path=x.path,
        digest=x.digest,
    )


def cancel_sequence_fields(x: CancelSequence) -> dict[str, Any]:
    return {
        "seq_id": x.seq_id,
        "epoch": x.epoch,
    }


def cancel_sequence_to_pb(x: CancelSequence) -> pb.CancelSequence:
    return pb.CancelSequence(**cancel_sequence_fields(x))


def cancel_sequence_from_pb(x: pb.CancelSequence) -> CancelSequence:
    return CancelSequence(
        seq_id=x.seq_id,
        epoch=x.epoch,
    )


def resync_blocks_fields(x: ResyncBlocks) -> dict[str, Any]:
    return {}


def resync_blocks_to_pb(x: ResyncBlocks) -> pb.ResyncBlocks:
    return pb.ResyncBlocks(**resync_blocks_fields(x))


def resync_blocks_from_pb(x: pb.ResyncBlocks) -> ResyncBlocks:
    return ResyncBlocks()


def worker_envelope_fields(x: WorkerHello | StepOutput | SequenceJoined | SequenceRefused | SequenceFailed | BlockEvents | LoadReport | SessionEnds) -> dict[str, Any]:
    match x:
        case WorkerHello():
            return {"worker_hello": worker_hello_fields(x)}
        case StepOutput():
            return {"step_columns": step_columns_fields(pack(x))}
        case SequenceJoined():
            return {"sequence_joined": sequence_joined_fields(x)}
        case SequenceRefused():
            return {"sequence_refused": sequence_refused_fields(x)}
        case SequenceFailed():
            return {"sequence_failed": sequence_failed_fields(x)}
        case BlockEvents():
            return {"block_events": block_events_fields(x)}
        case LoadReport():
            return {"load_report": load_report_fields(x)}
        case SessionEnds():
            return {"session_ends": session_ends_fields(x)}
        case _:
            assert_never(x)


def worker_envelope_to_pb(x: WorkerHello | StepOutput | SequenceJoined | SequenceRefused | SequenceFailed | BlockEvents | LoadReport | SessionEnds) -> pb.WorkerEnvelope:
    return pb.WorkerEnvelope(**worker_envelope_fields(x))


def worker_envelope_from_pb(x: pb.WorkerEnvelope) -> WorkerHello | StepOutput | SequenceJoined | SequenceRefused | SequenceFailed | BlockEvents | LoadReport | SessionEnds:
    match x.WhichOneof("message"):
        case "worker_hello":
            return worker_hello_from_pb(x.worker_hello)
        case "step_columns":
            return unpack(step_columns_from_pb(x.step_columns))
        case "sequence_joined":
            return sequence_joined_from_pb(x.sequence_joined)
        case "sequence_refused":
            return sequence_refused_from_pb(x.sequence_refused)
        case "sequence_failed":
            return sequence_failed_from_pb(x.sequence_failed)
        case "block_events":
            return block_events_from_pb(x.block_events)
        case "load_report":
            return load_report_from_pb(x.load_report)
        case "session_ends":
            return session_ends_from_pb(x.session_ends)
        case other:
            raise WireError(f"WorkerEnvelope: message {other!r} is not allowed here")


def worker_hello_fields(x: WorkerHello) -> dict[str, Any]:
    return {
        "worker_id": x.worker_id,
        "role": _ROLE_NUMBERS[x.role],
        "fingerprint": x.fingerprint,
        "model": x.model,
        "block_tokens": x.block_tokens,
        "block_count": x.block_count,
        "max_model_tokens": x.max_model_tokens,
        "wire_version": x.wire_version,
        "costs": None if x.costs is None else step_costs_fields(x.costs),
        "block_bytes": x.block_bytes,
        "step_tokens_max": x.step_tokens_max,
        "batch_sequences_max": x.batch_sequences_max,
        "tpot_slo_s": x.tpot_slo_s,
        "chunk_tokens_min": x.chunk_tokens_min,
        "host": x.host,
    }


def worker_hello_to_pb(x: WorkerHello) -> pb.WorkerHello:
    return pb.WorkerHello(**worker_hello_fields(x))


def worker_hello_from_pb(x: pb.WorkerHello) -> WorkerHello:
    return WorkerHello(
        worker_id=x.worker_id,
        role=enum_member(_ROLE_MEMBERS, x.role),
        fingerprint=x.fingerprint,
        model=x.model,
        block_tokens=x.block_tokens,
        block_count=x.block_count,
        max_model_tokens=x.max_model_tokens,
        wire_version=x.wire_version,
        costs=step_costs_from_pb(x.costs) if x.HasField("costs") else None,
        block_bytes=x.block_bytes,
        step_tokens_max=x.step_tokens_max,
        batch_sequences_max=x.batch_sequences_max,
        tpot_slo_s=x.tpot_slo_s,
        chunk_tokens_min=x.chunk_tokens_min,
        host=x.host,
    )


def step_costs_fields(x: StepCosts) -> dict[str, Any]:
    return {
        "base_s": x.base_s,
        "prompt_token_s": x.prompt_token_s,
        "decode_s": x.decode_s,
        "context_token_s": x.context_token_s,
        "pair_s": x.pair_s,
        "stages": x.stages,
        "floor_s": x.floor_s,
        "few_decode_s": x.few_decode_s,
    }


def step_costs_to_pb(x: StepCosts) -> pb.StepCosts:
    return pb.StepCosts(**step_costs_fields(x))


def step_costs_from_pb(x: pb.StepCosts) -> StepCosts:
    return StepCosts(
        base_s=x.base_s,
        prompt_token_s=x.prompt_token_s,
        decode_s=x.decode_s,
        context_token_s=x.context_token_s,
        pair_s=x.pair_s,
        stages=x.stages,
        floor_s=x.floor_s,
        few_decode_s=x.few_decode_s,
    )


def step_columns_fields(x: StepColumns) -> dict[str, Any]:
    return {
        "outputs": [sequence_output_fields(v) for v in x.outputs],
        "plain": plain_outputs_fields(x.plain),
    }


def step_columns_to_pb(x: StepColumns) -> pb.StepColumns:
    return pb.StepColumns(**step_columns_fields(x))


def step_columns_from_pb(x: pb.StepColumns) -> StepColumns:
    return StepColumns(
        outputs=tuple([sequence_output_from_pb(v) for v in x.outputs[:]]),
        plain=plain_outputs_from_pb(x.plain),
    )


def sequence_output_fields(x: SequenceOutput) -> dict[str, Any]:
    return {
        "seq_id": x.seq_id,
        "epoch": x.epoch,
        "first_index": x.first_index,
        "tokens": x.tokens,
        "finish": None if x.finish is None else _FINISH_REASON_NUMBERS[x.finish],
        "cached_token_count": x.cached_token_count,
        "logprobs": [token_logprobs_fields(v) for v in x.logprobs],
        "prompt_logprobs": None if x.prompt_logprobs is None else {"items": [token_logprobs_fields(v) for v in x.prompt_logprobs]},
        "embedding": x.embedding,
        "timings": None if x.timings is None else phase_timings_fields(x.timings),
    }


def sequence_output_to_pb(x: SequenceOutput) -> pb.SequenceOutput:
    return pb.SequenceOutput(**sequence_output_fields(x))


def sequence_output_from_pb(x: pb.SequenceOutput) -> SequenceOutput:
    return SequenceOutput(
        seq_id=x.seq_id,
        epoch=x.epoch,
        first_index=x.first_index,
        tokens=tuple(x.tokens[:]),
        finish=enum_member(_FINISH_REASON_MEMBERS, x.finish) if x.finish else None,
        cached_token_count=x.cached_token_count if x.HasField("cached_token_count") else None,
        logprobs=tuple([token_logprobs_from_pb(v) for v in x.logprobs[:]]),
        prompt_logprobs=tuple([token_logprobs_from_pb(v) for v in x.prompt_logprobs.items[:]]) if x.HasField("prompt_logprobs") else None,
        embedding=tuple(x.embedding[:]),
        timings=phase_timings_from_pb(x.timings) if x.HasField("timings") else None,
    )


def token_logprobs_fields(x: TokenLogprobs) -> dict[str, Any]:
    return {
        "token": x.token,
        "logprob": x.logprob,
        "rank": x.rank,
        "top_ids": [v for v, _ in x.top],
        "top_logprobs": [v for _, v in x.top],
    }


def token_logprobs_to_pb(x: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(**token_logprobs_fields(x))


def token_logprobs_from_pb(x: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token=x.token,
        logprob=x.logprob,
        rank=x.rank,
        top=pairs("TokenLogprobs.top", x.top_ids[:], x.top_logprobs[:]),
    )


def phase_timings_fields(x: PhaseTimings) -> dict[str, Any]:
    return {
        "wait_s": x.wait_s,
        "load_s": x.load_s,
        "compute_s": x.compute_s,
    }


def phase_timings_to_pb(x: PhaseTimings) -> pb.PhaseTimings:
    return pb.PhaseTimings(**phase_timings_fields(x))


def phase_timings_from_pb(x: pb.PhaseTimings) -> PhaseTimings:
    return PhaseTimings(
        wait_s=x.wait_s,
        load_s=x.load_s,
        compute_s=x.compute_s,
    )


def plain_outputs_fields(x: PlainOutputs) -> dict[str, Any]:
    return {
        "seq_ids": x.seq_ids,
        "epochs": x.epochs,
        "first_indices": x.first_indices,
        "token_counts": x.token_counts,
        "tokens": x.tokens,
    }


def plain_outputs_to_pb(x: PlainOutputs) -> pb.PlainOutputs:
    return pb.PlainOutputs(**plain_outputs_fields(x))


def plain_outputs_from_pb(x: pb.PlainOutputs) -> PlainOutputs:
    if not len(x.seq_ids) == len(x.epochs) == len(x.first_indices) == len(x.token_counts):
        raise WireError("PlainOutputs: seq_ids, epochs, first_indices, token_counts do not have the same length")
    return PlainOutputs(
        seq_ids=tuple(x.seq_ids[:]),
        epochs=tuple(x.epochs[:]),
        first_indices=tuple(x.first_indices[:]),
        token_counts=tuple(x.token_counts[:]),
        tokens=tuple(x.tokens[:]),
    )


def sequence_joined_fields(x: SequenceJoined) -> dict[str, Any]:
    return {
        "seq_id": x.seq_id,
        "epoch": x.epoch,
        "transferred_bytes": x.transferred_bytes,
        "transfer_s": x.transfer_s,
        "handover_s": x.handover_s,
    }


def sequence_joined_to_pb(x: SequenceJoined) -> pb.SequenceJoined:
    return pb.SequenceJoined(**sequence_joined_fields(x))


def sequence_joined_from_pb(x: pb.SequenceJoined) -> SequenceJoined:
    return SequenceJoined(
        seq_id=x.seq_id,
        epoch=x.epoch,
        transferred_bytes=x.transferred_bytes,
        transfer_s=x.transfer_s,
        handover_s=x.handover_s,
    )


def sequence_refused_fields(x: SequenceRefused) -> dict[str, Any]:
    return {
        "seq_id": x.seq_id,
        "epoch": x.epoch,
        "reason": _REFUSAL_REASON_NUMBERS[x.reason],
        "message": x.message,
    }


def sequence_refused_to_pb(x: SequenceRefused) -> pb.SequenceRefused:
    return pb.SequenceRefused(**sequence_refused_fields(x))


def sequence_refused_from_pb(x: pb.SequenceRefused) -> SequenceRefused:
    return SequenceRefused(
        seq_id=x.seq_id,
        epoch=x.epoch,
        reason=enum_member(_REFUSAL_REASON_MEMBERS, x.reason),
        message=x.message,
    )


def sequence_failed_fields(x: SequenceFailed) -> dict[str, Any]:
    return {
        "seq_id": x.seq_id,
        "epoch": x.epoch,
        "reason": _FAILURE_REASON_NUMBERS[x.reason],
        "message": x.message,
    }


def sequence_failed_to_pb(x: SequenceFailed) -> pb.SequenceFailed:
    return pb.SequenceFailed(**sequence_failed_fields(x))


def sequence_failed_from_pb(x: pb.SequenceFailed) -> SequenceFailed:
    return SequenceFailed(
        seq_id=x.seq_id,
        epoch=x.epoch,
        reason=enum_member(_FAILURE_REASON_MEMBERS, x.reason),
        message=x.message,
    )


def block_events_fields(x: BlockEvents) -> dict[str, Any]:
    return {
        "sequence_number": x.sequence_number,
        "stored": b"".join(x.stored),
        "removed": b"".join(x.removed),
        "is_snapshot": x.is_snapshot,
    }


def block_events_to_pb(x: BlockEvents) -> pb.BlockEvents:
    return pb.BlockEvents(**block_events_fields(x))


def block_events_from_pb(x: pb.BlockEvents) -> BlockEvents:
    return BlockEvents(
        sequence_number=x.sequence_number,
        stored=block_hashes(x.stored),
        removed=block_hashes(x.removed),
        is_snapshot=x.is_snapshot,
    )


def load_report_fields(x: LoadReport) -> dict[str, Any]:
    return {
        "role": _ROLE_NUMBERS[x.role],
        "is_draining": x.is_draining,
        "free_blocks": x.free_blocks,
        "running_count": x.running_count,
        "waiting_count": x.waiting_count,
        "waiting_tokens": x.waiting_tokens,
        "step_s": x.step_s,
        "costs": None if x.costs is None else step_costs_fields(x.costs),
        "decoding_count": x.decoding_count,
        "context_tokens": x.context_tokens,
        "tokens_per_step": x.tokens_per_step,
        "incoming_count": x.incoming_count,
        "is_parked": x.is_parked,
    }


def load_report_to_pb(x: LoadReport) -> pb.LoadReport:
    return pb.LoadReport(**load_report_fields(x))


def load_report_from_pb(x: pb.LoadReport) -> LoadReport:
    return LoadReport(
        role=enum_member(_ROLE_MEMBERS, x.role),
        is_draining=x.is_draining,
        free_blocks=x.free_blocks,
        running_count=x.running_count,
        waiting_count=x.waiting_count,
        waiting_tokens=x.waiting_tokens,
        step_s=x.step_s,
        costs=step_costs_from_pb(x.costs) if x.HasField("costs") else None,
        decoding_count=x.decoding_count,
        context_tokens=x.context_tokens,
        tokens_per_step=x.tokens_per_step,
        incoming_count=x.incoming_count,
        is_parked=x.is_parked,
    )


def session_ends_fields(x: SessionEnds) -> dict[str, Any]:
    return {}


def session_ends_to_pb(x: SessionEnds) -> pb.SessionEnds:
    return pb.SessionEnds(**session_ends_fields(x))


def session_ends_from_pb(x: pb.SessionEnds) -> SessionEnds:
    return SessionEnds()


def empty_fields(x: Empty) -> dict[str, Any]:
    return {}


def empty_to_pb(x: Empty) -> pb.Empty:
    return pb.Empty(**empty_fields(x))


def empty_from_pb(x: pb.Empty) -> Empty:
    return Empty()


def role_request_fields(x: RoleRequest) -> dict[str, Any]:
    return {
        "role": _ROLE_NUMBERS[x.role],
        "drain_s": x.drain_s,
    }


def role_request_to_pb(x: RoleRequest) -> pb.RoleRequest:
    return pb.RoleRequest(**role_request_fields(x))


def role_request_from_pb(x: pb.RoleRequest) -> RoleRequest:
    return RoleRequest(
        role=enum_member(_ROLE_MEMBERS, x.role),
        drain_s=x.drain_s,
    )


def worker_status_reply_fields(x: WorkerStatusReply) -> dict[str, Any]:
    return {
        "worker_id": x.worker_id,
        "role": _ROLE_NUMBERS[x.role],
        "is_draining": x.is_draining,
        "fingerprint": x.fingerprint,
        "accounts": x.accounts,
        "notes": x.notes,
    }


def worker_status_reply_to_pb(x: WorkerStatusReply) -> pb.WorkerStatusReply:
    return pb.WorkerStatusReply(**worker_status_reply_fields(x))


def worker_status_reply_from_pb(x: pb.WorkerStatusReply) -> WorkerStatusReply:
    return WorkerStatusReply(
        worker_id=x.worker_id,
        role=enum_member(_ROLE_MEMBERS, x.role),
        is_draining=x.is_draining,
        fingerprint=x.fingerprint,
        accounts=dict(x.accounts),
        notes=tuple(x.notes[:]),
    )


def reader_envelope_fields(x: PeerHello | KVRequest | KVReleased) -> dict[str, Any]:
    match x:
        case PeerHello():
            return {"peer_hello": peer_hello_fields(x)}
        case KVRequest():
            return {"kv_request": kv_request_fields(x)}
        case KVReleased():
            return {"kv_released": kv_released_fields(x)}
        case _:
            assert_never(x)


def reader_envelope_to_pb(x: PeerHello | KVRequest | KVReleased) -> pb.ReaderEnvelope:
    return pb.ReaderEnvelope(**reader_envelope_fields(x))


def reader_envelope_from_pb(x: pb.ReaderEnvelope) -> KVRequest | KVReleased:
    match x.WhichOneof("message"):
        case "kv_request":
            return kv_request_from_pb(x.kv_request)
        case "kv_released":
            return kv_released_from_pb(x.kv_released)
        case other:
            raise WireError(f"ReaderEnvelope: message {other!r} is not allowed here")


def peer_hello_fields(x: PeerHello) -> dict[str, Any]:
    return {
        "worker_id": x.worker_id,
        "fingerprint": x.fingerprint,
        "parts": [kv_part_fields(v) for v in x.parts],
        "wire_version": x.wire_version,
    }


def peer_hello_to_pb(x: PeerHello) -> pb.PeerHello:
    return pb.PeerHello(**peer_hello_fields(x))


def peer_hello_from_pb(x: pb.PeerHello) -> PeerHello:
    return PeerHello(
        worker_id=x.worker_id,
        fingerprint=x.fingerprint,
        parts=tuple([kv_part_from_pb(v) for v in x.parts[:]]),
        wire_version=x.wire_version,
    )


def kv_part_fields(x: KVPart) -> dict[str, Any]:
    return {
        "first_layer": x.first_layer,
        "layer_count": x.layer_count,
        "first_head": x.first_head,
        "head_count": x.head_count,
        "transfer_offers": x.transfer_offers,
    }


def kv_part_to_pb(x: KVPart) -> pb.KVPart:
    return pb.KVPart(**kv_part_fields(x))


def kv_part_from_pb(x: pb.KVPart) -> KVPart:
    return KVPart(
        first_layer=x.first_layer,
        layer_count=x.layer_count,
        first_head=x.first_head,
        head_count=x.head_count,
        transfer_offers=dict(x.transfer_offers),
    )


def kv_request_fields(x: KVRequest) -> dict[str, Any]:
    return {
        "seq_id": x.seq_id,
        "epoch": x.epoch,
        "first_block": x.first_block,
        "request_number": x.request_number,
    }


def kv_request_to_pb(x: KVRequest) -> pb.KVRequest:
    return pb.KVRequest(**kv_request_fields(x))


def kv_request_from_pb(x: pb.KVRequest) -> KVRequest:
    return KVRequest(
        seq_id=x.seq_id,
        epoch=x.epoch,
        first_block=x.first_block,
        request_number=x.request_number,
    )


def kv_released_fields(x: KVReleased) -> dict[str, Any]:
    return {
        "seq_id": x.seq_id,
        "epoch": x.epoch,
        "taken": x.taken,
    }


def kv_released_to_pb(x: KVReleased) -> pb.KVReleased:
    return pb.KVReleased(**kv_released_fields(x))


def kv_released_from_pb(x: pb.KVReleased) -> KVReleased:
    return KVReleased(
        seq_id=x.seq_id,
        epoch=x.epoch,
        taken=x.taken,
    )


def owner_envelope_fields(x: PeerHello | KVGrant | KVRefused) -> dict[str, Any]:
    match x:
        case PeerHello():
            return {"peer_hello": peer_hello_fields(x)}
        case KVGrant():
            return {"kv_grant": kv_grant_fields(x)}
        case KVRefused():
            return {"kv_refused": kv_refused_fields(x)}
        case _:
            assert_never(x)


def owner_envelope_to_pb(x: PeerHello | KVGrant | KVRefused) -> pb.OwnerEnvelope:
    return pb.OwnerEnvelope(**owner_envelope_fields(x))


def owner_envelope_from_pb(x: pb.OwnerEnvelope) -> KVGrant | KVRefused:
    match x.WhichOneof("message"):
        case "kv_grant":
            return kv_grant_from_pb(x.kv_grant)
        case "kv_refused":
            return kv_refused_from_pb(x.kv_refused)
        case other:
            raise WireError(f"OwnerEnvelope: message {other!r} is not allowed here")


def kv_grant_fields(x: KVGrant) -> dict[str, Any]:
    return {
        "seq_id": x.seq_id,
        "epoch": x.epoch,
        "first_block": x.first_block,
        "source_blocks": x.source_blocks,
        "generations": x.generations,
        "lease_s": x.lease_s,
        "answers_request": x.answers_request,
        "is_last": x.is_last,
        "first_token": x.first_token,
        "cached_token_count": x.cached_token_count,
        "first_logprobs": None if x.first_logprobs is None else token_logprobs_fields(x.first_logprobs),
        "prompt_logprobs": None if x.prompt_logprobs is None else {"items": [token_logprobs_fields(v) for v in x.prompt_logprobs]},
        "checksums": x.checksums,
    }


def kv_grant_to_pb(x: KVGrant) -> pb.KVGrant:
    return pb.KVGrant(**kv_grant_fields(x))


def kv_grant_from_pb(x: pb.KVGrant) -> KVGrant:
    if not len(x.source_blocks) == len(x.generations):
        raise WireError("KVGrant: source_blocks, generations do not have the same length")
    return KVGrant(
        seq_id=x.seq_id,
        epoch=x.epoch,
        first_block=x.first_block,
        source_blocks=tuple(x.source_blocks[:]),
        generations=tuple(x.generations[:]),
        lease_s=x.lease_s,
        answers_request=x.answers_request,
        is_last=x.is_last,
        first_token=x.first_token if x.HasField("first_token") else None,
        cached_token_count=x.cached_token_count,
        first_logprobs=token_logprobs_from_pb(x.first_logprobs) if x.HasField("first_logprobs") else None,
        prompt_logprobs=tuple([token_logprobs_from_pb(v) for v in x.prompt_logprobs.items[:]]) if x.HasField("prompt_logprobs") else None,
        checksums=tuple(x.checksums[:]),
    )


def kv_refused_fields(x: KVRefused) -> dict[str, Any]:
    return {
        "seq_id": x.seq_id,
        "epoch": x.epoch,
        "message": x.message,
    }


def kv_refused_to_pb(x: KVRefused) -> pb.KVRefused:
    return pb.KVRefused(**kv_refused_fields(x))


def kv_refused_from_pb(x: pb.KVRefused) -> KVRefused:
    return KVRefused(
        seq_id=x.seq_id,
        epoch=x.epoch,
        message=x.message,
    )


def store_frame_fields(x: StoreFrame) -> dict[str, Any]:
    return {
        "payload": x.payload,
    }


def store_frame_to_pb(x: StoreFrame) -> pb.StoreFrame:
    return pb.StoreFrame(**store_frame_fields(x))


def store_frame_from_pb(x: pb.StoreFrame) -> StoreFrame:
    return StoreFrame(
        payload=x.payload,
    )


def member_fields(x: Member) -> dict[str, Any]:
    return {
        "worker_id": x.worker_id,
        "role": _ROLE_NUMBERS[x.role],
        "address": x.address,
        "model": x.model,
        "fingerprint": x.fingerprint,
        "is_draining": x.is_draining,
        "metrics_address": x.metrics_address,
        "host": x.host,
        "pid": x.pid,
        "notes": x.notes,
        "node": x.node,
        "version": x.version,
        "is_suspect": x.is_suspect,
        "shape": x.shape,
    }


def member_to_pb(x: Member) -> pb.Member:
    return pb.Member(**member_fields(x))


def member_from_pb(x: pb.Member) -> Member:
    return Member(
        worker_id=x.worker_id,
        role=enum_member(_ROLE_MEMBERS, x.role),
        address=x.address,
        model=x.model,
        fingerprint=x.fingerprint,
        is_draining=x.is_draining,
        metrics_address=x.metrics_address,
        host=x.host,
        pid=x.pid,
        notes=tuple(x.notes[:]),
        node=x.node,
        version=x.version,
        is_suspect=x.is_suspect,
        shape=x.shape,
    )


def worker_leaves_fields(x: WorkerLeaves) -> dict[str, Any]:
    return {
        "worker_id": x.worker_id,
    }


def worker_leaves_to_pb(x: WorkerLeaves) -> pb.WorkerLeaves:
    return pb.WorkerLeaves(**worker_leaves_fields(x))


def worker_leaves_from_pb(x: pb.WorkerLeaves) -> WorkerLeaves:
    return WorkerLeaves(
        worker_id=x.worker_id,
    )


def router_member_fields(x: RouterMember) -> dict[str, Any]:
    return {
        "router_id": x.router_id,
        "address": x.address,
        "metrics_address": x.metrics_address,
        "host": x.host,
        "pid": x.pid,
    }


def router_member_to_pb(x: RouterMember) -> pb.RouterMember:
    return pb.RouterMember(**router_member_fields(x))


def router_member_from_pb(x: pb.RouterMember) -> RouterMember:
    return RouterMember(
        router_id=x.router_id,
        address=x.address,
        metrics_address=x.metrics_address,
        host=x.host,
        pid=x.pid,
    )


def membership_view_fields(x: MembershipView) -> dict[str, Any]:
    return {
        "directory_life": x.directory_life,
        "version": x.version,
        "members": [member_fields(v) for v in x.members],
        "routers": [router_member_fields(v) for v in x.routers],
    }


def membership_view_to_pb(x: MembershipView) -> pb.MembershipView:
    return pb.MembershipView(**membership_view_fields(x))


def membership_view_from_pb(x: pb.MembershipView) -> MembershipView:
    return MembershipView(
        directory_life=x.directory_life,
        version=x.version,
        members=tuple([member_from_pb(v) for v in x.members[:]]),
        routers=tuple([router_member_from_pb(v) for v in x.routers[:]]),
    )


def follow_request_fields(x: FollowRequest) -> dict[str, Any]:
    return {
        "router_id": x.router_id,
        "wire_version": x.wire_version,
    }


def follow_request_to_pb(x: FollowRequest) -> pb.FollowRequest:
    return pb.FollowRequest(**follow_request_fields(x))


def follow_request_from_pb(x: pb.FollowRequest) -> FollowRequest:
    return FollowRequest(
        router_id=x.router_id,
        wire_version=x.wire_version,
    )


def router_update_fields(x: RouterUpdate) -> dict[str, Any]:
    return {
        "router_id": x.router_id,
        "is_snapshot": x.is_snapshot,
        "loads": [unreported_load_fields(v) for v in x.loads],
        "expected": [expected_blocks_fields(v) for v in x.expected],
    }


def router_update_to_pb(x: RouterUpdate) -> pb.RouterUpdate:
    return pb.RouterUpdate(**router_update_fields(x))


def router_update_from_pb(x: pb.RouterUpdate) -> RouterUpdate:
    return RouterUpdate(
        router_id=x.router_id,
        is_snapshot=x.is_snapshot,
        loads=tuple([unreported_load_from_pb(v) for v in x.loads[:]]),
        expected=tuple([expected_blocks_from_pb(v) for v in x.expected[:]]),
    )


def unreported_load_fields(x: UnreportedLoad) -> dict[str, Any]:
    return {
        "worker_id": x.worker_id,
        "sequences": x.sequences,
        "tokens": x.tokens,
        "blocks": x.blocks,
    }


def unreported_load_to_pb(x: UnreportedLoad) -> pb.UnreportedLoad:
    return pb.UnreportedLoad(**unreported_load_fields(x))


def unreported_load_from_pb(x: pb.UnreportedLoad) -> UnreportedLoad:
    return UnreportedLoad(
        worker_id=x.worker_id,
        sequences=x.sequences,
        tokens=x.tokens,
        blocks=x.blocks,
    )


def expected_blocks_fields(x: ExpectedBlocks) -> dict[str, Any]:
    return {
        "worker_id": x.worker_id,
        "hashes": b"".join(x.hashes),
    }


def expected_blocks_to_pb(x: ExpectedBlocks) -> pb.ExpectedBlocks:
    return pb.ExpectedBlocks(**expected_blocks_fields(x))


def expected_blocks_from_pb(x: pb.ExpectedBlocks) -> ExpectedBlocks:
    return ExpectedBlocks(
        worker_id=x.worker_id,
        hashes=block_hashes(x.hashes),
    )


def recent_requests_query_fields(x: RecentRequestsQuery) -> dict[str, Any]:
    return {
        "request_id": x.request_id,
        "limit": x.limit,
    }


def recent_requests_query_to_pb(x: RecentRequestsQuery) -> pb.RecentRequestsQuery:
    return pb.RecentRequestsQuery(**recent_requests_query_fields(x))


def recent_requests_query_from_pb(x: pb.RecentRequestsQuery) -> RecentRequestsQuery:
    return RecentRequestsQuery(
        request_id=x.request_id,
        limit=x.limit,
    )


def recent_requests_reply_fields(x: RecentRequestsReply) -> dict[str, Any]:
    return {
        "router_id": x.router_id,
        "recent_requests": [recent_request_fields(v) for v in x.recent_requests],
    }


def recent_requests_reply_to_pb(x: RecentRequestsReply) -> pb.RecentRequestsReply:
    return pb.RecentRequestsReply(**recent_requests_reply_fields(x))


def recent_requests_reply_from_pb(x: pb.RecentRequestsReply) -> RecentRequestsReply:
    return RecentRequestsReply(
        router_id=x.router_id,
        recent_requests=tuple([recent_request_from_pb(v) for v in x.recent_requests[:]]),
    )


def recent_request_fields(x: RecentRequest) -> dict[str, Any]:
    return {
        "request_id": x.request_id,
        "arrived_s": x.arrived_s,
        "took_s": x.took_s,
        "outcome": x.outcome,
        "verdict": x.verdict,
        "error": x.error,
        "model": x.model,
        "slo_class": x.slo_class,
        "tenant": x.tenant,
        "ttft_slo_s": x.ttft_slo_s,
        "tpot_slo_s": x.tpot_slo_s,
        "prompt_tokens": x.prompt_tokens,
        "cached_tokens": x.cached_tokens,
        "completion_tokens": x.completion_tokens,
        "ttft_s": x.ttft_s,
        "tpot_s": x.tpot_s,
        "parts": x.parts,
        "prefill_worker": x.prefill_worker,
        "decode_worker": x.decode_worker,
        "predicted_ttft_s": x.predicted_ttft_s,
        "predicted_tpot_s": x.predicted_tpot_s,
        "attempts": x.attempts,
        "moments": [moment_fields(v) for v in x.moments],
        "client_request_id": x.client_request_id,
    }


def recent_request_to_pb(x: RecentRequest) -> pb.RecentRequest:
    return pb.RecentRequest(**recent_request_fields(x))


def recent_request_from_pb(x: pb.RecentRequest) -> RecentRequest:
    return RecentRequest(
        request_id=x.request_id,
        arrived_s=x.arrived_s,
        took_s=x.took_s,
        outcome=x.outcome,
        verdict=x.verdict,
        error=x.error,
        model=x.model,
        slo_class=x.slo_class,
        tenant=x.tenant,
        ttft_slo_s=x.ttft_slo_s,
        tpot_slo_s=x.tpot_slo_s,
        prompt_tokens=x.prompt_tokens,
        cached_tokens=x.cached_tokens,
        completion_tokens=x.completion_tokens,
        ttft_s=x.ttft_s if x.HasField("ttft_s") else None,
        tpot_s=x.tpot_s if x.HasField("tpot_s") else None,
        parts=dict(x.parts),
        prefill_worker=x.prefill_worker,
        decode_worker=x.decode_worker,
        predicted_ttft_s=x.predicted_ttft_s if x.HasField("predicted_ttft_s") else None,
        predicted_tpot_s=x.predicted_tpot_s if x.HasField("predicted_tpot_s") else None,
        attempts=x.attempts,
        moments=tuple([moment_from_pb(v) for v in x.moments[:]]),
        client_request_id=x.client_request_id,
    )


def moment_fields(x: Moment) -> dict[str, Any]:
    return {
        "after_s": x.after_s,
        "what": x.what,
        "reason": x.reason,
        "sequence": x.sequence,
        "workers": x.workers,
        "seconds": x.seconds,
        "bytes": x.bytes,
    }


def moment_to_pb(x: Moment) -> pb.Moment:
    return pb.Moment(**moment_fields(x))


def moment_from_pb(x: pb.Moment) -> Moment:
    return Moment(
        after_s=x.after_s,
        what=x.what,
        reason=x.reason,
        sequence=x.sequence,
        workers=tuple(x.workers[:]),
        seconds=x.seconds,
        bytes=x.bytes,
    )


def renew_store_request_fields(x: RenewStoreRequest) -> dict[str, Any]:
    return {
        "member": store_member_fields(x.member),
        "lease_s": x.lease_s,
    }


def renew_store_request_to_pb(x: RenewStoreRequest) -> pb.RenewStoreRequest:
    return pb.RenewStoreRequest(**renew_store_request_fields(x))


def renew_store_request_from_pb(x: pb.RenewStoreRequest) -> RenewStoreRequest:
    return RenewStoreRequest(
        member=store_member_from_pb(x.member),
        lease_s=x.lease_s,
    )


def store_member_fields(x: StoreMember) -> dict[str, Any]:
    return {
        "node": node_ref_fields(x.node),
        "host": x.host,
        "pid": x.pid,
        "is_draining": x.is_draining,
        "host_bytes": x.host_bytes,
        "ssd_bytes": x.ssd_bytes,
        "metrics_address": x.metrics_address,
        "notes": x.notes,
    }


def store_member_to_pb(x: StoreMember) -> pb.StoreMember:
    return pb.StoreMember(**store_member_fields(x))


def store_member_from_pb(x: pb.StoreMember) -> StoreMember:
    return StoreMember(
        node=node_ref_from_pb(x.node),
        host=x.host,
        pid=x.pid,
        is_draining=x.is_draining,
        host_bytes=x.host_bytes,
        ssd_bytes=x.ssd_bytes,
        metrics_address=x.metrics_address,
        notes=tuple(x.notes[:]),
    )


def node_ref_fields(x: NodeRef) -> dict[str, Any]:
    return {
        "node_id": x.node_id,
        "address": x.address,
    }


def node_ref_to_pb(x: NodeRef) -> pb.NodeRef:
    return pb.NodeRef(**node_ref_fields(x))


def node_ref_from_pb(x: pb.NodeRef) -> NodeRef:
    return NodeRef(
        node_id=x.node_id,
        address=x.address,
    )


def store_known_fields(x: StoreKnown) -> dict[str, Any]:
    return {
        "is_known": x.is_known,
    }


def store_known_to_pb(x: StoreKnown) -> pb.StoreKnown:
    return pb.StoreKnown(**store_known_fields(x))


def store_known_from_pb(x: pb.StoreKnown) -> StoreKnown:
    return StoreKnown(
        is_known=x.is_known,
    )


def store_leaves_fields(x: StoreLeaves) -> dict[str, Any]:
    return {
        "node_id": x.node_id,
    }


def store_leaves_to_pb(x: StoreLeaves) -> pb.StoreLeaves:
    return pb.StoreLeaves(**store_leaves_fields(x))


def store_leaves_from_pb(x: pb.StoreLeaves) -> StoreLeaves:
    return StoreLeaves(
        node_id=x.node_id,
    )


def store_members_fields(x: StoreMembers) -> dict[str, Any]:
    return {
        "members": [store_member_fields(v) for v in x.members],
    }


def store_members_to_pb(x: StoreMembers) -> pb.StoreMembers:
    return pb.StoreMembers(**store_members_fields(x))


def store_members_from_pb(x: pb.StoreMembers) -> StoreMembers:
    return StoreMembers(
        members=tuple([store_member_from_pb(v) for v in x.members[:]]),
    )


def store_changes_fields(x: StoreChanges) -> dict[str, Any]:
    return {
        "node_id": x.node_id,
        "sequence_number": x.sequence_number,
        "stored": b"".join([v for v, _ in x.stored]),
        "stored_tiers": [_TIER_NUMBERS[v] for _, v in x.stored],
        "removed": b"".join(x.removed),
        "is_snapshot": x.is_snapshot,
        "is_first": x.is_first,
        "is_last": x.is_last,
    }


def store_changes_to_pb(x: StoreChanges) -> pb.StoreChanges:
    return pb.StoreChanges(**store_changes_fields(x))


def store_changes_from_pb(x: pb.StoreChanges) -> StoreChanges:
    return StoreChanges(
        node_id=x.node_id,
        sequence_number=x.sequence_number,
        stored=pairs("StoreChanges.stored", block_hashes(x.stored), tuple([enum_member(_TIER_MEMBERS, v) for v in x.stored_tiers[:]])),
        removed=block_hashes(x.removed),
        is_snapshot=x.is_snapshot,
        is_first=x.is_first,
        is_last=x.is_last,
    )


def look_up_request_fields(x: LookUpRequest) -> dict[str, Any]:
    return {
        "hashes": b"".join(x.hashes),
    }


def look_up_request_to_pb(x: LookUpRequest) -> pb.LookUpRequest:
    return pb.LookUpRequest(**look_up_request_fields(x))


def look_up_request_from_pb(x: pb.LookUpRequest) -> LookUpRequest:
    return LookUpRequest(
        hashes=block_hashes(x.hashes),
    )


def look_up_reply_fields(x: LookUpReply) -> dict[str, Any]:
    return {
        "count": x.count,
        "nodes": [node_locations_fields(v) for v in x.nodes],
    }


def look_up_reply_to_pb(x: LookUpReply) -> pb.LookUpReply:
    return pb.LookUpReply(**look_up_reply_fields(x))


def look_up_reply_from_pb(x: pb.LookUpReply) -> LookUpReply:
    return LookUpReply(
        count=x.count,
        nodes=tuple([node_locations_from_pb(v) for v in x.nodes[:]]),
    )


def node_locations_fields(x: NodeLocations) -> dict[str, Any]:
    return {
        "node": node_ref_fields(x.node),
        "tiers": [(0 if v is None else _TIER_NUMBERS[v]) for v in x.tiers],
    }


def node_locations_to_pb(x: NodeLocations) -> pb.NodeLocations:
    return pb.NodeLocations(**node_locations_fields(x))


def node_locations_from_pb(x: pb.NodeLocations) -> NodeLocations:
    return NodeLocations(
        node=node_ref_from_pb(x.node),
        tiers=tuple([(enum_member(_TIER_MEMBERS, v) if v else None) for v in x.tiers[:]]),
    )


def ask_fields(x: Ask) -> dict[str, Any]:
    return {
        "tenant": x.tenant,
        "lease": x.lease,
        "lease_s": x.lease_s,
        "tokens": x.tokens,
        "requests_per_minute": x.requests_per_minute,
        "tokens_per_minute": x.tokens_per_minute,
        "concurrent_max": x.concurrent_max,
        "router_id": x.router_id,
    }


def ask_to_pb(x: Ask) -> pb.Ask:
    return pb.Ask(**ask_fields(x))


def ask_from_pb(x: pb.Ask) -> Ask:
    return Ask(
        tenant=x.tenant,
        lease=x.lease,
        lease_s=x.lease_s,
        tokens=x.tokens,
        requests_per_minute=x.requests_per_minute,
        tokens_per_minute=x.tokens_per_minute,
        concurrent_max=x.concurrent_max,
        router_id=x.router_id,
    )


def grant_fields(x: Grant) -> dict[str, Any]:
    return {
        "scarce": None if x.scarce is None else _SCARCE_NUMBERS[x.scarce],
        "retry_after_s": x.retry_after_s,
        "requests_left_s": x.requests_left_s,
        "tokens_left_s": x.tokens_left_s,
        "router_count": x.router_count,
    }


def grant_to_pb(x: Grant) -> pb.Grant:
    return pb.Grant(**grant_fields(x))


def grant_from_pb(x: pb.Grant) -> Grant:
    return Grant(
        scarce=enum_member(_SCARCE_MEMBERS, x.scarce) if x.scarce else None,
        retry_after_s=x.retry_after_s,
        requests_left_s=x.requests_left_s,
        tokens_left_s=x.tokens_left_s,
        router_count=x.router_count,
    )


def settle_fields(x: Settle) -> dict[str, Any]:
    return {
        "tenant": x.tenant,
        "lease": x.lease,
        "refund_tokens": x.refund_tokens,
        "tokens_per_minute": x.tokens_per_minute,
    }


def settle_to_pb(x: Settle) -> pb.Settle:
    return pb.Settle(**settle_fields(x))


def settle_from_pb(x: pb.Settle) -> Settle:
    return Settle(
        tenant=x.tenant,
        lease=x.lease,
        refund_tokens=x.refund_tokens,
        tokens_per_minute=x.tokens_per_minute,
    )


def demand_report_fields(x: DemandReport) -> dict[str, Any]:
    return {
        "router_id": x.router_id,
        "up_s": x.up_s,
        "classes": {k: pb.ClassLoad(**class_load_fields(v)) for k, v in x.classes.items()},
        "queued": x.queued,
        "queued_prompt_tokens": x.queued_prompt_tokens,
        "workers": [worker_load_fields(v) for v in x.workers],
        "model": x.model,
    }


def demand_report_to_pb(x: DemandReport) -> pb.DemandReport:
    return pb.DemandReport(**demand_report_fields(x))


def demand_report_from_pb(x: pb.DemandReport) -> DemandReport:
    return DemandReport(
        router_id=x.router_id,
        up_s=x.up_s,
        classes={k: class_load_from_pb(v) for k, v in x.classes.items()},
        queued=x.queued,
        queued_prompt_tokens=x.queued_prompt_tokens,
        workers=tuple([worker_load_from_pb(v) for v in x.workers[:]]),
        model=x.model,
    )


def class_load_fields(x: ClassLoad) -> dict[str, Any]:
    return {
        "arrived": {k: pb.Bin(**bin_fields(v)) for k, v in x.arrived.items()},
        "started": x.started,
        "started_prompt_tokens": x.started_prompt_tokens,
        "cached_tokens": x.cached_tokens,
        "ttft_missed": x.ttft_missed,
        "ended": x.ended,
        "output_tokens": x.output_tokens,
        "context_tokens": x.context_tokens,
        "tpot_missed": x.tpot_missed,
    }


def class_load_to_pb(x: ClassLoad) -> pb.ClassLoad:
    return pb.ClassLoad(**class_load_fields(x))


def class_load_from_pb(x: pb.ClassLoad) -> ClassLoad:
    return ClassLoad(
        arrived={k: bin_from_pb(v) for k, v in x.arrived.items()},
        started=x.started,
        started_prompt_tokens=x.started_prompt_tokens,
        cached_tokens=x.cached_tokens,
        ttft_missed=x.ttft_missed,
        ended=x.ended,
        output_tokens=x.output_tokens,
        context_tokens=x.context_tokens,
        tpot_missed=x.tpot_missed,
    )


def bin_fields(x: Bin) -> dict[str, Any]:
    return {
        "requests": x.requests,
        "prompt_tokens": x.prompt_tokens,
        "further_prompts": x.further_prompts,
    }


def bin_to_pb(x: Bin) -> pb.Bin:
    return pb.Bin(**bin_fields(x))


def bin_from_pb(x: pb.Bin) -> Bin:
    return Bin(
        requests=x.requests,
        prompt_tokens=x.prompt_tokens,
        further_prompts=x.further_prompts,
    )


def worker_load_fields(x: WorkerLoad) -> dict[str, Any]:
    return {
        "worker_id": x.worker_id,
        "role": _ROLE_NUMBERS[x.role],
        "age_s": x.age_s,
        "waiting_tokens": x.waiting_tokens,
        "decoding": x.decoding,
        "context_tokens": x.context_tokens,
        "held_share": x.held_share,
        "traits": None if x.traits is None else traits_fields(x.traits),
    }


def worker_load_to_pb(x: WorkerLoad) -> pb.WorkerLoad:
    return pb.WorkerLoad(**worker_load_fields(x))


def worker_load_from_pb(x: pb.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        worker_id=x.worker_id,
        role=enum_member(_ROLE_MEMBERS, x.role),
        age_s=x.age_s,
        waiting_tokens=x.waiting_tokens,
        decoding=x.decoding,
        context_tokens=x.context_tokens,
        held_share=x.held_share,
        traits=traits_from_pb(x.traits) if x.HasField("traits") else None,
    )


def traits_fields(x: Traits) -> dict[str, Any]:
    return {
        "costs": step_costs_fields(x.costs),
        "chunk_tokens": x.chunk_tokens,
        "batch_max": x.batch_max,
        "pool_tokens": x.pool_tokens,
    }


def traits_to_pb(x: Traits) -> pb.Traits:
    return pb.Traits(**traits_fields(x))


def traits_from_pb(x: pb.Traits) -> Traits:
    return Traits(
        costs=step_costs_from_pb(x.costs),
        chunk_tokens=x.chunk_tokens,
        batch_max=x.batch_max,
        pool_tokens=x.pool_tokens,
    )


def demand_reply_fields(x: DemandReply) -> dict[str, Any]:
    return {
        "every_s": x.every_s,
    }


def demand_reply_to_pb(x: DemandReply) -> pb.DemandReply:
    return pb.DemandReply(**demand_reply_fields(x))


def demand_reply_from_pb(x: pb.DemandReply) -> DemandReply:
    return DemandReply(
        every_s=x.every_s,
    )


def expert_rank_envelope_fields(x: ExpertRankHello | ExpertLoaded | ExpertLoadFailed | ExpertRankBeat) -> dict[str, Any]:
    match x:
        case ExpertRankHello():
            return {"expert_rank_hello": expert_rank_hello_fields(x)}
        case ExpertLoaded():
            return {"expert_loaded": expert_loaded_fields(x)}
        case ExpertLoadFailed():
            return {"expert_load_failed": expert_load_failed_fields(x)}
        case ExpertRankBeat():
            return {"expert_rank_beat": expert_rank_beat_fields(x)}
        case _:
            assert_never(x)


def expert_rank_envelope_to_pb(x: ExpertRankHello | ExpertLoaded | ExpertLoadFailed | ExpertRankBeat) -> pb.ExpertRankEnvelope:
    return pb.ExpertRankEnvelope(**expert_rank_envelope_fields(x))


def expert_rank_envelope_from_pb(x: pb.ExpertRankEnvelope) -> ExpertRankHello | ExpertLoaded | ExpertLoadFailed | ExpertRankBeat:
    match x.WhichOneof("message"):
        case "expert_rank_hello":
            return expert_rank_hello_from_pb(x.expert_rank_hello)
        case "expert_loaded":
            return expert_loaded_from_pb(x.expert_loaded)
        case "expert_load_failed":
            return expert_load_failed_from_pb(x.expert_load_failed)
        case "expert_rank_beat":
            return expert_rank_beat_from_pb(x.expert_rank_beat)
        case other:
            raise WireError(f"ExpertRankEnvelope: message {other!r} is not allowed here")


def expert_rank_hello_fields(x: ExpertRankHello) -> dict[str, Any]:
    return {
        "ref": expert_rank_ref_fields(x.ref),
        "group": x.group,
        "node": x.node,
        "pid": x.pid,
        "layer_count": x.layer_count,
        "expert_count": x.expert_count,
        "expert_bytes": x.expert_bytes,
        "slots": x.slots,
        "held": x.held,
        "group_count": x.group_count,
        "slots_max": x.slots_max,
    }


def expert_rank_hello_to_pb(x: ExpertRankHello) -> pb.ExpertRankHello:
    return pb.ExpertRankHello(**expert_rank_hello_fields(x))


def expert_rank_hello_from_pb(x: pb.ExpertRankHello) -> ExpertRankHello:
    return ExpertRankHello(
        ref=expert_rank_ref_from_pb(x.ref),
        group=x.group,
        node=x.node,
        pid=x.pid,
        layer_count=x.layer_count,
        expert_count=x.expert_count,
        expert_bytes=x.expert_bytes,
        slots=x.slots,
        held=tuple(x.held[:]),
        group_count=x.group_count,
        slots_max=x.slots_max,
    )


def expert_rank_ref_fields(x: ExpertRankRef) -> dict[str, Any]:
    return {
        "rank_id": x.rank_id,
        "host": x.host,
        "socket": x.socket,
        "address": x.address,
        "secret": x.secret,
    }


def expert_rank_ref_to_pb(x: ExpertRankRef) -> pb.ExpertRankRef:
    return pb.ExpertRankRef(**expert_rank_ref_fields(x))


def expert_rank_ref_from_pb(x: pb.ExpertRankRef) -> ExpertRankRef:
    return ExpertRankRef(
        rank_id=x.rank_id,
        host=x.host,
        socket=x.socket,
        address=x.address,
        secret=x.secret,
    )


def expert_loaded_fields(x: ExpertLoaded) -> dict[str, Any]:
    return {
        "load_id": x.load_id,
        "expert": x.expert,
        "is_copied": x.is_copied,
    }


def expert_loaded_to_pb(x: ExpertLoaded) -> pb.ExpertLoaded:
    return pb.ExpertLoaded(**expert_loaded_fields(x))


def expert_loaded_from_pb(x: pb.ExpertLoaded) -> ExpertLoaded:
    return ExpertLoaded(
        load_id=x.load_id,
        expert=x.expert,
        is_copied=x.is_copied,
    )


def expert_load_failed_fields(x: ExpertLoadFailed) -> dict[str, Any]:
    return {
        "load_id": x.load_id,
        "expert": x.expert,
        "reason": x.reason,
        "is_full": x.is_full,
    }


def expert_load_failed_to_pb(x: ExpertLoadFailed) -> pb.ExpertLoadFailed:
    return pb.ExpertLoadFailed(**expert_load_failed_fields(x))


def expert_load_failed_from_pb(x: pb.ExpertLoadFailed) -> ExpertLoadFailed:
    return ExpertLoadFailed(
        load_id=x.load_id,
        expert=x.expert,
        reason=x.reason,
        is_full=x.is_full,
    )


def expert_rank_beat_fields(x: ExpertRankBeat) -> dict[str, Any]:
    return {
        "rows": x.rows,
        "busy_s": x.busy_s,
    }


def expert_rank_beat_to_pb(x: ExpertRankBeat) -> pb.ExpertRankBeat:
    return pb.ExpertRankBeat(**expert_rank_beat_fields(x))


def expert_rank_beat_from_pb(x: pb.ExpertRankBeat) -> ExpertRankBeat:
    return ExpertRankBeat(
        rows=x.rows,
        busy_s=x.busy_s,
    )


def expert_rank_order_envelope_fields(x: ExpertLoadOrder | ExpertDropOrder | ExpertRankRetired) -> dict[str, Any]:
    match x:
        case ExpertLoadOrder():
            return {"expert_load_order": expert_load_order_fields(x)}
        case ExpertDropOrder():
            return {"expert_drop_order": expert_drop_order_fields(x)}
        case ExpertRankRetired():
            return {"expert_rank_retired": expert_rank_retired_fields(x)}
        case _:
            assert_never(x)


def expert_rank_order_envelope_to_pb(x: ExpertLoadOrder | ExpertDropOrder | ExpertRankRetired) -> pb.ExpertRankOrderEnvelope:
    return pb.ExpertRankOrderEnvelope(**expert_rank_order_envelope_fields(x))


def expert_rank_order_envelope_from_pb(x: pb.ExpertRankOrderEnvelope) -> ExpertLoadOrder | ExpertDropOrder | ExpertRankRetired:
    match x.WhichOneof("message"):
        case "expert_load_order":
            return expert_load_order_from_pb(x.expert_load_order)
        case "expert_drop_order":
            return expert_drop_order_from_pb(x.expert_drop_order)
        case "expert_rank_retired":
            return expert_rank_retired_from_pb(x.expert_rank_retired)
        case other:
            raise WireError(f"ExpertRankOrderEnvelope: message {other!r} is not allowed here")


def expert_load_order_fields(x: ExpertLoadOrder) -> dict[str, Any]:
    return {
        "load_id": x.load_id,
        "expert": x.expert,
        "source": None if x.source is None else expert_rank_ref_fields(x.source),
    }


def expert_load_order_to_pb(x: ExpertLoadOrder) -> pb.ExpertLoadOrder:
    return pb.ExpertLoadOrder(**expert_load_order_fields(x))


def expert_load_order_from_pb(x: pb.ExpertLoadOrder) -> ExpertLoadOrder:
    return ExpertLoadOrder(
        load_id=x.load_id,
        expert=x.expert,
        source=expert_rank_ref_from_pb(x.source) if x.HasField("source") else None,
    )


def expert_drop_order_fields(x: ExpertDropOrder) -> dict[str, Any]:
    return {
        "expert": x.expert,
    }


def expert_drop_order_to_pb(x: ExpertDropOrder) -> pb.ExpertDropOrder:
    return pb.ExpertDropOrder(**expert_drop_order_fields(x))


def expert_drop_order_from_pb(x: pb.ExpertDropOrder) -> ExpertDropOrder:
    return ExpertDropOrder(
        expert=x.expert,
    )


def expert_rank_retired_fields(x: ExpertRankRetired) -> dict[str, Any]:
    return {
        "reason": x.reason,
    }


def expert_rank_retired_to_pb(x: ExpertRankRetired) -> pb.ExpertRankRetired:
    return pb.ExpertRankRetired(**expert_rank_retired_fields(x))


def expert_rank_retired_from_pb(x: pb.ExpertRankRetired) -> ExpertRankRetired:
    return ExpertRankRetired(
        reason=x.reason,
    )


def expert_caller_envelope_fields(x: ExpertCallerHello | ExpertEpochUsed | ExpertCountsReport | ExpertRankSuspected) -> dict[str, Any]:
    match x:
        case ExpertCallerHello():
            return {"expert_caller_hello": expert_caller_hello_fields(x)}
        case ExpertEpochUsed():
            return {"expert_epoch_used": expert_epoch_used_fields(x)}
        case ExpertCountsReport():
            return {"expert_counts_report": expert_counts_report_fields(x)}
        case ExpertRankSuspected():
            return {"expert_rank_suspected": expert_rank_suspected_fields(x)}
        case _:
            assert_never(x)


def expert_caller_envelope_to_pb(x: ExpertCallerHello | ExpertEpochUsed | ExpertCountsReport | ExpertRankSuspected) -> pb.ExpertCallerEnvelope:
    return pb.ExpertCallerEnvelope(**expert_caller_envelope_fields(x))


def expert_caller_envelope_from_pb(x: pb.ExpertCallerEnvelope) -> ExpertCallerHello | ExpertEpochUsed | ExpertCountsReport | ExpertRankSuspected:
    match x.WhichOneof("message"):
        case "expert_caller_hello":
            return expert_caller_hello_from_pb(x.expert_caller_hello)
        case "expert_epoch_used":
            return expert_epoch_used_from_pb(x.expert_epoch_used)
        case "expert_counts_report":
            return expert_counts_report_from_pb(x.expert_counts_report)
        case "expert_rank_suspected":
            return expert_rank_suspected_from_pb(x.expert_rank_suspected)
        case other:
            raise WireError(f"ExpertCallerEnvelope: message {other!r} is not allowed here")


def expert_caller_hello_fields(x: ExpertCallerHello) -> dict[str, Any]:
    return {
        "caller": x.caller,
        "worker_id": x.worker_id,
        "group": x.group,
        "epoch": x.epoch,
    }


def expert_caller_hello_to_pb(x: ExpertCallerHello) -> pb.ExpertCallerHello:
    return pb.ExpertCallerHello(**expert_caller_hello_fields(x))


def expert_caller_hello_from_pb(x: pb.ExpertCallerHello) -> ExpertCallerHello:
    return ExpertCallerHello(
        caller=x.caller,
        worker_id=x.worker_id,
        group=x.group,
        epoch=x.epoch,
    )


def expert_epoch_used_fields(x: ExpertEpochUsed) -> dict[str, Any]:
    return {
        "epoch": x.epoch,
    }


def expert_epoch_used_to_pb(x: ExpertEpochUsed) -> pb.ExpertEpochUsed:
    return pb.ExpertEpochUsed(**expert_epoch_used_fields(x))


def expert_epoch_used_from_pb(x: pb.ExpertEpochUsed) -> ExpertEpochUsed:
    return ExpertEpochUsed(
        epoch=x.epoch,
    )


def expert_counts_report_fields(x: ExpertCountsReport) -> dict[str, Any]:
    return {
        "layer_count": x.layer_count,
        "expert_count": x.expert_count,
        "counts": x.counts,
    }


def expert_counts_report_to_pb(x: ExpertCountsReport) -> pb.ExpertCountsReport:
    return pb.ExpertCountsReport(**expert_counts_report_fields(x))


def expert_counts_report_from_pb(x: pb.ExpertCountsReport) -> ExpertCountsReport:
    return ExpertCountsReport(
        layer_count=x.layer_count,
        expert_count=x.expert_count,
        counts=tuple(x.counts[:]),
    )


def expert_rank_suspected_fields(x: ExpertRankSuspected) -> dict[str, Any]:
    return {
        "rank_id": x.rank_id,
        "is_gone": x.is_gone,
        "reason": x.reason,
    }


def expert_rank_suspected_to_pb(x: ExpertRankSuspected) -> pb.ExpertRankSuspected:
    return pb.ExpertRankSuspected(**expert_rank_suspected_fields(x))


def expert_rank_suspected_from_pb(x: pb.ExpertRankSuspected) -> ExpertRankSuspected:
    return ExpertRankSuspected(
        rank_id=x.rank_id,
        is_gone=x.is_gone,
        reason=x.reason,
    )


def expert_map_update_fields(x: ExpertMapUpdate) -> dict[str, Any]:
    return {
        "epoch": x.epoch,
        "layer_count": x.layer_count,
        "expert_count": x.expert_count,
        "ranks": [expert_map_rank_fields(v) for v in x.ranks],
    }


def expert_map_update_to_pb(x: ExpertMapUpdate) -> pb.ExpertMapUpdate:
    return pb.ExpertMapUpdate(**expert_map_update_fields(x))


def expert_map_update_from_pb(x: pb.ExpertMapUpdate) -> ExpertMapUpdate:
    return ExpertMapUpdate(
        epoch=x.epoch,
        layer_count=x.layer_count,
        expert_count=x.expert_count,
        ranks=tuple([expert_map_rank_from_pb(v) for v in x.ranks[:]]),
    )


def expert_map_rank_fields(x: ExpertMapRank) -> dict[str, Any]:
    return {
        "ref": expert_rank_ref_fields(x.ref),
        "experts": x.experts,
    }


def expert_map_rank_to_pb(x: ExpertMapRank) -> pb.ExpertMapRank:
    return pb.ExpertMapRank(**expert_map_rank_fields(x))


def expert_map_rank_from_pb(x: pb.ExpertMapRank) -> ExpertMapRank:
    return ExpertMapRank(
        ref=expert_rank_ref_from_pb(x.ref),
        experts=tuple(x.experts[:]),
    )


def order_fields(x: Order) -> dict[str, Any]:
    return {
        "action": action_fields(x.action),
        "who": x.who,
        "reason": x.reason,
        "is_advice": x.is_advice,
    }


def order_to_pb(x: Order) -> pb.Order:
    return pb.Order(**order_fields(x))


def order_from_pb(x: pb.Order) -> Order:
    return Order(
        action=action_from_pb(x.action),
        who=x.who,
        reason=x.reason,
        is_advice=x.is_advice,
    )


def action_fields(x: Scale | Resize | SwitchRole | DrainWorker | DrainNode | RollOut | RebalanceExperts | DrainExpertRank | ScaleExperts) -> dict[str, Any]:
    match x:
        case Scale():
            return {"scale": scale_fields(x)}
        case Resize():
            return {"resize": resize_fields(x)}
        case SwitchRole():
            return {"switch_role": switch_role_fields(x)}
        case DrainWorker():
            return {"drain_worker": drain_worker_fields(x)}
        case DrainNode():
            return {"drain_node": drain_node_fields(x)}
        case RollOut():
            return {"roll_out": roll_out_fields(x)}
        case RebalanceExperts():
            return {"rebalance_experts": rebalance_experts_fields(x)}
        case DrainExpertRank():
            return {"drain_expert_rank": drain_expert_rank_fields(x)}
        case ScaleExperts():
            return {"scale_experts": scale_experts_fields(x)}
        case _:
            assert_never(x)


def action_to_pb(x: Scale | Resize | SwitchRole | DrainWorker | DrainNode | RollOut | RebalanceExperts | DrainExpertRank | ScaleExperts) -> pb.Action:
    return pb.Action(**action_fields(x))


def action_from_pb(x: pb.Action) -> Scale | Resize | SwitchRole | DrainWorker | DrainNode | RollOut | RebalanceExperts | DrainExpertRank | ScaleExperts:
    match x.WhichOneof("message"):
        case "scale":
            return scale_from_pb(x.scale)
        case "resize":
            return resize_from_pb(x.resize)
        case "switch_role":
            return switch_role_from_pb(x.switch_role)
        case "drain_worker":
            return drain_worker_from_pb(x.drain_worker)
        case "drain_node":
            return drain_node_from_pb(x.drain_node)
        case "roll_out":
            return roll_out_from_pb(x.roll_out)
        case "rebalance_experts":
            return rebalance_experts_from_pb(x.rebalance_experts)
        case "drain_expert_rank":
            return drain_expert_rank_from_pb(x.drain_expert_rank)
        case "scale_experts":
            return scale_experts_from_pb(x.scale_experts)
        case other:
            raise WireError(f"Action: message {other!r} is not allowed here")


def scale_fields(x: Scale) -> dict[str, Any]:
    return {
        "role": _ROLE_NUMBERS[x.role],
        "count": x.count,
        "model": x.model,
    }


def scale_to_pb(x: Scale) -> pb.Scale:
    return pb.Scale(**scale_fields(x))


def scale_from_pb(x: pb.Scale) -> Scale:
    return Scale(
        role=enum_member(_ROLE_MEMBERS, x.role),
        count=x.count,
        model=x.model,
    )


def resize_fields(x: Resize) -> dict[str, Any]:
    return {
        "counts": x.counts,
        "model": x.model,
    }


def resize_to_pb(x: Resize) -> pb.Resize:
    return pb.Resize(**resize_fields(x))


def resize_from_pb(x: pb.Resize) -> Resize:
    return Resize(
        counts={enum_named(Role, k): v for k, v in x.counts.items()},
        model=x.model,
    )


def switch_role_fields(x: SwitchRole) -> dict[str, Any]:
    return {
        "worker": x.worker,
        "role": _ROLE_NUMBERS[x.role],
    }


def switch_role_to_pb(x: SwitchRole) -> pb.SwitchRole:
    return pb.SwitchRole(**switch_role_fields(x))


def switch_role_from_pb(x: pb.SwitchRole) -> SwitchRole:
    return SwitchRole(
        worker=x.worker,
        role=enum_member(_ROLE_MEMBERS, x.role),
    )


def drain_worker_fields(x: DrainWorker) -> dict[str, Any]:
    return {
        "worker": x.worker,
        "is_replaced": x.is_replaced,
    }


def drain_worker_to_pb(x: DrainWorker) -> pb.DrainWorker:
    return pb.DrainWorker(**drain_worker_fields(x))


def drain_worker_from_pb(x: pb.DrainWorker) -> DrainWorker:
    return DrainWorker(
        worker=x.worker,
        is_replaced=x.is_replaced,
    )


def drain_node_fields(x: DrainNode) -> dict[str, Any]:
    return {
        "node": x.node,
        "is_undone": x.is_undone,
    }


def drain_node_to_pb(x: DrainNode) -> pb.DrainNode:
    return pb.DrainNode(**drain_node_fields(x))


def drain_node_from_pb(x: pb.DrainNode) -> DrainNode:
    return DrainNode(
        node=x.node,
        is_undone=x.is_undone,
    )


def roll_out_fields(x: RollOut) -> dict[str, Any]:
    return {
        "version": version_fields(x.version),
        "model": x.model,
        "surge_max": x.surge_max,
        "unavailable_max": x.unavailable_max,
    }


def roll_out_to_pb(x: RollOut) -> pb.RollOut:
    return pb.RollOut(**roll_out_fields(x))


def roll_out_from_pb(x: pb.RollOut) -> RollOut:
    return RollOut(
        version=version_from_pb(x.version),
        model=x.model,
        surge_max=x.surge_max,
        unavailable_max=x.unavailable_max,
    )


def version_fields(x: Version) -> dict[str, Any]:
    return {
        "name": x.name,
        "sets": x.sets,
    }


def version_to_pb(x: Version) -> pb.Version:
    return pb.Version(**version_fields(x))


def version_from_pb(x: pb.Version) -> Version:
    return Version(
        name=x.name,
        sets=tuple(x.sets[:]),
    )


def rebalance_experts_fields(x: RebalanceExperts) -> dict[str, Any]:
    return {
        "group": x.group,
    }


def rebalance_experts_to_pb(x: RebalanceExperts) -> pb.RebalanceExperts:
    return pb.RebalanceExperts(**rebalance_experts_fields(x))


def rebalance_experts_from_pb(x: pb.RebalanceExperts) -> RebalanceExperts:
    return RebalanceExperts(
        group=x.group,
    )


def drain_expert_rank_fields(x: DrainExpertRank) -> dict[str, Any]:
    return {
        "rank": x.rank,
        "is_replaced": x.is_replaced,
    }


def drain_expert_rank_to_pb(x: DrainExpertRank) -> pb.DrainExpertRank:
    return pb.DrainExpertRank(**drain_expert_rank_fields(x))


def drain_expert_rank_from_pb(x: pb.DrainExpertRank) -> DrainExpertRank:
    return DrainExpertRank(
        rank=x.rank,
        is_replaced=x.is_replaced,
    )


def scale_experts_fields(x: ScaleExperts) -> dict[str, Any]:
    return {
        "count": x.count,
        "group": x.group,
    }


def scale_experts_to_pb(x: ScaleExperts) -> pb.ScaleExperts:
    return pb.ScaleExperts(**scale_experts_fields(x))


def scale_experts_from_pb(x: pb.ScaleExperts) -> ScaleExperts:
    return ScaleExperts(
        count=x.count,
        group=x.group,
    )


def decision_fields(x: Decision) -> dict[str, Any]:
    return {
        "number": x.number,
        "at_s": x.at_s,
        "who": x.who,
        "reason": x.reason,
        "action": action_fields(x.action),
        "outcome": _OUTCOME_NUMBERS[x.outcome],
        "text": x.text,
        "done_after_s": x.done_after_s,
    }


def decision_to_pb(x: Decision) -> pb.Decision:
    return pb.Decision(**decision_fields(x))


def decision_from_pb(x: pb.Decision) -> Decision:
    return Decision(
        number=x.number,
        at_s=x.at_s,
        who=x.who,
        reason=x.reason,
        action=action_from_pb(x.action),
        outcome=enum_member(_OUTCOME_MEMBERS, x.outcome),
        text=x.text,
        done_after_s=x.done_after_s if x.HasField("done_after_s") else None,
    )


def cluster_state_fields(x: ClusterState) -> dict[str, Any]:
    return {
        "life": x.life,
        "pools": [pool_fields(v) for v in x.pools],
        "replicas": [replica_status_fields(v) for v in x.replicas],
        "nodes": [node_state_fields(v) for v in x.nodes],
        "decisions": [decision_fields(v) for v in x.decisions],
        "is_settled": x.is_settled,
        "autoscale": [autoscale_state_fields(v) for v in x.autoscale],
        "routers": [router_state_fields(v) for v in x.routers],
        "experts": [expert_group_state_fields(v) for v in x.experts],
    }


def cluster_state_to_pb(x: ClusterState) -> pb.ClusterState:
    return pb.ClusterState(**cluster_state_fields(x))


def cluster_state_from_pb(x: pb.ClusterState) -> ClusterState:
    return ClusterState(
        life=x.life,
        pools=tuple([pool_from_pb(v) for v in x.pools[:]]),
        replicas=tuple([replica_status_from_pb(v) for v in x.replicas[:]]),
        nodes=tuple([node_state_from_pb(v) for v in x.nodes[:]]),
        decisions=tuple([decision_from_pb(v) for v in x.decisions[:]]),
        is_settled=x.is_settled,
        autoscale=tuple([autoscale_state_from_pb(v) for v in x.autoscale[:]]),
        routers=tuple([router_state_from_pb(v) for v in x.routers[:]]),
        experts=tuple([expert_group_state_from_pb(v) for v in x.experts[:]]),
    )


def pool_fields(x: Pool) -> dict[str, Any]:
    return {
        "model": x.model,
        "counts": x.counts,
        "version": version_fields(x.version),
        "surge_max": x.surge_max,
        "unavailable_max": x.unavailable_max,
    }


def pool_to_pb(x: Pool) -> pb.Pool:
    return pb.Pool(**pool_fields(x))


def pool_from_pb(x: pb.Pool) -> Pool:
    return Pool(
        model=x.model,
        counts={enum_named(Role, k): v for k, v in x.counts.items()},
        version=version_from_pb(x.version),
        surge_max=x.surge_max,
        unavailable_max=x.unavailable_max,
    )


def replica_status_fields(x: ReplicaStatus) -> dict[str, Any]:
    return {
        "name": x.name,
        "model": x.model,
        "role": _ROLE_NUMBERS[x.role],
        "state": _REPLICA_STATE_NUMBERS[x.state],
        "for_s": x.for_s,
        "version": x.version,
        "worker_id": x.worker_id,
        "node": x.node,
        "deaths_in_a_row": x.deaths_in_a_row,
        "last_exit": x.last_exit,
        "reason": x.reason,
        "address": x.address,
        "metrics_address": x.metrics_address,
        "shape": x.shape,
        "memory": x.memory,
    }


def replica_status_to_pb(x: ReplicaStatus) -> pb.ReplicaStatus:
    return pb.ReplicaStatus(**replica_status_fields(x))


def replica_status_from_pb(x: pb.ReplicaStatus) -> ReplicaStatus:
    return ReplicaStatus(
        name=x.name,
        model=x.model,
        role=enum_member(_ROLE_MEMBERS, x.role),
        state=enum_member(_REPLICA_STATE_MEMBERS, x.state),
        for_s=x.for_s,
        version=x.version,
        worker_id=x.worker_id if x.HasField("worker_id") else None,
        node=x.node,
        deaths_in_a_row=x.deaths_in_a_row,
        last_exit=x.last_exit,
        reason=x.reason,
        address=x.address,
        metrics_address=x.metrics_address,
        shape=x.shape,
        memory=x.memory,
    )


def node_state_fields(x: NodeState) -> dict[str, Any]:
    return {
        "node": x.node,
        "host": x.host,
        "is_alive": x.is_alive,
        "is_drained": x.is_drained,
        "cpus": x.cpus,
        "gpus": x.gpus,
    }


def node_state_to_pb(x: NodeState) -> pb.NodeState:
    return pb.NodeState(**node_state_fields(x))


def node_state_from_pb(x: pb.NodeState) -> NodeState:
    return NodeState(
        node=x.node,
        host=x.host,
        is_alive=x.is_alive,
        is_drained=x.is_drained,
        cpus=x.cpus,
        gpus=x.gpus,
    )


def autoscale_state_fields(x: AutoscaleState) -> dict[str, Any]:
    return {
        "mode": x.mode,
        "text": x.text,
        "roles": [role_outlook_fields(v) for v in x.roles],
        "start_s": x.start_s,
        "drain_s": x.drain_s,
        "switch_s": x.switch_s,
        "model": x.model,
    }


def autoscale_state_to_pb(x: AutoscaleState) -> pb.AutoscaleState:
    return pb.AutoscaleState(**autoscale_state_fields(x))


def autoscale_state_from_pb(x: pb.AutoscaleState) -> AutoscaleState:
    return AutoscaleState(
        mode=x.mode,
        text=x.text,
        roles=tuple([role_outlook_from_pb(v) for v in x.roles[:]]),
        start_s=x.start_s,
        drain_s=x.drain_s,
        switch_s=x.switch_s,
        model=x.model,
    )


def role_outlook_fields(x: RoleOutlook) -> dict[str, Any]:
    return {
        "role": _ROLE_NUMBERS[x.role],
        "demand": x.demand,
        "forecast": x.forecast,
        "unit": x.unit,
        "correction": x.correction,
        "needed": x.needed,
        "wanted": x.wanted,
    }


def role_outlook_to_pb(x: RoleOutlook) -> pb.RoleOutlook:
    return pb.RoleOutlook(**role_outlook_fields(x))


def role_outlook_from_pb(x: pb.RoleOutlook) -> RoleOutlook:
    return RoleOutlook(
        role=enum_member(_ROLE_MEMBERS, x.role),
        demand=x.demand,
        forecast=x.forecast,
        unit=x.unit,
        correction=x.correction,
        needed=x.needed,
        wanted=x.wanted,
    )


def router_state_fields(x: RouterState) -> dict[str, Any]:
    return {
        "router_id": x.router_id,
        "address": x.address,
        "metrics_address": x.metrics_address,
        "host": x.host,
    }


def router_state_to_pb(x: RouterState) -> pb.RouterState:
    return pb.RouterState(**router_state_fields(x))


def router_state_from_pb(x: pb.RouterState) -> RouterState:
    return RouterState(
        router_id=x.router_id,
        address=x.address,
        metrics_address=x.metrics_address,
        host=x.host,
    )


def expert_group_state_fields(x: ExpertGroupState) -> dict[str, Any]:
    return {
        "group": x.group,
        "model": x.model,
        "role": x.role,
        "epoch": x.epoch,
        "layer_count": x.layer_count,
        "expert_count": x.expert_count,
        "ranks": [expert_rank_status_fields(v) for v in x.ranks],
        "wanted_ranks": x.wanted_ranks,
        "replicas_min": x.replicas_min,
        "replicas_mean": x.replicas_mean,
        "missing": x.missing,
        "single": x.single,
        "balance": x.balance,
        "balance_worst": x.balance_worst,
        "balance_worst_layer": x.balance_worst_layer,
        "expert_replicas": x.expert_replicas,
        "expert_loads": x.expert_loads,
        "loads_running": x.loads_running,
        "migrations": x.migrations,
        "migrated_bytes": x.migrated_bytes,
        "copied": x.copied,
        "losses": x.losses,
        "rebalances": x.rebalances,
        "callers": x.callers,
        "is_ready": x.is_ready,
        "lacks_memory": x.lacks_memory,
    }


def expert_group_state_to_pb(x: ExpertGroupState) -> pb.ExpertGroupState:
    return pb.ExpertGroupState(**expert_group_state_fields(x))


def expert_group_state_from_pb(x: pb.ExpertGroupState) -> ExpertGroupState:
    return ExpertGroupState(
        group=x.group,
        model=x.model,
        role=x.role,
        epoch=x.epoch,
        layer_count=x.layer_count,
        expert_count=x.expert_count,
        ranks=tuple([expert_rank_status_from_pb(v) for v in x.ranks[:]]),
        wanted_ranks=x.wanted_ranks,
        replicas_min=x.replicas_min,
        replicas_mean=x.replicas_mean,
        missing=x.missing,
        single=x.single,
        balance=x.balance,
        balance_worst=x.balance_worst,
        balance_worst_layer=x.balance_worst_layer,
        expert_replicas=tuple(x.expert_replicas[:]),
        expert_loads=tuple(x.expert_loads[:]),
        loads_running=x.loads_running,
        migrations=x.migrations,
        migrated_bytes=x.migrated_bytes,
        copied=x.copied,
        losses=x.losses,
        rebalances=x.rebalances,
        callers=x.callers,
        is_ready=x.is_ready,
        lacks_memory=x.lacks_memory,
    )


def expert_rank_status_fields(x: ExpertRankStatus) -> dict[str, Any]:
    return {
        "name": x.name,
        "rank_id": x.rank_id,
        "phase": _EXPERT_RANK_PHASE_NUMBERS[x.phase],
        "node": x.node,
        "host": x.host,
        "slots": x.slots,
        "held": x.held,
        "loading": x.loading,
        "load": x.load,
        "rows": x.rows,
        "busy_s": x.busy_s,
        "for_s": x.for_s,
        "slots_max": x.slots_max,
    }


def expert_rank_status_to_pb(x: ExpertRankStatus) -> pb.ExpertRankStatus:
    return pb.ExpertRankStatus(**expert_rank_status_fields(x))


def expert_rank_status_from_pb(x: pb.ExpertRankStatus) -> ExpertRankStatus:
    return ExpertRankStatus(
        name=x.name,
        rank_id=x.rank_id,
        phase=enum_member(_EXPERT_RANK_PHASE_MEMBERS, x.phase),
        node=x.node,
        host=x.host,
        slots=x.slots,
        held=x.held,
        loading=x.loading,
        load=x.load,
        rows=x.rows,
        busy_s=x.busy_s,
        for_s=x.for_s,
        slots_max=x.slots_max,
    )
