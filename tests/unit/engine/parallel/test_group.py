"""What every backend of `engine.parallel.group.Group` does. The ranks are threads."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.parallel.group import GroupBroken
from tests.unit.engine.parallel.threads import BACKENDS, on_all, ranks, values

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
backends = st.sampled_from(sorted(BACKENDS))
every_backend = pytest.mark.parametrize("backend", sorted(BACKENDS))


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def inputs(size, count, dtype, seed):
    """Numbers of many magnitudes, the smallest included, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for _ in range(size):
        x = torch.randn(count, generator=generator)
        scale = torch.randint(-30, 5, (count,), generator=generator).float().exp2()
        tensors.append((x * scale).to(dtype))
    return tensors


def summed(tensors):
    """The sum in the order of ranks, in float32, rounded once."""
    total = tensors[0].float().clone()
    for x in tensors[1:]:
        total += x.float()
    return total.to(tensors[0].dtype)


@settings(max_examples=60, deadline=None)
@given(backends, st.integers(1, 4), st.integers(0, 700), st.sampled_from(DTYPES), st.integers(0, 2**31))
@example("shared_memory", 3, 300_001, torch.bfloat16, 1)
@example("shared_memory", 2, 200_003, torch.float16, 2)
@example("shared_memory", 4, 33_000, torch.float32, 3)
@example("small_chunks", 2, 40_001, torch.bfloat16, 4)
def test_all_reduce_sums_in_the_order_of_ranks_to_the_bit(backend, size, count, dtype, seed):
    parts = inputs(size, count, dtype, seed)
    with ranks(backend, size) as groups:
        for _ in range(2):
            results = values(on_all(groups, lambda g: g.all_reduce_(parts[g.rank].clone())))
            assert all(same_bits(result, summed(parts)) for result in results)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_reduce_rounds_every_number_as_torch_does(backend, dtype):
    # All numbers of sixteen bits but NaNs, as the sum of themselves and a number that makes ties.
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[~every.isnan()]
    other = every.roll(12345)
    with ranks(backend, 2) as groups:
        results = values(on_all(groups, lambda g: g.all_reduce_((every, other)[g.rank].clone())))
    expected = summed([every, other])
    for result in results:
        assert torch.equal(result.isnan(), expected.isnan())
        known = ~expected.isnan()
        assert same_bits(result[known], expected[known])


@every_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_and_infinity_stay_what_they_are(backend, dtype):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), float("inf"), 1.0], dtype=dtype)
    y = torch.tensor([1.0, 1.0, 1.0, -float("inf"), float("nan")], dtype=dtype)
    with ranks(backend, 2) as groups:
        for result in values(on_all(groups, lambda g: g.all_reduce_((x, y)[g.rank].clone()))):
            assert result.isnan().tolist() == [True, False, False, True, True]
            assert result[1] == float("inf")
            assert result[2] == -float("inf")


@st.composite
def gathers(draw):
    size = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    lengths = draw(st.lists(st.integers(0, 90), min_size=size, max_size=size))
    return size, shape, dim, lengths


@settings(max_examples=60, deadline=None)
@given(backends, gathers(), st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
def test_gather_puts_unequal_parts_in_order(backend, case, dtype):
    size, shape, dim, lengths = case
    parts = []
    for rank, length in enumerate(lengths):
        shape[dim] = length
        parts.append(((torch.arange(torch.Size(shape).numel()) + 50 * rank) % 251).to(dtype).reshape(shape))
    expected, root = torch.cat(parts, dim), size - 1
    with ranks(backend, size) as groups:
        for result in values(on_all(groups, lambda g: g.all_gather(parts[g.rank], dim, sizes=lengths))):
            assert torch.equal(result, expected)
        results = values(on_all(groups, lambda g: g.gather(parts[g.rank], dim, sizes=lengths, to=root)))
        assert results[:root] == [None] * root
        assert torch.equal(results[root], expected)


@every_backend
def test_parts_that_are_not_contiguous_are_gathered(backend):
    whole = torch.arange(24.0).reshape(4, 6)
    with ranks(backend, 2) as groups:
        results = values(on_all(groups, lambda g: g.all_gather(whole.t()[g.rank * 3 : g.rank * 3 + 3])))
    assert all(torch.equal(result, whole.t()) for result in results)


@settings(max_examples=40, deadline=None)
@given(
    backends,
    st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, 40), min_size=n, max_size=n)),
    st.integers(1, 7),
    st.sampled_from(DTYPES),
    st.integers(0, 2**31),
)
def test_reduce_scatter_gives_each_rank_its_rows_of_the_sum(backend, sizes, width, dtype, seed):
    parts = [x.reshape(sum(sizes), width) for x in inputs(len(sizes), sum(sizes) * width, dtype, seed)]
    expected = summed(parts).split(sizes)
    with ranks(backend, len(sizes)) as groups:
        results = values(on_all(groups, lambda g: g.reduce_scatter(parts[g.rank], sizes=sizes)))
    assert all(same_bits(result, part) for result, part in zip(results, expected, strict=True))


