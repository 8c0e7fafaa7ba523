"""Values of `baton.core.messages` to protobuf and back.

Every `…_from_pb` raises WireError for what a correct peer never sends: an empty oneof, an
unspecified enum, a block hash of the wrong size.
"""

from typing import Any, assert_never

import msgspec

from baton.core import messages as m
from baton.core.costs import StepCosts
from baton.core.ids import SequenceId, WorkerId
from baton.wire import vocabulary as v
from baton.wire.proto import baton_pb2 as pb
from baton.wire.sharing_codec import router_member_from_pb, router_member_to_pb
from baton.wire.step_codec import step_from_pb, step_to_pb
from baton.wire.vocabulary import WireError

_ROLE = v.numbers(m.Role)
_PHASE = v.numbers(m.Phase)
_TASK = v.numbers(m.Task)
_REFUSAL = v.numbers(m.RefusalReason)
_FAILURE = v.numbers(m.FailureReason)


# --- router -> worker -------------------------------------------------------------------------------


def _start_to_pb(start: m.StartSequence) -> pb.StartSequence:
    source = start.source
    return pb.StartSequence(
        seq_id=start.seq_id,
        epoch=start.epoch,
        phase=v.number(_PHASE, start.phase),
        tokens=start.tokens,
        prompt_token_count=start.prompt_token_count,
        sampling=v.sampling_to_pb(start.sampling),
        cache_root=start.cache_root,
        time_left_s=start.time_left_s,
        source=pb.PeerRef(worker_id=source.worker_id, address=source.address) if source else None,
        traceparent=start.traceparent,
        task=v.number(_TASK, start.task),
        adapter=v.adapter_to_pb(start.adapter),
        priority=start.priority,
        tpot_slo_s=start.tpot_slo_s,
        fairness_key=start.fairness_key,
    )


def _start_from_pb(start: pb.StartSequence) -> m.StartSequence:
    source = start.source if start.HasField("source") else None
    return m.StartSequence(
        seq_id=SequenceId(start.seq_id),
        epoch=start.epoch,
        phase=v.member(_PHASE, start.phase),
        tokens=tuple(start.tokens),
        prompt_token_count=start.prompt_token_count,
        sampling=v.sampling_from_pb(start.sampling),
        cache_root=v.block_hash(start.cache_root),
        time_left_s=start.time_left_s,
        source=m.PeerRef(WorkerId(source.worker_id), source.address) if source else None,
        traceparent=start.traceparent,
        task=v.member(_TASK, start.task),
        adapter=v.adapter_from_pb(start.adapter) if start.HasField("adapter") else None,
        priority=start.priority,
        tpot_slo_s=start.tpot_slo_s,
        fairness_key=start.fairness_key,
    )


def router_to_pb(message: m.RouterMessage) -> pb.RouterEnvelope:
    match message:
        case m.StartSequence():
            return pb.RouterEnvelope(start=_start_to_pb(message))
        case m.CancelSequence(seq_id, epoch):
            return pb.RouterEnvelope(cancel=pb.CancelSequence(seq_id=seq_id, epoch=epoch))
        case m.ResyncBlocks():
            return pb.RouterEnvelope(resync=pb.ResyncBlocks())
        case _:
            assert_never(message)


def router_from_pb(envelope: pb.RouterEnvelope) -> m.RouterMessage:
    match envelope.WhichOneof("message"):
        case "start":
            return _start_from_pb(envelope.start)
        case "cancel":
            return m.CancelSequence(SequenceId(envelope.cancel.seq_id), envelope.cancel.epoch)
        case "resync":
            return m.ResyncBlocks()
        case other:
            raise WireError(f"router message {other!r} is not allowed here")


# --- worker -> router -------------------------------------------------------------------------------


def _hello_to_pb(h: m.WorkerHello) -> pb.WorkerHello:
    return pb.WorkerHello(
        worker_id=h.worker_id,
        role=v.number(_ROLE, h.role),
        fingerprint=h.fingerprint,
        model=h.model,
        block_tokens=h.block_tokens,
        block_count=h.block_count,
        max_model_tokens=h.max_model_tokens,
        wire_version=h.wire_version,
        costs=_costs_to_pb(h.costs),
        block_bytes=h.block_bytes,
        step_tokens_max=h.step_tokens_max,
        batch_sequences_max=h.batch_sequences_max,
        tpot_slo_s=h.tpot_slo_s,
        chunk_tokens_min=h.chunk_tokens_min,
        host=h.host,
    )


