import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import BlockId, SeqKey, SequenceId
from baton.core.messages import AdapterRef
from baton.core.sampling import SamplingParams
from baton.core.steps import StepItem, StepPlan
from engine.parallel.order_codec import OrderDecoder, OrderEncoder
from engine.parallel.orders import DropAdapter, InstallAdapter, ReadAdapter
from tests.unit.engine.parallel.plans import plan

keys = st.builds(
    SeqKey, st.sampled_from([SequenceId("a/0"), SequenceId("b/0"), SequenceId("ü")]), st.integers(0, 2)
)
numbers = st.integers(0, 2**31)
tuples = st.lists(st.integers(0, 3), max_size=5).map(tuple)
samplings = st.sampled_from(
    [SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, seed=2**64 - 1, top_k=3)]
)
items = st.builds(
    StepItem,
    key=keys,
    tokens=st.lists(st.integers(-1, 9), max_size=3).map(tuple),
    first_position=numbers,
    block_ids=tuples,
    sample_index=st.none() | numbers,
    sampling=samplings,
    draft_count=st.integers(0, 3),
    prompt_token_count=st.integers(0, 5),
    history=st.none() | tuples,
    want_drafts=st.integers(0, 2),
    next_prompt_token=st.none() | numbers,
    adapter=st.sampled_from(["", "poet"]),
    wants_embedding=st.booleans(),
)
pairs = st.lists(st.tuples(numbers, numbers), max_size=2).map(tuple)
step_plans = st.builds(
    StepPlan,
    items=st.lists(items, max_size=4).map(tuple),
    step_number=numbers,
    copies=pairs,
    swap_out=pairs,
    swap_in=pairs,
    ended=st.lists(keys, max_size=3).map(tuple),
)


def _decoded_on(item, token):
    return msgspec.structs.replace(
        item,
        tokens=(token,),
        first_position=item.first_position + 1,
        sample_index=None if item.sample_index is None else item.sample_index + 1,
    )


@st.composite
def sequences_of_plans(draw):
    """Some plans are new; in others some items of the one before decode on, at their places or not."""
    plans = [draw(step_plans)]
    for one in draw(st.lists(step_plans, max_size=7)):
        if draw(st.booleans()):
            kept = draw(st.lists(st.sampled_from(plans[-1].items), max_size=4)) if plans[-1].items else []
            if draw(st.booleans()):
                kept = plans[-1].items
            went_on = [_decoded_on(item, draw(st.integers(-1, 9))) for item in kept]
            one = msgspec.structs.replace(one, items=(*went_on, *one.items))
        plans.append(one)
    return plans


@settings(deadline=None)
@given(sequences_of_plans(), st.integers(1, 4))
def test_plans_come_out_as_they_went_in(plans, remembered_max):
    encoder, decoder = (one(remembered_max=remembered_max) for one in (OrderEncoder, OrderDecoder))
    for one in plans:
        decoded = decoder.decode(memoryview(encoder.encode(one)))
        assert decoded == one
        assert all(type(item.key) is SeqKey for item in decoded.items)
        assert all(type(key) is SeqKey for key in decoded.ended)


def test_only_what_is_new_travels():
    encoder = OrderEncoder()
    first = plan(1, 4, block_count=5000)
    grown = tuple(
        msgspec.structs.replace(item, block_ids=(*item.block_ids, BlockId(7))) for item in first.items
    )
    assert len(encoder.encode(first)) > 50_000
    assert len(encoder.encode(msgspec.structs.replace(first, items=grown))) < 1000


def test_an_item_that_decodes_on_is_its_token():
    encoder, decoder = OrderEncoder(), OrderDecoder()
    first = plan(1, 64, block_count=5000)
    decoder.decode(encoder.encode(first))
    second = msgspec.structs.replace(first, items=tuple(_decoded_on(item, 7) for item in first.items))
    data = encoder.encode(second)
    assert len(data) < 2 * 64
    assert decoder.decode(data) == second


def test_a_plan_that_goes_on_from_nothing_is_noticed():
    encoder = OrderEncoder()
    first = plan(1, 2)
    encoder.encode(first)
    going_on = msgspec.structs.replace(first, items=tuple(_decoded_on(item, 7) for item in first.items))
    with pytest.raises(ValueError, match="place 0 of one with 0 items"):
        OrderDecoder().decode(encoder.encode(going_on))


def test_a_lost_plan_is_noticed():
    encoder, decoder = OrderEncoder(), OrderDecoder()
    encoder.encode(plan(1, 1))
    with pytest.raises(ValueError, match="not known here"):
        decoder.decode(encoder.encode(plan(1, 1)))


@pytest.mark.parametrize(
    "order",
    [
        ReadAdapter(AdapterRef("poet", "/adapters/poet", "5eed")),
        InstallAdapter("poet"),
        DropAdapter("poet"),
    ],
)
def test_other_orders_pass_between_plans(order):
    encoder, decoder = OrderEncoder(), OrderDecoder()
    for sent in (plan(1, 2), order, plan(2, 2)):
        assert decoder.decode(encoder.encode(sent)) == sent


@pytest.mark.parametrize("data", [b"", b"x", b"\x93\x01\x02\x03", b"p\x93\x01\x02\x03", b"o\x90"])
def test_bytes_of_something_else_are_refused(data):
    with pytest.raises((msgspec.DecodeError, ValueError)):
        OrderDecoder().decode(data)
