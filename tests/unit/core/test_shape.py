import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import SetupError
from baton.core.shape import Position, Shape

shapes = st.builds(Shape, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))


@given(shapes)
def test_each_rank_has_a_position_of_its_own_and_back(shape):
    positions = [shape.position(rank) for rank in range(shape.rank_count)]
    assert len(set(positions)) == shape.rank_count
    assert [shape.rank(position) for position in positions] == list(range(shape.rank_count))


@given(shapes)
def test_groups_divide_the_ranks(shape):
    for group_of, length in (
        (shape.tensor_group, shape.tensor),
        (shape.context_group, shape.context),
    ):
        groups = {group_of(rank) for rank in range(shape.rank_count)}
        assert sorted(rank for group in groups for rank in group) == list(range(shape.rank_count))
        assert {len(group) for group in groups} == {length}
        assert all(group_of(rank) == group for group in groups for rank in group)


def test_tensor_ranks_are_neighbours_and_the_leader_is_first():
    shape = Shape(tensor=2, pipeline=2)
    assert shape.tensor_group(3) == (2, 3)
    assert shape.position(0) == Position(0, 0, 0)


@given(shapes)
def test_a_written_shape_is_read_again(shape):
    assert Shape.parse(str(shape)) == Shape.parse(f" {str(shape).upper()} ") == shape


@pytest.mark.parametrize("text", ["", "2", "tp", "tp0", "tp2tp2", "tp2x", "xtp2", "tp-1", "tp2,pp2", "tp65"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(SetupError):
        Shape.parse(text)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_there_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank {rank}"):
        Shape(tensor=2).position(rank)


def test_a_position_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="not in"):
        Shape(tensor=2).rank(Position(0, 1, 0))