def _costs_to_pb(costs: StepCosts | None) -> pb.StepCosts | None:
    return None if costs is None else pb.StepCosts(**msgspec.structs.asdict(costs))


def _costs_from_pb(costs: pb.StepCosts) -> StepCosts:
    return StepCosts(costs.base_s, costs.prompt_token_s, costs.decode_s, costs.context_token_s, costs.pair_s)


def _hello_from_pb(h: pb.WorkerHello) -> m.WorkerHello:
    return m.WorkerHello(
        worker_id=WorkerId(h.worker_id),
        role=v.member(_ROLE, h.role),
        fingerprint=h.fingerprint,
        model=h.model,
        block_tokens=h.block_tokens,
        block_count=h.block_count,
        max_model_tokens=h.max_model_tokens,
        wire_version=h.wire_version,
        costs=_costs_from_pb(h.costs) if h.HasField("costs") else None,
        block_bytes=h.block_bytes,
        step_tokens_max=h.step_tokens_max,
        batch_sequences_max=h.batch_sequences_max,
        tpot_slo_s=h.tpot_slo_s,
        chunk_tokens_min=h.chunk_tokens_min,
        host=h.host,
    )


def _joined_to_pb(j: m.SequenceJoined) -> pb.SequenceJoined:
    return pb.SequenceJoined(
        seq_id=j.seq_id,
        epoch=j.epoch,
        transferred_bytes=j.transferred_bytes,
        transfer_s=j.transfer_s,
        handover_s=j.handover_s,
    )


def _refused_to_pb(r: m.SequenceRefused) -> pb.SequenceRefused:
    reason = v.number(_REFUSAL, r.reason)
    return pb.SequenceRefused(seq_id=r.seq_id, epoch=r.epoch, reason=reason, message=r.message)


def _failed_to_pb(f: m.SequenceFailed) -> pb.SequenceFailed:
    reason = v.number(_FAILURE, f.reason)
    return pb.SequenceFailed(seq_id=f.seq_id, epoch=f.epoch, reason=reason, message=f.message)


def _blocks_to_pb(b: m.BlockEvents) -> pb.BlockEvents:
    return pb.BlockEvents(
        sequence_number=b.sequence_number,
        stored=b.stored,
        removed=b.removed,
        is_snapshot=b.is_snapshot,
    )


def _load_to_pb(r: m.LoadReport) -> pb.LoadReport:
    return pb.LoadReport(
        role=v.number(_ROLE, r.role),
        is_draining=r.is_draining,
        free_blocks=r.free_blocks,
        running_count=r.running_count,
        waiting_count=r.waiting_count,
        waiting_tokens=r.waiting_tokens,
        step_s=r.step_s,
        costs=_costs_to_pb(r.costs),
        decoding_count=r.decoding_count,
        context_tokens=r.context_tokens,
        tokens_per_step=r.tokens_per_step,
        incoming_count=r.incoming_count,
    )


def worker_to_pb(message: m.WorkerMessage) -> pb.WorkerEnvelope:
    match message:
        case m.StepOutput(outputs):
            return pb.WorkerEnvelope(step=step_to_pb(outputs))
        case m.LoadReport():
            return pb.WorkerEnvelope(load=_load_to_pb(message))
        case m.BlockEvents():
            return pb.WorkerEnvelope(blocks=_blocks_to_pb(message))
        case m.SequenceJoined():
            return pb.WorkerEnvelope(joined=_joined_to_pb(message))
        case m.SequenceRefused():
            return pb.WorkerEnvelope(refused=_refused_to_pb(message))
        case m.SequenceFailed():
            return pb.WorkerEnvelope(failed=_failed_to_pb(message))
        case m.WorkerHello():
            return pb.WorkerEnvelope(hello=_hello_to_pb(message))
        case _:
            assert_never(message)


