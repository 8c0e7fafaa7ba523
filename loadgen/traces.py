"""Production traces: when requests came, how long they were, which prefixes they shared, and which were turns
of a conversation.

Formats are detected by content. Each has a module in `loadgen.formats` that describes it. Every error is a
`SetupError` of one line that names file and line.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from baton.core.errors import SetupError
from loadgen.formats.azure import COLUMNS as AZURE_COLUMNS
from loadgen.formats.azure import read_azure
from loadgen.formats.bailian import read_bailian
from loadgen.formats.base import TRACE_BLOCK_TOKENS, LeftOut, Trace, TraceFormat, TraceRequest
from loadgen.formats.burstgpt import COLUMNS as BURSTGPT_COLUMNS
from loadgen.formats.burstgpt import read_burstgpt
from loadgen.formats.lines import cells_of, first_line, json_object
from loadgen.formats.mooncake import block_tokens_of, read_mooncake
from loadgen.formats.ragpulse import read_ragpulse

__all__ = [
    "TRACE_BLOCK_TOKENS",
    "Trace",
    "TraceFormat",
    "TraceRequest",
    "cut",
    "detect_format",
    "read_trace",
]


_READERS: dict[TraceFormat, Callable[[Path], Iterator[TraceRequest | LeftOut]]] = {
    TraceFormat.MOONCAKE: read_mooncake,
    TraceFormat.AZURE: read_azure,
    TraceFormat.BURSTGPT: read_burstgpt,
    TraceFormat.BAILIAN: read_bailian,
    TraceFormat.RAGPULSE: read_ragpulse,
}


def read_trace(path: Path, *, format: TraceFormat | None = None) -> Trace:
    """Read the whole file. Raises SetupError if it is missing, has an unknown format or a broken line, or
    holds no request."""
    found = detect_format(path) if format is None else format
    rows = list(_READERS[found](path))
    requests = sorted((r for r in rows if isinstance(r, TraceRequest)), key=lambda r: r.at_s)
    if not requests:
        raise SetupError(f"{path}: the trace holds no request")
    first_s = requests[0].at_s
    return Trace(
        found,
        tuple(replace(r, at_s=r.at_s - first_s) for r in requests),
        block_tokens=block_tokens_of(path) if found is TraceFormat.MOONCAKE else None,
        skipped_at_s=tuple(sorted(r.at_s - first_s for r in rows if isinstance(r, LeftOut))),
    )


def cut(
    trace: Trace, *, start_s: float = 0.0, duration_s: float = math.inf, limit: int | None = None
) -> Trace:
    """The requests of [start_s, start_s + duration_s), at most `limit`; `start_s` becomes instant 0.

    A turn whose earlier turn is cut away starts its session. Raises SetupError if nothing is left.
    """
    end_s = start_s + duration_s
    inside = [replace(r, at_s=r.at_s - start_s) for r in trace.requests if start_s <= r.at_s < end_s]
    kept = inside[:limit]
    if not kept:
        last_s = trace.requests[-1].at_s
        raise SetupError(f"the slice holds no request: the trace has {len(trace.requests)} in {last_s:.0f} s")
    rows = {r.row for r in kept}
    kept = [r if r.parent_row is None or r.parent_row in rows else replace(r, parent_row=None) for r in kept]
    # Failed requests after the last one that is taken do not belong to this slice.
    last_s = end_s - start_s if len(kept) == len(inside) else kept[-1].at_s
    first_s = start_s or -math.inf  # the whole trace includes failures before its first request
    skipped = tuple(at_s - start_s for at_s in trace.skipped_at_s if first_s <= at_s <= start_s + last_s)
    return replace(trace, requests=tuple(kept), skipped_at_s=skipped)


def detect_format(path: Path) -> TraceFormat:
    """Detect the format by the first line. Raises SetupError."""
    line = first_line(path)
    found = _of_json(line) if line.startswith("{") else _of_header(line)
    if found is None:
        raise SetupError(
            f"{path}:1: no known trace: neither JSON lines of Mooncake, Bailian or RAGPulse, nor a CSV with "
            f"the columns of Azure ({', '.join(sorted(AZURE_COLUMNS))}) or BurstGPT "
            f"({', '.join(sorted(BURSTGPT_COLUMNS))})"
        )
    return found


def _of_json(line: str) -> TraceFormat | None:
    try:
        fields = json_object(line)
    except ValueError:
        return TraceFormat.MOONCAKE  # its reader reports what is wrong with the line
    if isinstance(fields.get("hash_ids"), dict):
        return TraceFormat.RAGPULSE
    return TraceFormat.BAILIAN if "chat_id" in fields else TraceFormat.MOONCAKE


def _of_header(line: str) -> TraceFormat | None:
    names = set(cells_of(line)) if line else set[str]()
    if names >= AZURE_COLUMNS:
        return TraceFormat.AZURE
    return TraceFormat.BURSTGPT if names >= BURSTGPT_COLUMNS else None
