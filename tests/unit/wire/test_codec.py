"""Every message survives the wire, whatever its values. Messages are built from the types of their
fields, so a field that the codec forgets fails here."""

import types
import typing
from collections.abc import Sequence
from enum import StrEnum

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core import messages as m
from baton.core.hashing import HASH_BYTES
from baton.core.ids import BlockHash
from baton.core.sampling import SamplingParams
from baton.core.steps import TokenLogprobs
from baton.core.store import Holding, NodeRef, StoreChanges, StoreMember, Tier
from baton.wire import codec, directory_codec
from baton.wire.proto import baton_pb2 as pb

u31 = st.integers(1, 2**31 - 1)
u64 = st.integers(1, 2**64 - 1)
SPECIAL = {
    (SamplingParams, "seed"): u64,
    (m.StartSequence, "priority"): st.integers(-(2**31), 2**31 - 1),
    (m.SequenceOutput, "embedding"): st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(tuple),
    (m.KVGrant, "generations"): st.just(()),  # as many as blocks: see `grown`
}
PLAIN = {
    int: u31,
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=12),
    BlockHash: st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES),
    bytes: st.binary(max_size=9),
}


def values(kind) -> st.SearchStrategy:
    """Of a type as the vocabulary uses them."""
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, typing.NewType):
        return values(kind.__supertype__)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([st.none() if a is type(None) else values(a) for a in args])
    if origin is Sequence or (origin is tuple and args[-1] is ...):
        return st.lists(values(args[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if issubclass(kind, StrEnum):
        return st.sampled_from(kind)
    assert issubclass(kind, msgspec.Struct), kind
    hints = typing.get_type_hints(kind)
    fields = {
        f: SPECIAL[kind, f] if (kind, f) in SPECIAL else values(hints[f]) for f in kind.__struct_fields__
    }
    return st.builds(kind, **fields).map(grown)


def grown(value):
    if isinstance(value, m.StepOutput):  # what is tokens and nothing else goes first
        bare = [msgspec.structs.replace(o, finish=None, logprobs=(), embedding=()) for o in value.outputs]
        bare = [
            msgspec.structs.replace(o, cached_token_count=None, prompt_logprobs=None, timings=None)
            for o in bare
        ]
        return m.StepOutput(tuple(sorted(value.outputs, key=lambda o: o not in bare)))
    if not isinstance(value, m.KVGrant):
        return value
    return msgspec.structs.replace(value, generations=tuple(2**64 - 1 - b for b in value.source_blocks))


def over_the_wire(to_pb, from_pb, value):
    message = to_pb(value)
    return from_pb(type(message).FromString(message.SerializeToString()))


ROUTER = (codec.router_to_pb, codec.router_from_pb)
WORKER = (codec.worker_to_pb, codec.worker_from_pb)
READER = (codec.reader_to_pb, codec.reader_from_pb)
SOURCE = (codec.source_to_pb, codec.source_from_pb)
WAYS = {
    **dict.fromkeys(m.RouterMessage.__args__, ROUTER),
    **dict.fromkeys(m.WorkerMessage.__args__, WORKER),
    **dict.fromkeys(m.ReaderMessage.__args__, READER),
    **dict.fromkeys(m.SourceMessage.__args__, SOURCE),
    m.PeerHello: (codec.peer_hello_to_pb, codec.peer_hello_from_pb),
    m.MembershipView: (codec.view_to_pb, codec.view_from_pb),
    StoreMember: (directory_codec.store_member_to_pb, directory_codec.store_member_from_pb),
    StoreChanges: (directory_codec.store_changes_to_pb, directory_codec.store_changes_from_pb),
}


@pytest.mark.parametrize("kind", WAYS, ids=lambda kind: kind.__name__)
def test_survives(kind):
    @settings(max_examples=40, deadline=None)
    @given(values(kind))
    def check(message):
        assert over_the_wire(*WAYS[kind], message) == message

    check()


def full(kind):
    """A value of which no field has its default, nor what protobuf takes for unset."""
    if kind in (int, float):
        return kind(7)
    if kind in (str, bool, bytes, BlockHash):
        return {str: "text", bool: True, bytes: b"raw", BlockHash: b"h" * HASH_BYTES}[kind]
    if isinstance(kind, typing.NewType):
        return full(kind.__supertype__)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return full(next(a for a in args if a is not type(None)))
    if origin in (tuple, Sequence):
        return (full(args[0]),) * 2 if origin is Sequence or args[-1] is ... else tuple(map(full, args))
    if origin is dict:
        return {full(args[0]): full(args[1])}
    if issubclass(kind, StrEnum):
        return list(kind)[-1]
    hints = typing.get_type_hints(kind)
    on = [field.name for field in msgspec.structs.fields(kind) if field.default is True]
    fields = {field: full(hints[field]) for field in kind.__struct_fields__}
    value = kind(**{**fields, **dict.fromkeys(on, False)})
    assert all(getattr(value, field.name) != field.default for field in msgspec.structs.fields(kind))
    return value


@pytest.mark.parametrize("kind", WAYS, ids=lambda kind: kind.__name__)
def test_no_field_is_left_at_home(kind):
    message = full(kind)
    assert over_the_wire(*WAYS[kind], message) == message


def test_none_and_empty_differ():
    for prompt_logprobs in (None, ()):
        output = m.SequenceOutput("s", 1, 0, (), prompt_logprobs=prompt_logprobs)
        step = over_the_wire(*WORKER, m.StepOutput((output,)))
        assert step.outputs[0].prompt_logprobs == prompt_logprobs
    for wanted in (None, 0):
        params = SamplingParams(1, logprobs=wanted, prompt_logprobs=wanted)
        start = m.StartSequence("s", 1, m.Phase.AGGREGATED, (1,), 1, params, b"h" * HASH_BYTES, 1.0)
        assert over_the_wire(*ROUTER, start).sampling == params


def test_an_empty_envelope_is_refused():
    with pytest.raises(codec.WireError):
        codec.worker_from_pb(pb.WorkerEnvelope())
    with pytest.raises(codec.WireError):
        codec.router_from_pb(pb.RouterEnvelope())


def test_what_a_correct_peer_never_sends_is_refused():
    start = m.StartSequence("s", 1, m.Phase.AGGREGATED, (1,), 1, SamplingParams(1), b"h" * HASH_BYTES, 1.0)
    envelope = codec.router_to_pb(start)
    envelope.start.phase = 0
    with pytest.raises(codec.WireError):
        codec.router_from_pb(envelope)
    short = msgspec.structs.replace(start, cache_root=b"short")
    with pytest.raises(codec.WireError):
        codec.router_from_pb(codec.router_to_pb(short))
    envelope = codec.router_to_pb(start)
    envelope.start.sampling.logit_bias_ids.append(3)
    with pytest.raises(codec.WireError):
        codec.router_from_pb(envelope)
    for column in ("seq_ids", "epochs", "first_indices", "token_counts", "tokens"):
        envelope = codec.worker_to_pb(m.StepOutput((m.SequenceOutput("s", 1, 2, (3, 4)),)))
        getattr(envelope.step.plain, column).append("x" if column == "seq_ids" else 1)
        with pytest.raises(codec.WireError):
            codec.worker_from_pb(envelope)
    grant = codec.source_to_pb(m.KVGrant("s", 1, 0, (), (), 1.0, first_logprobs=TokenLogprobs(1, -1.0, 1)))
    grant.grant.first_logprobs.top_ids.append(3)
    with pytest.raises(codec.WireError):
        codec.source_from_pb(grant)


HOLDINGS = (directory_codec.holdings_to_pb, directory_codec.holdings_from_pb)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from(Tier)), max_size=4))
def test_holders_survive(named):
    found = [tuple(Holding(NodeRef(n, f"{n}:1"), held[n]) for n in sorted(held)) for held in named]
    assert over_the_wire(*HOLDINGS, found) == found


def test_a_store_node_never_sends_these():
    sent = StoreChanges("a", 2, ((b"h" * HASH_BYTES, Tier.SSD),), (b"r" * HASH_BYTES,))
    for field, raw in (
        *(("stored_tiers", bytes(raw)) for raw in ((), (1, 1), (0,), (9,))),
        ("stored", b"short"),
        ("removed", b"short"),
    ):
        changes = directory_codec.store_changes_to_pb(sent)
        setattr(changes, field, raw)
        with pytest.raises(codec.WireError):
            directory_codec.store_changes_from_pb(changes)
    for tiers in (b"", b"\1\1", b"\t"):
        reply = directory_codec.holdings_to_pb([(Holding(NodeRef("a", "a:1"), Tier.HOST),)])
        reply.nodes[0].tiers = tiers
        with pytest.raises(codec.WireError):
            directory_codec.holdings_from_pb(reply)
    with pytest.raises(codec.WireError):
        directory_codec.hashes_from_pb(pb.LookUpBlocksRequest(hashes=b"short"))