def _joined_from_pb(j: pb.SequenceJoined) -> m.SequenceJoined:
    return m.SequenceJoined(
        seq_id=SequenceId(j.seq_id),
        epoch=j.epoch,
        transferred_bytes=j.transferred_bytes,
        transfer_s=j.transfer_s,
        handover_s=j.handover_s,
    )


def _load_from_pb(r: pb.LoadReport) -> m.LoadReport:
    return m.LoadReport(
        role=v.member(_ROLE, r.role),
        is_draining=r.is_draining,
        free_blocks=r.free_blocks,
        running_count=r.running_count,
        waiting_count=r.waiting_count,
        waiting_tokens=r.waiting_tokens,
        step_s=r.step_s,
        costs=_costs_from_pb(r.costs) if r.HasField("costs") else None,
        decoding_count=r.decoding_count,
        context_tokens=r.context_tokens,
        tokens_per_step=r.tokens_per_step,
        incoming_count=r.incoming_count,
    )


def _blocks_from_pb(b: pb.BlockEvents) -> m.BlockEvents:
    return m.BlockEvents(
        sequence_number=b.sequence_number,
        stored=tuple(map(v.block_hash, b.stored)),
        removed=tuple(map(v.block_hash, b.removed)),
        is_snapshot=b.is_snapshot,
    )


def worker_from_pb(envelope: pb.WorkerEnvelope) -> m.WorkerMessage:
    match envelope.WhichOneof("message"):
        case "step":
            return step_from_pb(envelope.step)
        case "load":
            return _load_from_pb(envelope.load)
        case "blocks":
            return _blocks_from_pb(envelope.blocks)
        case "joined":
            return _joined_from_pb(envelope.joined)
        case "refused":
            r = envelope.refused
            return m.SequenceRefused(SequenceId(r.seq_id), r.epoch, v.member(_REFUSAL, r.reason), r.message)
        case "failed":
            f = envelope.failed
            return m.SequenceFailed(SequenceId(f.seq_id), f.epoch, v.member(_FAILURE, f.reason), f.message)
        case "hello":
            return _hello_from_pb(envelope.hello)
        case other:
            raise WireError(f"worker message {other!r} is not allowed here")


# --- decode worker <-> prefill worker ---------------------------------------------------------------


def peer_hello_to_pb(h: m.PeerHello) -> pb.PeerHello:
    return pb.PeerHello(
        worker_id=h.worker_id,
        fingerprint=h.fingerprint,
        transfer_offers=h.transfer_offers,
        wire_version=h.wire_version,
    )


def peer_hello_from_pb(h: pb.PeerHello) -> m.PeerHello:
    return m.PeerHello(
        worker_id=WorkerId(h.worker_id),
        fingerprint=h.fingerprint,
        transfer_offers=dict(h.transfer_offers),
        wire_version=h.wire_version,
    )


def reader_to_pb(message: m.ReaderMessage) -> pb.ReaderEnvelope:
    match message:
        case m.KVRequest(seq_id, epoch, first_block, request_number):
            ask = pb.KVRequest(
                seq_id=seq_id, epoch=epoch, first_block=first_block, request_number=request_number
            )
            return pb.ReaderEnvelope(ask=ask)
        case m.KVReleased(seq_id, epoch, taken):
            released = pb.KVReleased(seq_id=seq_id, epoch=epoch, taken=taken)
            return pb.ReaderEnvelope(released=released)
        case _:
            assert_never(message)


def reader_from_pb(envelope: pb.ReaderEnvelope) -> m.ReaderMessage:
    match envelope.WhichOneof("message"):
        case "ask":
            a = envelope.ask
            return m.KVRequest(SequenceId(a.seq_id), a.epoch, a.first_block, a.request_number)
        case "released":
            r = envelope.released
            return m.KVReleased(SequenceId(r.seq_id), r.epoch, r.taken)
        case other:
            raise WireError(f"reader message {other!r} is not allowed here")


