"""BurstGPT (github.com/HPMLL/BurstGPT) is a CSV file with months of ChatGPT and GPT-4 requests, without
prefixes.

The columns are `Timestamp` (seconds), `Model`, `Request tokens`, `Response tokens`, `Total tokens`, `Log
Type`. Release 2 adds `Session ID` and `Elapsed time` (seconds until the answer ended) after the first.
Conversations have session ids, API calls have none. Failed requests have no response tokens; they are left
out and counted.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from loadgen.formats.base import LeftOut, SessionTurns, Times, TraceRequest, finite, tokens_in
from loadgen.formats.lines import at_line, table_rows

COLUMNS = frozenset({"Timestamp", "Request tokens", "Response tokens"})


def read_burstgpt(path: Path) -> Iterator[TraceRequest | LeftOut]:
    """The trace in the order of the file. Raises SetupError."""
    turns, times = SessionTurns(), Times()
    for row, (number, cells) in enumerate(table_rows(path, COLUMNS, "BurstGPT CSV")):
        yield at_line(path, number, lambda c, i=row: _request(c, i, turns, times), cells)


def _request(cells: dict[str, str], row: int, turns: SessionTurns, times: Times) -> TraceRequest | LeftOut:
    at_s = times.checked(finite(cells["Timestamp"], "Timestamp"), "Timestamp")
    input_tokens = tokens_in(cells["Request tokens"], "Request tokens", least=0)
    output_tokens = tokens_in(cells["Response tokens"], "Response tokens", least=0)
    if output_tokens == 0 or input_tokens == 0:
        return LeftOut(at_s)
    session = cells.get("Session ID") or None
    turn, parent_row = turns.place(session, row)
    return TraceRequest(
        at_s,
        input_tokens,
        output_tokens,
        row=row,
        session=session,
        turn=turn,
        parent_row=parent_row,
        elapsed_s=_elapsed_s(cells.get("Elapsed time", "")),
    )


def _elapsed_s(text: str) -> float | None:
    """None for an empty or invalid cell, because a bad annotation does not spoil the request."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
