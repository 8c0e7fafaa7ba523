"""Mooncake's JSON lines, and Baton's own format, which adds fields to them.

All released traces (github.com/kvcache-ai/Mooncake, FAST25-release: conversation, toolagent, synthetic, and
the one of the arXiv report) have `timestamp` in ms, `input_length` and `output_length` in tokens, and
`hash_ids`, one integer per block of 512 prompt tokens, the last, partial block included.

Baton also reads and writes (`loadgen.synth`) these optional fields: `session_id` (conversation) and `delay`
(ms from the end of the earlier turn), as in NVIDIA's aiperf; `block_tokens` if a block is not 512 tokens, the
same in every row; `slo_class`; `tenant`. A row without `hash_ids` shares nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from loadgen.formats.base import (
    SPAN_YEARS_MAX,
    TRACE_BLOCK_TOKENS,
    YEAR_S,
    Times,
    TraceRequest,
    finite,
    required,
    tokens,
    whole,
)
from loadgen.formats.lines import at_line, first_line, json_object, lines_of

WHAT = "Mooncake's JSON lines"


@dataclass(slots=True)
class _Sessions:
    """The last turn of each conversation: (row, turn, instant)."""

    last: dict[str, tuple[int, int, float]] = field(default_factory=dict[str, tuple[int, int, float]])
    times: Times = field(default_factory=Times)


def block_tokens_of(path: Path) -> int:
    """The tokens per block that the first row states. Raises SetupError."""
    line = first_line(path)
    return at_line(path, 1, _block_tokens, line) if line else TRACE_BLOCK_TOKENS


def _block_tokens(line: str) -> int:
    return whole(json_object(line).get("block_tokens", TRACE_BLOCK_TOKENS), "block_tokens", least=1)


def read_mooncake(path: Path) -> Iterator[TraceRequest]:
    """The trace in the order of the file. Raises SetupError."""
    block_tokens = block_tokens_of(path)
    sessions = _Sessions()
    for row, (number, line) in enumerate(lines_of(path)):
        yield at_line(path, number, lambda text, i=row: _request(text, i, block_tokens, sessions), line)


def _request(line: str, row: int, block_tokens: int, sessions: _Sessions) -> TraceRequest:
    fields = json_object(line)
    if fields.get("block_tokens", block_tokens) != block_tokens:
        raise ValueError(f"block_tokens is {fields['block_tokens']!r}, but {block_tokens} in the first row")
    required(fields, ("input_length", "output_length"), WHAT)
    input_tokens = tokens(fields["input_length"], "input_length", least=1)
    output_tokens = tokens(fields["output_length"], "output_length", least=0)
    session = _name(fields, "session_id")
    before = sessions.last.get(session) if session is not None else None
    think_s = None if fields.get("delay") is None else _delay_s(fields["delay"])
    if fields.get("timestamp") is None and before and think_s is not None:
        # in aiperf's format, only the first turn has a timestamp
        at_s = sessions.times.checked(before[2] + think_s, "delay")
    else:
        required(fields, ("timestamp",), WHAT)
        at_s = sessions.times.checked(_milliseconds(fields["timestamp"]), "timestamp")
    turn = before[1] + 1 if before else 0
    if session is not None:
        sessions.last[session] = (row, turn, at_s)
    return TraceRequest(
        at_s,
        input_tokens,
        output_tokens,
        _hash_ids(fields, input_tokens, block_tokens),
        row=row,
        session=session,
        turn=turn,
        parent_row=before[0] if before else None,
        think_s=think_s,
        slo_class=_name(fields, "slo_class") or "",
        tenant=_name(fields, "tenant") or "",
    )


def _delay_s(value: object) -> float:
    delay_s = finite(value, "delay") / 1000
    if delay_s > SPAN_YEARS_MAX * YEAR_S:
        raise ValueError(f"delay must be at most {SPAN_YEARS_MAX} years in ms, is {value!r}")
    return delay_s


def _milliseconds(value: object) -> float:
    if isinstance(value, str):
        raise ValueError(f"timestamp must be a number, is {value!r}")
    return finite(value, "timestamp") / 1000


def _name(fields: dict[str, object], name: str) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{name} must be text, is {value!r}")
    return str(value)


def _hash_ids(fields: dict[str, object], input_tokens: int, block_tokens: int) -> tuple[int, ...]:
    raw_ids = fields.get("hash_ids", [])
    if not isinstance(raw_ids, list):
        raise ValueError("hash_ids must be a list")
    ids = tuple(whole(i, "hash_ids", least=0) for i in cast("list[object]", raw_ids))
    needed = -(-input_tokens // block_tokens)
    if ids and len(ids) not in (needed, input_tokens // block_tokens):
        raise ValueError(
            f"{len(ids)} hash_ids, but {input_tokens} tokens are {needed} blocks of {block_tokens}"
        )
    return ids
