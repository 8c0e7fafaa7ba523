"""Rows on their way between callers and expert ranks."""

from typing import NamedTuple

from baton.core.ids import ExpertRankId


class RowPair(NamedTuple):
    """One row of one dispatch, and an expert that it is routed to."""

    dispatch: int
    row: int
    expert: int


class PostedRows(NamedTuple):
    """The content of a slot of a link."""

    caller: str
    link: int
    slot: int
    layer: int
    pairs: tuple[RowPair, ...]


class RowResults(NamedTuple):
    """A rank's answer, which is written to the slot that the rows came in."""

    link: int
    slot: int
    rank_id: ExpertRankId
    pairs: tuple[RowPair, ...]
    refused: int | None = None
    """An expert of these rows that the rank does not hold: nothing was computed."""
