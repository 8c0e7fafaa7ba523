"""Every message survives the wire, whatever its values. Messages are those that the services reach, and their
values are built from the types of their fields, so a field that the mapping forgets fails here."""

import types
import typing
from collections.abc import Mapping, Sequence
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
from baton.core.store import BlockLocation, NodeRef, StoreChanges, Tier
from baton.core.wire_types import OneFor, Scalar
from baton.wire import block_locations
from baton.wire.decoding import WireError
from baton.wire.generate.declared import MessagePlan, sections
from baton.wire.generate.names import function_prefix
from baton.wire.proto import baton_pb2 as pb
from baton.wire.proto import mapping
from baton.wire.services import ENVELOPES

UINT32 = st.integers(0, 2**32 - 1)
NUMBERS = {
    "uint32": UINT32,
    "uint64": st.integers(0, 2**64 - 1),
    "fixed64": st.integers(0, 2**64 - 1),
    "sint32": st.integers(-(2**31), 2**31 - 1),
    "sint64": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
}
PLAIN = {
    int: UINT32,
    float: NUMBERS["double"],
    bool: st.booleans(),
    str: st.text(max_size=12),
    BlockHash: st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES),
    bytes: st.binary(max_size=9),
}


def values(kind) -> st.SearchStrategy:
    """Values of a type as messages use them."""
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, typing.NewType):
        return values(kind.__supertype__)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        scalars = [mark for mark in args[1:] if isinstance(mark, Scalar)]
        return NUMBERS[scalars[0].name] if scalars else values(args[0])
    if origin in (typing.Union, types.UnionType):
        return st.one_of([st.none() if a is type(None) else values(a) for a in args])
    if origin is Sequence or (origin is tuple and args[-1] is ...):
        return st.lists(values(args[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if origin in (dict, Mapping):
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if issubclass(kind, StrEnum):
        return st.sampled_from(kind)
    assert issubclass(kind, msgspec.Struct), kind
    return structs(kind)


@st.composite
def structs(draw, kind):
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {}
    for name in kind.__struct_fields__:
        fields[name] = draw(values(hints[name]))
        for mark in marks(hints[name], OneFor):
            each = values(typing.get_args(typing.get_args(hints[name])[0])[0])
            count = len(fields[mark.field])
            fields[name] = tuple(draw(st.lists(each, min_size=count, max_size=count)))
    return plain_first(kind(**fields))


def marks(hint, kind):
    if typing.get_origin(hint) is not typing.Annotated:
        return []
    return [mark for mark in typing.get_args(hint)[1:] if isinstance(mark, kind)]


def plain_first(value):
    """Outputs that are tokens and nothing else leave the wire before the others."""
    if not isinstance(value, m.StepOutput):
        return value
    rest = dict.fromkeys(("finish", "cached_token_count", "prompt_logprobs", "timings"))
    bare = [msgspec.structs.replace(o, logprobs=(), embedding=(), **rest) for o in value.outputs]
    return m.StepOutput(tuple(sorted(value.outputs, key=lambda o: o not in bare)))


MESSAGES = [plan.struct for section in sections() for plan in section.plans if isinstance(plan, MessagePlan)]
VARIANTS = [
    (envelope, variant)
    for envelope in ENVELOPES
    for variant in envelope.variants
    if variant not in envelope.openings
]


def ways(name):
    prefix = function_prefix(name)
    return getattr(mapping, f"{prefix}_to_pb"), getattr(mapping, f"{prefix}_from_pb")


def over_the_wire(to_pb, from_pb, value):
    message = to_pb(value)
    return from_pb(type(message).FromString(message.SerializeToString()))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_survives(kind):
    @settings(max_examples=40, deadline=None)
    @given(structs(kind))
    def check(message):
        assert over_the_wire(*ways(kind.__name__), message) == message

    check()


@pytest.mark.parametrize(("envelope", "kind"), VARIANTS, ids=lambda x: getattr(x, "__name__", x))
def test_survives_in_its_envelope(envelope, kind):
    @settings(max_examples=20, deadline=None)
    @given(structs(kind))
    def check(message):
        assert over_the_wire(*ways(envelope.name), message) == message

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
    if origin is typing.Annotated:
        return full(args[0])
    if origin in (typing.Union, types.UnionType):
        return full(next(a for a in args if a is not type(None)))
    if origin in (tuple, Sequence):
        return (full(args[0]),) * 2 if origin is Sequence or args[-1] is ... else tuple(map(full, args))
    if origin in (dict, Mapping):
        return {full(args[0]): full(args[1])}
    if issubclass(kind, StrEnum):
        return list(kind)[-1]
    hints = typing.get_type_hints(kind, include_extras=True)
    on = [field.name for field in msgspec.structs.fields(kind) if field.default is True]
    fields = {field: full(hints[field]) for field in kind.__struct_fields__}
    value = kind(**{**fields, **dict.fromkeys(on, False)})
    assert all(getattr(value, field.name) != field.default for field in msgspec.structs.fields(kind))
    return value


@pytest.mark.parametrize(
    "kind", [kind for kind in MESSAGES if kind.__struct_fields__], ids=lambda kind: kind.__name__
)
def test_no_field_is_left_at_home(kind):
    message = full(kind)
    assert over_the_wire(*ways(kind.__name__), message) == message


ROUTER, WORKER, READER, OWNER = (ways(envelope.name) for envelope in ENVELOPES[:4])


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
    with pytest.raises(WireError):
        WORKER[1](pb.WorkerEnvelope())
    with pytest.raises(WireError):
        ROUTER[1](pb.RouterEnvelope())


def test_a_hello_in_the_middle_of_a_session_is_refused():
    with pytest.raises(WireError, match="router_hello"):
        ROUTER[1](ROUTER[0](m.RouterHello("r")))
    for to_pb, from_pb in (READER, OWNER):
        with pytest.raises(WireError, match="peer_hello"):
            from_pb(to_pb(m.PeerHello("w", "f", ())))


def test_lists_that_belong_together_have_one_length():
    envelope = OWNER[0](m.KVGrant("s", 1, 0, (4,), (7,), 1.0))
    envelope.kv_grant.generations.append(8)
    with pytest.raises(WireError, match="source_blocks, generations"):
        OWNER[1](envelope)


def test_hashes_that_are_cut_off_are_refused():
    envelope = WORKER[0](m.BlockEvents(1, (b"h" * HASH_BYTES,)))
    envelope.block_events.stored += b"h"
    with pytest.raises(WireError):
        WORKER[1](envelope)
    update = pb.RouterUpdate(expected=[pb.ExpectedBlocks(worker_id="w", hashes=b"short")])
    with pytest.raises(WireError):
        mapping.router_update_from_pb(update)


@pytest.mark.parametrize("role", [0, 9])
def test_an_enum_value_of_another_release_is_refused(role):
    with pytest.raises(WireError, match=f"enum value {role}"):
        mapping.role_request_from_pb(pb.RoleRequest(role=role))
    with pytest.raises(WireError):
        mapping.pool_from_pb(pb.Pool(counts={"wanderer": 1}))


def test_an_order_without_an_action_is_refused():
    with pytest.raises(WireError):
        mapping.order_from_pb(pb.Order(who="operator"))


def test_what_a_correct_peer_never_sends_is_refused():
    start = m.StartSequence("s", 1, m.Phase.AGGREGATED, (1,), 1, SamplingParams(1), b"h" * HASH_BYTES, 1.0)
    envelope = ROUTER[0](start)
    envelope.start_sequence.phase = 0
    with pytest.raises(WireError):
        ROUTER[1](envelope)
    short = msgspec.structs.replace(start, cache_root=b"short")
    with pytest.raises(WireError):
        ROUTER[1](ROUTER[0](short))
    envelope = ROUTER[0](start)
    envelope.start_sequence.sampling.logit_bias_ids.append(3)
    with pytest.raises(WireError):
        ROUTER[1](envelope)
    for column in ("seq_ids", "epochs", "first_indices", "token_counts", "tokens"):
        envelope = WORKER[0](m.StepOutput((m.SequenceOutput("s", 1, 2, (3, 4)),)))
        getattr(envelope.step_columns.plain, column).append("x" if column == "seq_ids" else 1)
        with pytest.raises(WireError):
            WORKER[1](envelope)
    grant = OWNER[0](m.KVGrant("s", 1, 0, (), (), 1.0, first_logprobs=TokenLogprobs(1, -1.0, 1)))
    grant.kv_grant.first_logprobs.top_ids.append(3)
    with pytest.raises(WireError):
        OWNER[1](grant)


LOOK_UP_TO_PB, LOOK_UP_FROM_PB = ways("LookUpReply")


def locations_to_pb(found):
    return LOOK_UP_TO_PB(block_locations.pack(found))


def locations_from_pb(reply):
    return block_locations.unpack(LOOK_UP_FROM_PB(reply))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from(Tier)), max_size=4))
