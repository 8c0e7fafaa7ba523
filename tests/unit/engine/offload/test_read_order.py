"""The order of reads, against the dullest model: what each buffer holds and who uses it."""

from hypothesis import given
from hypothesis import strategies as st

from engine.offload.order import Read, ReadOrder


def test_the_first_layer_of_the_next_step_is_read_while_the_last_computes() -> None:
    order = ReadOrder(3)
    assert order.due() == [Read(0, 0, 0), Read(1, 1, 1)]
    for index in range(3):
        order.enter(index)
        assert order.due() == []
        if index < 2:
            assert order.leave() == Read(index, index, index % 2)
            assert order.due() == [Read(index + 2, (index + 2) % 3, index % 2)]
    order.leave()
    # The last layer is done, and two reads of the next step are begun.
    assert order.due() == [Read(4, 1, 0)]
    assert order.enter(0) == Read(3, 0, 1)


@given(
    layer_count=st.integers(3, 6),
    steps=st.lists(st.lists(st.integers(0, 5), unique=True).map(sorted), max_size=12),
    is_left=st.booleans(),
)
def test_a_layer_that_is_entered_is_in_its_buffer(
    layer_count: int, steps: list[list[int]], is_left: bool
) -> None:
    """Steps may leave layers out, and fail within one: what is entered was read, and is not overwritten."""
    order, buffers, last = ReadOrder(layer_count), [(-1, -1)] * 2, -1

    def read_ahead() -> None:
        nonlocal last
        for read in order.due():
            assert read.number > last, "reads are in order"
            last = read.number
            buffers[read.buffer] = (read.number, read.layer)

    read_ahead()
    for step in steps:
        for index in (one for one in step if one < layer_count):
            read = order.enter(index)
            read_ahead()
            assert read.layer == index
            assert buffers[read.buffer] == (read.number, index)
            if is_left or index % 2:
                assert order.leave() == read
                read_ahead()