@every_backend
@pytest.mark.parametrize("count", [0, 1, 5, 100_000])
def test_broadcast_gives_every_rank_the_source_s_numbers(backend, count):
    with ranks(backend, 3) as groups:
        results = values(
            on_all(groups, lambda g: g.broadcast_(torch.full((count,), g.rank, dtype=torch.int64), source=1))
        )
    assert all(torch.equal(result, torch.ones(count, dtype=torch.int64)) for result in results)


@settings(max_examples=30, deadline=None)
@given(backends, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=6))
def test_messages_arrive_in_order_whatever_their_size(backend, shapes):
    sent = [torch.randn(shape) for shape in shapes]

    def relay(group):
        """Rank 0 to 1, 1 to 2, 2 to 0, as stages do."""
        arrived = []
        for x in sent:
            if group.rank:
                x = group.recv(x.shape, x.dtype, group.rank - 1)
            group.send(x, (group.rank + 1) % 3)
            if not group.rank:
                x = group.recv(x.shape, x.dtype, 2)
            arrived.append(x)
        return arrived

    with ranks(backend, 3) as groups:
        for arrived in values(on_all(groups, relay)):
            assert all(torch.equal(x, y) for x, y in zip(arrived, sent, strict=True))


@pytest.mark.parametrize("backend", ["shared_memory", "sockets"])
def test_a_message_that_fits_is_sent_before_it_is_received(backend):
    x = torch.randn(100, 300)
    with ranks(backend, 2) as groups:
        groups[0].send(x, 1)
        groups[0].send(x + 1, 1)
        assert torch.equal(groups[1].recv(x.shape, x.dtype, 0), x)
        assert torch.equal(groups[1].recv(x.shape, x.dtype, 0), x + 1)


CALLS = {
    "all_reduce": lambda g: g.all_reduce_(torch.ones(70)),
    "all_reduce_longer": lambda g: g.all_reduce_(torch.ones(71)),
    "all_reduce_many": lambda g: g.all_reduce_(torch.ones(90_000)),
    "all_reduce_bfloat16": lambda g: g.all_reduce_(torch.ones(140, dtype=torch.bfloat16)),
    "all_gather": lambda g: g.all_gather(torch.ones(70)),
    "all_gather_unequal": lambda g: g.all_gather(torch.ones(70), sizes=[70, 70, 71][: g.size]),
    "gather": lambda g: g.gather(torch.ones(70)),
    "gather_elsewhere": lambda g: g.gather(torch.ones(70), to=1),
    "reduce_scatter": lambda g: g.reduce_scatter(torch.ones(210)),
    "broadcast": lambda g: g.broadcast_(torch.ones(70)),
    "broadcast_elsewhere": lambda g: g.broadcast_(torch.ones(70), source=1),
}


@every_backend
@pytest.mark.parametrize("other", sorted(set(CALLS) - {"all_reduce"}))
def test_ranks_that_call_different_things_all_hear_of_it(backend, other):
    with ranks(backend, 3) as groups:
        values(on_all(groups, CALLS["all_reduce"]))
        results = on_all(groups, lambda g: CALLS[other if g.rank == 1 else "all_reduce"](g))
        assert all(isinstance(result, GroupBroken) for result in results)
        assert any("different" in str(result) for result in results)
        again = on_all(groups, CALLS["all_reduce"])
        assert all(isinstance(result, GroupBroken) for result in again)


@every_backend
@pytest.mark.parametrize(
    ("shape", "dtype"), [((3,), torch.float32), ((2, 2), torch.float32), ((4,), torch.int32)]
)
def test_a_message_of_another_form_is_refused(backend, shape, dtype):
    with ranks(backend, 2) as groups:
        groups[0].send(torch.ones(4), 1)
        with pytest.raises(GroupBroken, match="different"):
            groups[1].recv(shape, dtype, 0)
        with pytest.raises(GroupBroken):
            groups[0].send(torch.ones(4), 1)


