"""The tokens of a step that each context rank computes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.geometry import blocks_for
from engine.execution.context_division import (
    KV_READ_TOKENS,
    PIECE_TOKENS_MIN,
    RANK_COST_MIN,
    StepDivision,
    divide_step,
    wanted_rows,
)
from engine.kernels.interface import BatchLayout, Span

BLOCK_TOKENS = 16
UNHURRIED = settings(deadline=None)


def span(first: int, count: int, *, blocks_from: int = 0) -> Span:
    blocks = blocks_for(first + count, BLOCK_TOKENS)
    return Span(first, count, tuple(range(blocks_from, blocks_from + blocks)))


@st.composite
def layouts(draw: st.DrawFn) -> BatchLayout:
    count = st.one_of(st.just(1), st.integers(2, 40), st.integers(40, 600))
    sizes = draw(st.lists(st.tuples(st.integers(0, 3000), count), min_size=1, max_size=20))
    spans = [span(first, tokens, blocks_from=1000 * number) for number, (first, tokens) in enumerate(sizes)]
    return BatchLayout.of(spans)


def divided(layout: BatchLayout, ranks: int, *, pair_cost: float = 1e-3) -> StepDivision:
    return divide_step(layout, ranks, block_tokens=BLOCK_TOKENS, pair_cost=pair_cost)


def cost(layout: BatchLayout, pair_cost: float) -> float:
    return sum(
        one.token_count
        + pair_cost
        * max(
            sum(range(one.first_position, one.context_tokens)),
            KV_READ_TOKENS * one.first_position,
        )
        for one in layout.spans
    )


def tokens_of(layout: BatchLayout) -> list[tuple[int, int]]:
    """(block, position) of each token, in order."""
    return [
        (one.block_ids[position // BLOCK_TOKENS], position)
        for one in layout.spans
        for position in range(one.first_position, one.context_tokens)
    ]


@UNHURRIED
@given(layout=layouts(), ranks=st.integers(1, 6), pair_cost=st.floats(0, 0.1))
def test_each_token_is_computed_once_in_its_place(layout: BatchLayout, ranks: int, pair_cost: float) -> None:
    division = divided(layout, ranks, pair_cost=pair_cost)
    assert len(division.batches) == ranks
    whole = tokens_of(layout)
    places: list[int] = []
    for batch in division.batches:
        assert [whole[place] for place in batch.places] == tokens_of(batch.layout)
        for one in batch.layout.spans:
            assert len(one.block_ids) == blocks_for(one.context_tokens, BLOCK_TOKENS)
        places += batch.places.tolist()
    assert sorted(places) == list(range(layout.token_count))


@UNHURRIED
@given(layout=layouts(), ranks=st.integers(2, 6))
def test_ranks_read_what_others_write_only_where_a_sequence_is_cut(layout: BatchLayout, ranks: int) -> None:
    division = divided(layout, ranks)
    owners: dict[int, set[int]] = {}
    for rank, batch in enumerate(division.batches):
        for one in batch.layout.spans:
            owners.setdefault(one.block_ids[0], set()).add(rank)
    assert division.has_cuts == any(len(found) > 1 for found in owners.values())


@UNHURRIED
@given(
    first=st.integers(0, 100_000),
    count=st.integers(400, 4000),
    ranks=st.integers(2, 6),
    pair_cost=st.floats(0, 0.01),
)
def test_a_long_chunk_is_the_same_work_for_all(first: int, count: int, ranks: int, pair_cost: float) -> None:
    """The pieces of a rank may be longer than those of another by a token each."""
    division = divided(BatchLayout.of([span(first, count)]), ranks, pair_cost=pair_cost)
    costs = [cost(batch.layout, pair_cost) for batch in division.batches]
    assert max(costs) - min(costs) <= 4 * (1 + pair_cost * (first + count))


@UNHURRIED
@given(layout=layouts(), ranks=st.integers(2, 4))
def test_no_rank_has_more_than_the_least_and_one_sequence(layout: BatchLayout, ranks: int) -> None:
    pair_cost = 1e-3
    division = divided(layout, ranks, pair_cost=pair_cost)
    costs = [cost(batch.layout, pair_cost) for batch in division.batches if len(batch.places)]
    dearest = max(cost(BatchLayout.of([one]), pair_cost) for one in layout.spans)
    if len(costs) == ranks:
        assert max(costs) - min(costs) <= dearest + 1e-6


def test_a_chunk_has_two_pieces_per_rank_which_lie_opposite() -> None:
    division = divided(BatchLayout.of([span(100, 60)]), 3)
    positions = [batch.layout.positions().tolist() for batch in division.batches]
    assert positions == [
        [*range(100, 110), *range(150, 160)],
        [*range(110, 120), *range(140, 150)],
        list(range(120, 140)),
    ]
    assert len(division.batches[2].layout.spans) == 1
    assert division.other_token_count == 40


@pytest.mark.parametrize(
    "spans",
    [
        [span(500, 1)],
        [span(0, 2 * 2 * PIECE_TOKENS_MIN - 1)],
        [span(0, 1)] * (2 * int(RANK_COST_MIN) - 1),
    ],
    ids=["one decode", "a short chunk", "few decodes"],
)
def test_what_is_not_worth_it_stays_with_the_first_rank(spans: list[Span]) -> None:
    layout = BatchLayout.of(spans)
    division = divided(layout, 2)
    assert not division.is_divided
    assert not division.has_cuts
    assert division.batches[0].layout.spans == layout.spans


def test_decodes_are_given_out_by_what_their_contexts_cost() -> None:
    """One at 9,000 positions costs as much as three at 3,000 here."""
    layout = BatchLayout.of([span(first, 1) for first in (9000, 3000, 3000, 3000)])
    division = divided(layout, 2, pair_cost=1.0)
    found = [sorted(one.first_position for one in batch.layout.spans) for batch in division.batches]
    assert found == [[9000], [3000, 3000, 3000]]
    assert not division.has_cuts


@UNHURRIED
@given(layout=layouts(), ranks=st.integers(1, 5), data=st.data())
def test_rows_find_back_to_their_order(layout: BatchLayout, ranks: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, layout.token_count - 1), max_size=30))
    division = divided(layout, ranks)
    wanted = wanted_rows(division, np.array(rows, dtype=np.int64))
    gathered = [
        batch.places[place]
        for batch, own in zip(division.batches, wanted.by_rank, strict=True)
        for place in own
    ]
    found = np.empty(len(rows), dtype=np.int64)
    found[wanted.order] = gathered
    assert found.tolist() == rows
