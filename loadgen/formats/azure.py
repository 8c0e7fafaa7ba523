"""Azure's LLM inference traces (github.com/Azure/AzurePublicDataset) are CSV files without prefixes and
sessions.

The columns are `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; others (`NumImages` of 2025) are ignored.
Instants look like `2023-11-16 18:15:46.6805900` in 2023 and `2024-05-10 00:00:00.009930+00:00` in 2024.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from loadgen.formats.base import Times, TraceRequest, tokens_in
from loadgen.formats.lines import at_line, table_rows

COLUMNS = frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"})

_INSTANT = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:?\d\d)?")


def read_azure(path: Path) -> Iterator[TraceRequest]:
    """The trace in the order of the file. Raises SetupError."""
    times = Times()
    for row, (number, cells) in enumerate(table_rows(path, COLUMNS, "Azure CSV")):
        yield at_line(path, number, lambda c, i=row: _request(c, i, times), cells)


def _request(cells: dict[str, str], row: int, times: Times) -> TraceRequest:
    return TraceRequest(
        times.checked(_instant_s(cells["TIMESTAMP"]), "TIMESTAMP"),
        tokens_in(cells["ContextTokens"], "ContextTokens", least=1),
        tokens_in(cells["GeneratedTokens"], "GeneratedTokens", least=0),
        row=row,
    )


def _instant_s(text: str) -> float:
    # A fraction of a second has up to nine digits and datetime takes six, so it is parsed separately. A float
    # of seconds since 1970 resolves 0.2 us, which is finer than any sender.
    match = _INSTANT.fullmatch(text)
    if match is None:
        raise ValueError(f"TIMESTAMP {text!r} is not an instant")
    try:
        at = datetime.fromisoformat(match[1] + (match[3] or ""))
    except ValueError as error:
        raise ValueError(f"TIMESTAMP {text!r} is not an instant: {error}") from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return at.timestamp() + (float(f"0.{match[2]}") if match[2] else 0.0)