def test_holders_survive(named):
    found = [tuple(BlockLocation(NodeRef(n, f"{n}:1"), held[n]) for n in sorted(held)) for held in named]
    assert over_the_wire(locations_to_pb, locations_from_pb, found) == found


def test_a_store_node_never_sends_these():
    sent = StoreChanges("a", 2, ((b"h" * HASH_BYTES, Tier.SSD),), (b"r" * HASH_BYTES,))
    for field, raw in (
        *(("stored_tiers", bytes(raw)) for raw in ((), (1, 1), (0,), (9,))),
        ("stored", b"short"),
        ("removed", b"short"),
    ):
        changes = mapping.store_changes_to_pb(sent)
        if field == "stored_tiers":
            changes.stored_tiers[:] = raw
        else:
            setattr(changes, field, raw)
        with pytest.raises(WireError):
            mapping.store_changes_from_pb(changes)
    for tiers in (b"", b"\1\1", b"\t"):
        reply = locations_to_pb([(BlockLocation(NodeRef("a", "a:1"), Tier.HOST),)])
        reply.nodes[0].tiers[:] = tiers
        with pytest.raises(WireError):
            locations_from_pb(reply)
    with pytest.raises(WireError):
        mapping.look_up_request_from_pb(pb.LookUpRequest(hashes=b"short"))
