"""Every message survives the wire, whatever its values."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import messages as m
from baton.core.hashing import HASH_BYTES
from baton.core.sampling import FinishReason, SamplingParams
from baton.wire import codec
from baton.wire.proto import baton_pb2 as pb

u31 = st.integers(0, 2**31 - 1)
text = st.text(max_size=20)
seconds = st.floats(0, 1e9, allow_nan=False)
hashes = st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES)
tokens = st.lists(u31, max_size=20).map(tuple)
roles = st.sampled_from(m.Role)

sampling = st.builds(
    SamplingParams,
    max_tokens=u31,
    temperature=seconds,
    top_p=seconds,
    top_k=u31,
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=tokens,
    ignore_eos=st.booleans(),
)
router_messages = st.one_of(
    st.builds(
        m.StartSequence,
        seq_id=text,
        epoch=u31,
        leg=st.sampled_from(m.Leg),
        tokens=tokens,
        prompt_token_count=u31,
        sampling=sampling,
        cache_root=hashes,
        time_left_s=seconds,
        source=st.none() | st.builds(m.PeerRef, text, text),
        traceparent=text,
    ),
    st.builds(m.CancelSequence, text, u31),
    st.just(m.ResyncBlocks()),
)
outputs = st.builds(
    m.SequenceOutput,
    seq_id=text,
    epoch=u31,
    first_index=u31,
    tokens=tokens,
    finish=st.none() | st.sampled_from(FinishReason),
    cached_token_count=st.none() | u31,
)
worker_messages = st.one_of(
    st.builds(
        m.WorkerHello,
        worker_id=text,
        role=roles,
        fingerprint=text,
        model=text,
        block_tokens=u31,
        block_count=u31,
        max_model_tokens=u31,
        wire_version=u31,
    ),
    st.builds(m.StepOutput, st.lists(outputs, max_size=4).map(tuple)),
    st.builds(m.SequenceJoined, text, u31, u31, seconds, seconds),
    st.builds(m.SequenceRefused, text, u31, st.sampled_from(m.RefusalReason), text),
    st.builds(m.SequenceFailed, text, u31, st.sampled_from(m.FailureReason), text),
    st.builds(
        m.BlockEvents,
        u31,
        st.lists(hashes, max_size=4).map(tuple),
        st.lists(hashes, max_size=4).map(tuple),
        st.booleans(),
    ),
    st.builds(m.LoadReport, roles, st.booleans(), u31, u31, u31, u31, seconds),
)
asker_messages = st.one_of(
    st.builds(m.AskKV, text, u31, u31, u31), st.builds(m.KVReleased, text, u31, st.booleans())
)
grants = st.integers(0, 5).flatmap(
    lambda count: st.builds(
        m.KVGrant,
        seq_id=text,
        epoch=u31,
        first_block=u31,
        source_blocks=st.tuples(*[u31] * count),
        generations=st.tuples(*[st.integers(0, 2**64 - 1)] * count),
        lease_s=seconds,
        answers_ask=u31,
        is_last=st.booleans(),
        first_token=st.none() | u31,
        cached_token_count=u31,
    )
)
source_messages = st.one_of(grants, st.builds(m.KVRefused, text, u31, text))
notes = st.lists(text, max_size=2).map(tuple)
members = st.builds(m.Member, text, roles, text, text, text, st.booleans(), text, text, u31, notes)


@given(router_messages)
def test_router_messages_survive(message):
    raw = codec.router_to_pb(message).SerializeToString()
    assert codec.router_from_pb(pb.RouterEnvelope.FromString(raw)) == message


@given(worker_messages)
def test_worker_messages_survive(message):
    raw = codec.worker_to_pb(message).SerializeToString()
    assert codec.worker_from_pb(pb.WorkerEnvelope.FromString(raw)) == message


@given(asker_messages)
def test_asker_messages_survive(message):
    raw = codec.asker_to_pb(message).SerializeToString()
    assert codec.asker_from_pb(pb.AskerEnvelope.FromString(raw)) == message


@given(source_messages)
def test_source_messages_survive(message):
    raw = codec.source_to_pb(message).SerializeToString()
    assert codec.source_from_pb(pb.SourceEnvelope.FromString(raw)) == message


@given(st.builds(m.MembershipView, text, u31, st.lists(members, max_size=3).map(tuple)))
def test_membership_survives(view):
    raw = codec.view_to_pb(view).SerializeToString()
    assert codec.view_from_pb(pb.MembershipView.FromString(raw)) == view


@given(st.builds(m.PeerHello, text, text, st.dictionaries(text, st.binary(max_size=9)), u31))
def test_peer_hello_survives(hello):
    raw = codec.peer_hello_to_pb(hello).SerializeToString()
    assert codec.peer_hello_from_pb(pb.PeerHello.FromString(raw)) == hello


@pytest.mark.parametrize("union", [m.RouterMessage, m.WorkerMessage, m.AskerMessage, m.SourceMessage])
def test_every_message_is_in_the_tests_above(union):
    tested = {m.RouterMessage: 3, m.WorkerMessage: 7, m.AskerMessage: 2, m.SourceMessage: 2}
    assert len(union.__args__) == tested[union]


def test_an_empty_envelope_is_refused():
    with pytest.raises(codec.WireError):
        codec.worker_from_pb(pb.WorkerEnvelope())
    with pytest.raises(codec.WireError):
        codec.router_from_pb(pb.RouterEnvelope())


def test_an_unspecified_enum_and_a_short_hash_are_refused():
    start = m.StartSequence("s", 1, m.Leg.WHOLE, (1,), 1, SamplingParams(1), b"h" * HASH_BYTES, 1.0)
    envelope = codec.router_to_pb(start)
    envelope.start.leg = 0
    with pytest.raises(codec.WireError):
        codec.router_from_pb(envelope)
    short = msgspec.structs.replace(start, cache_root=b"short")
    with pytest.raises(codec.WireError):
        codec.router_from_pb(codec.router_to_pb(short))
