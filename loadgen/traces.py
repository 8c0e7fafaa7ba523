"""Production traces: when requests came, how long they were, and which prefixes they shared.

Two public formats, told apart by content:

- Mooncake JSON lines (FAST'25 release): `timestamp` in ms, `input_length` and `output_length` in tokens,
  `hash_ids`: one integer per block of 512 prompt tokens, the last, partial block included.
- Azure LLM inference CSV: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; it says nothing about prefixes.

Every error is a `SetupError` of one line that names file and line.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TypeVar, cast

from baton.core.errors import SetupError

TRACE_BLOCK_TOKENS = 512
"""Prompt tokens behind one `hash_id`."""

MOONCAKE_TICK_S = 3.0
"""Mooncake's timestamps sit on a grid of this width."""

_Raw = TypeVar("_Raw")

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceFormat(StrEnum):
    MOONCAKE = "mooncake"
    AZURE = "azure"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    at_s: float
    """Since the first request of the file; since the start of the slice after `cut`."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """Empty: the trace does not say, and no prefix is shared."""


@dataclass(frozen=True, slots=True)
class Trace:
    format: TraceFormat
    requests: tuple[TraceRequest, ...]
    """In order of arrival; equal instants keep the order of the file."""

    @property
    def has_prefixes(self) -> bool:
        return self.format is TraceFormat.MOONCAKE

    @property
    def tick_s(self) -> float:
        """Width of the grid the arrivals sit on; 0: none."""
        return MOONCAKE_TICK_S if self.format is TraceFormat.MOONCAKE else 0.0


def read_trace(path: Path) -> Trace:
    """The whole file. Raises SetupError: missing, unknown format, broken line, no request."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"cannot read trace {path}: {error}") from None
    trace_format = _detect(path, lines)
    read = _read_mooncake if trace_format is TraceFormat.MOONCAKE else _read_azure
    requests = sorted(read(path, lines), key=lambda r: r.at_s)
    if not requests:
        raise SetupError(f"{path}: the trace holds no request")
    first_s = requests[0].at_s
    return Trace(trace_format, tuple(replace(r, at_s=r.at_s - first_s) for r in requests))


def cut(
    trace: Trace, *, start_s: float = 0.0, duration_s: float = math.inf, limit: int | None = None
) -> Trace:
    """The requests of [start_s, start_s + duration_s), at most `limit`; `start_s` becomes instant 0.

    Raises SetupError when nothing is left.
    """
    end_s = start_s + duration_s
    kept = [replace(r, at_s=r.at_s - start_s) for r in trace.requests if start_s <= r.at_s < end_s][:limit]
    if not kept:
        last_s = trace.requests[-1].at_s
        raise SetupError(f"the slice holds no request: the trace has {len(trace.requests)} in {last_s:.0f} s")
    return replace(trace, requests=tuple(kept))


def _detect(path: Path, lines: list[str]) -> TraceFormat:
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("{"):
        return TraceFormat.MOONCAKE
    if set(_AZURE_COLUMNS) <= {name.strip() for name in first.split(",")}:
        return TraceFormat.AZURE
    raise SetupError(
        f"{path}:1: neither Mooncake JSON lines nor an Azure CSV with {', '.join(_AZURE_COLUMNS)}"
    )


def _read_mooncake(path: Path, lines: list[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _at_line(path, number, _mooncake_request, line)


def _mooncake_request(line: str) -> TraceRequest:
    value: object = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    row = cast("dict[str, object]", value)
    at_ms = row.get("timestamp")
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not math.isfinite(at_ms):
        raise ValueError(f"timestamp must be a number, is {at_ms!r}")
    input_tokens = _whole(row.get("input_length"), "input_length", least=1)
    output_tokens = _whole(row.get("output_length"), "output_length", least=0)
    raw_ids = row.get("hash_ids")
    if not isinstance(raw_ids, list):
        raise ValueError("hash_ids must be a list")
    ids = tuple(_whole(i, "hash_ids", least=0) for i in cast("list[object]", raw_ids))
    needed = -(-input_tokens // TRACE_BLOCK_TOKENS)
    if len(ids) != needed:
        raise ValueError(f"{len(ids)} hash_ids, but {input_tokens} tokens are {needed} blocks of 512")
    return TraceRequest(at_ms / 1000, input_tokens, output_tokens, ids)


def _read_azure(path: Path, lines: list[str]) -> Iterator[TraceRequest]:
    header: list[str] | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        if header is None:
            header = cells
            continue
        names = header
        yield _at_line(path, number, lambda c, n=names: _azure_request(n, c), cells)


def _azure_request(header: list[str], cells: list[str]) -> TraceRequest:
    if len(cells) != len(header):
        raise ValueError(f"{len(cells)} cells under {len(header)} columns")
    row = dict(zip(header, cells, strict=True))
    instant, context, generated = (row[name] for name in _AZURE_COLUMNS)
    return TraceRequest(
        _azure_instant_s(instant),
        _whole(int(context), "ContextTokens", least=1),
        _whole(int(generated), "GeneratedTokens", least=0),
    )


def _azure_instant_s(text: str) -> float:
    # Seven digits of a second and no zone: datetime takes six, so the fraction is read apart. An instant
    # since 1970 as float keeps 0.2 us, which is finer than anybody can send.
    whole, _, fraction = text.partition(".")
    if fraction and not fraction.isdigit():
        raise ValueError(f"TIMESTAMP {text!r} is not an instant")
    at = datetime.fromisoformat(whole)
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return at.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def _whole(value: object, name: str, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, is {value!r}")
    return value


def _at_line(path: Path, number: int, read: Callable[[_Raw], TraceRequest], raw: _Raw) -> TraceRequest:
    try:
        return read(raw)
    except ValueError as error:  # json.JSONDecodeError is one
        raise SetupError(f"{path}:{number}: {error}") from None
