"""Qwen-Bailian's traces (github.com/alibaba-edu/qwen-bailian-usagetraces-anon) are JSON lines with turns.

The fields are `chat_id`, `parent_chat_id` (-1 for the first turn), `timestamp` in seconds, `input_length`,
`output_length`, `type` (text, search, image, file), `turn` from 1, and `hash_ids`, one integer per block of
16 prompt tokens. A hash covers the tokens of its block alone, so a prefix is a run of ids, which is what
Baton compares. Images and files may have fewer or more ids than blocks: tokens without an id belong to the
request alone, and ids beyond the prompt are dropped. A turn whose parent is not in the file starts a
conversation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from loadgen.formats.base import SMALL_BLOCK_TOKENS, Times, TraceRequest, finite, required, tokens, whole
from loadgen.formats.lines import at_line, json_object, lines_of

FIELDS = ("chat_id", "timestamp", "input_length", "output_length")


@dataclass(frozen=True, slots=True)
class _Turn:
    row: int
    turn: int
    root: str


def read_bailian(path: Path) -> Iterator[TraceRequest]:
    """The trace in the order of the file. Raises SetupError."""
    turns: dict[int, _Turn] = {}
    times = Times()
    for row, (number, line) in enumerate(lines_of(path)):
        yield at_line(path, number, lambda text, i=row: _request(text, i, turns, times), line)


def _request(line: str, row: int, turns: dict[int, _Turn], times: Times) -> TraceRequest:
    fields = json_object(line)
    required(fields, FIELDS, "Bailian's JSON lines")
    input_tokens = tokens(fields["input_length"], "input_length", least=1)
    output_tokens = tokens(fields["output_length"], "output_length", least=0)
    chat_id = whole(fields.get("chat_id"), "chat_id", least=0)
    parent_id = whole(fields.get("parent_chat_id", -1), "parent_chat_id", least=-1)
    parent = turns.get(parent_id)
    here = _Turn(row, parent.turn + 1 if parent else 0, parent.root if parent else str(chat_id))
    turns[chat_id] = here
    raw_ids = fields.get("hash_ids", [])
    if not isinstance(raw_ids, list):
        raise ValueError("hash_ids must be a list")
    ids = tuple(whole(i, "hash_ids", least=0) for i in cast("list[object]", raw_ids))
    return TraceRequest(
        times.checked(finite(fields["timestamp"], "timestamp"), "timestamp"),
        input_tokens,
        output_tokens,
        ids[: -(-input_tokens // SMALL_BLOCK_TOKENS)],
        row=row,
        session=here.root,
        turn=here.turn,
        parent_row=parent.row if parent else None,
    )