WAITS = {**CALLS, "recv": lambda g: g.recv((4,), torch.float32, 2)}


@every_backend
@pytest.mark.parametrize("call", sorted(set(WAITS) - {"all_gather_unequal"}))
def test_a_rank_that_never_calls_ends_the_others_at_their_deadline(backend, call):
    # Torch's groups meet under the same deadline, which a busy machine may miss.
    with ranks(backend, 3, deadline_s=0.5 if backend == "torch" else 0.05) as groups:
        results = on_all(groups[:2], WAITS[call])
        assert all(isinstance(result, GroupBroken) for result in results)
        assert any("in time" in str(result) for result in results)
        with pytest.raises(GroupBroken, match="in time"):
            groups[2].all_reduce_(torch.ones(70))


@every_backend
@pytest.mark.parametrize("call", sorted(set(WAITS) - {"all_gather_unequal"}))
def test_giving_up_ends_the_others_at_once(backend, call):
    with ranks(backend, 3) as groups:
        results = on_all(groups, lambda g: WAITS[call](g) if g.rank < 2 else g.abort("rank 2 has had enough"))
        assert [str(result) for result in results[:2]] == ["rank 2 has had enough"] * 2
        groups[0].abort("too late to count")
        with pytest.raises(GroupBroken, match="had enough"):
            groups[2].all_reduce_(torch.ones(70))


@every_backend
@pytest.mark.parametrize("call", sorted(set(WAITS) - {"all_gather_unequal"}))
def test_leaving_ends_the_others_at_once(backend, call):
    with ranks(backend, 3) as groups:
        results = on_all(groups, lambda g: WAITS[call](g) if g.rank < 2 else g.close())
        assert all("rank 2 has left" in str(result) for result in results[:2])


@every_backend
def test_leaving_ends_this_rank_s_own_call_in_another_thread(backend):
    with ranks(backend, 2) as groups:
        results = on_all([groups[0], groups[0]], lambda g: (CALLS["all_reduce"], type(g).close)[turn()](g))
        assert sum(isinstance(result, GroupBroken) for result in results) == 1
        with pytest.raises(GroupBroken, match="left"):
            groups[0].all_reduce_(torch.ones(70))


turns = iter(range(10**9))


def turn():
    return next(turns) % 2


@pytest.mark.parametrize("backend", ["shared_memory", "sockets"])
def test_what_a_rank_sent_before_it_left_can_be_read(backend):
    with ranks(backend, 2) as groups:
        groups[0].send(torch.ones(4), 1)
        groups[0].close()
        assert torch.equal(groups[1].recv((4,), torch.float32, 0), torch.ones(4))
        with pytest.raises(GroupBroken, match="rank 0 has left"):
            groups[1].recv((4,), torch.float32, 0)


@every_backend
def test_mistakes_are_refused_before_anything_moves(backend):
    with ranks(backend, 2) as groups:
        for group in groups:
            with pytest.raises(TypeError, match="int32"):
                group.all_reduce_(torch.ones(4, dtype=torch.int32))
            with pytest.raises(TypeError, match="int64"):
                group.reduce_scatter(torch.ones(4, dtype=torch.int64))
            with pytest.raises(ValueError, match="strides"):
                group.all_reduce_(torch.ones(4, 4).t())
            with pytest.raises(ValueError, match="strides"):
                group.broadcast_(torch.ones(4, 4).t())
            with pytest.raises(ValueError, match="no peer"):
                group.send(torch.ones(1), group.rank)
            with pytest.raises(ValueError, match="no peer"):
                group.recv((1,), torch.float32, 2)
            with pytest.raises(ValueError, match="rank 2"):
                group.broadcast_(torch.ones(1), source=2)
            with pytest.raises(ValueError, match="sizes"):
                group.all_gather(torch.ones(4), sizes=[3, 3])
            with pytest.raises(IndexError):
                group.all_gather(torch.ones(4), 1)
            with pytest.raises(ValueError, match="do not divide"):
                group.reduce_scatter(torch.ones(3, 2))
            with pytest.raises(ValueError, match="without dimensions"):
                group.all_gather(torch.tensor(1.0))
        results = values(on_all(groups, lambda g: g.all_reduce_(torch.ones(4))))
        assert all(result.tolist() == [2.0] * 4 for result in results)