def _grant_to_pb(g: m.KVGrant) -> pb.KVGrant:
    return pb.KVGrant(
        seq_id=g.seq_id,
        epoch=g.epoch,
        first_block=g.first_block,
        source_blocks=g.source_blocks,
        generations=g.generations,
        lease_s=g.lease_s,
        answers_request=g.answers_request,
        is_last=g.is_last,
        first_token=g.first_token,
        cached_token_count=g.cached_token_count,
        first_logprobs=v.logprobs_to_pb(g.first_logprobs) if g.first_logprobs else None,
        prompt_logprobs=v.prompt_logprobs_to_pb(g.prompt_logprobs),
        checksums=g.checksums,
    )


def _grant_from_pb(g: pb.KVGrant) -> m.KVGrant:
    if len(g.source_blocks) != len(g.generations):
        raise WireError("a grant names as many generations as blocks")
    return m.KVGrant(
        seq_id=SequenceId(g.seq_id),
        epoch=g.epoch,
        first_block=g.first_block,
        source_blocks=tuple(g.source_blocks),
        generations=tuple(g.generations),
        lease_s=g.lease_s,
        answers_request=g.answers_request,
        is_last=g.is_last,
        first_token=g.first_token if g.HasField("first_token") else None,
        cached_token_count=g.cached_token_count,
        first_logprobs=v.logprobs_from_pb(g.first_logprobs) if g.HasField("first_logprobs") else None,
        prompt_logprobs=v.prompt_logprobs_from_pb(g.prompt_logprobs)
        if g.HasField("prompt_logprobs")
        else None,
        checksums=tuple(g.checksums),
    )


def source_to_pb(message: m.SourceMessage) -> pb.SourceEnvelope:
    match message:
        case m.KVGrant():
            return pb.SourceEnvelope(grant=_grant_to_pb(message))
        case m.KVRefused(seq_id, epoch, text):
            refused = pb.KVRefused(seq_id=seq_id, epoch=epoch, message=text)
            return pb.SourceEnvelope(refused=refused)
        case _:
            assert_never(message)


def source_from_pb(envelope: pb.SourceEnvelope) -> m.SourceMessage:
    match envelope.WhichOneof("message"):
        case "grant":
            return _grant_from_pb(envelope.grant)
        case "refused":
            r = envelope.refused
            return m.KVRefused(SequenceId(r.seq_id), r.epoch, r.message)
        case other:
            raise WireError(f"source message {other!r} is not allowed here")


# --- membership -------------------------------------------------------------------------------------


def role_to_pb(role: m.Role) -> Any:
    return v.number(_ROLE, role)


def role_from_pb(role: int) -> m.Role:
    return v.member(_ROLE, role)


def member_to_pb(x: m.Member) -> pb.Member:
    return pb.Member(
        worker_id=x.worker_id,
        role=v.number(_ROLE, x.role),
        address=x.address,
        model=x.model,
        fingerprint=x.fingerprint,
        is_draining=x.is_draining,
        metrics_address=x.metrics_address,
        host=x.host,
        pid=x.pid,
        notes=x.notes,
        node=x.node,
        version=x.version,
        is_suspect=x.is_suspect,
    )


def member_from_pb(x: pb.Member) -> m.Member:
    return m.Member(
        worker_id=WorkerId(x.worker_id),
        role=v.member(_ROLE, x.role),
        address=x.address,
        model=x.model,
        fingerprint=x.fingerprint,
        is_draining=x.is_draining,
        metrics_address=x.metrics_address,
        host=x.host,
        pid=x.pid,
        notes=tuple(x.notes),
        node=x.node,
        version=x.version,
        is_suspect=x.is_suspect,
    )


def view_to_pb(view: m.MembershipView) -> pb.MembershipView:
    return pb.MembershipView(
        directory_life=view.directory_life,
        version=view.version,
        members=[member_to_pb(x) for x in view.members],
        routers=[router_member_to_pb(x) for x in view.routers],
    )


def view_from_pb(view: pb.MembershipView) -> m.MembershipView:
    return m.MembershipView(
        directory_life=view.directory_life,
        version=view.version,
        members=tuple(map(member_from_pb, view.members)),
        routers=tuple(map(router_member_from_pb, view.routers)),
    )
