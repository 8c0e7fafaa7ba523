"""RAGPulse (github.com/flashserve/RAGPulse) is JSON lines of a RAG service, whose prompts are made of
components.

The fields are `timestamp` (seconds, as text), `input_length`, `output_length`, `session_id`, and `hash_ids`:
the components of each part of the prompt, in the order `sys_prompt`, `passages_ids`, `history`, `web_search`,
`user_input`. Files beside the trace (`1_sys_prompt.jsonl` and so on) say how many tokens a component has, one
`{"..._id": 8302, "token_length": 512}` a line.

Components have any length, and a prefix is a run of them. They are laid end to end and cut into blocks of 16
tokens. A block's id stands for its tokens and all before them, so two requests share as many ids as they
share whole blocks of equal components. Tokens beyond the components belong to the request alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from baton.core.errors import SetupError
from loadgen.formats.base import (
    SMALL_BLOCK_TOKENS,
    SessionTurns,
    Times,
    TraceRequest,
    finite,
    required,
    tokens,
    whole,
)
from loadgen.formats.lines import at_line, first_line, json_object, lines_of

COMPONENT_FILES = (
    "1_sys_prompt.jsonl",
    "2_passages.jsonl",
    "3_history.jsonl",
    "4_user_input.jsonl",
    "5_web_search.jsonl",
)
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")

_Piece = tuple[int, int, int]
"""(component, first token, end) within a block."""


class _BlockNumbers:
    """Numbers for runs of pieces; equal runs get equal numbers."""

    def __init__(self, lengths: dict[int, int]) -> None:
        self._lengths = lengths
        self._numbers: dict[tuple[int, tuple[_Piece, ...]], int] = {}

    def of(self, components: list[int], input_tokens: int) -> tuple[int, ...]:
        """Raises ValueError for a component of unknown length."""
        ids: list[int] = []
        pieces: list[_Piece] = []
        room = SMALL_BLOCK_TOKENS
        parent = -1
        for component in components:
            if component not in self._lengths:
                raise ValueError(f"hash_ids: no file beside the trace tells the length of {component}")
            at, length = 0, self._lengths[component]
            while at < length and len(ids) * SMALL_BLOCK_TOKENS < input_tokens:
                end = min(length, at + room)
                pieces.append((component, at, end))
                room -= end - at
                at = end
                if room == 0:
                    parent = self._numbers.setdefault((parent, tuple(pieces)), len(self._numbers))
                    ids.append(parent)
                    pieces, room = [], SMALL_BLOCK_TOKENS
        return tuple(ids[: input_tokens // SMALL_BLOCK_TOKENS])


def read_ragpulse(path: Path) -> Iterator[TraceRequest]:
    """The trace in the order of the file. Raises SetupError."""
    # check the format first, so that no file is reported missing that another format does not have
    if line := first_line(path):
        at_line(path, 1, _fields, line)
    blocks = _BlockNumbers(_component_lengths(path))
    turns, times = SessionTurns(), Times()
    for row, (number, line) in enumerate(lines_of(path)):
        yield at_line(path, number, lambda text, i=row: _request(text, i, blocks, turns, times), line)


def _fields(line: str) -> dict[str, object]:
    fields = json_object(line)
    required(fields, FIELDS, "RAGPulse's JSON lines")
    if not isinstance(fields["hash_ids"], dict):
        raise ValueError("this is not RAGPulse's JSON lines: hash_ids must be an object of lists")
    return fields


def _component_lengths(path: Path) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for name in COMPONENT_FILES:
        file = path.parent / name
        if not file.exists():
            continue
        for number, line in lines_of(file):
            component, length = at_line(file, number, _component, line)
            lengths[component] = length
    if not lengths:
        raise SetupError(
            f"{path}: RAGPulse keeps the lengths of prompt components in files beside the trace; put "
            f"{', '.join(COMPONENT_FILES)} into {path.parent}"
        )
    return lengths


def _component(line: str) -> tuple[int, int]:
    fields = json_object(line)
    length = tokens(fields.pop("token_length", None), "token_length", least=0)
    if len(fields) != 1:
        raise ValueError("not one component's id and token_length")
    ((name, component),) = fields.items()
    return whole(component, name, least=0), length


def _request(line: str, row: int, blocks: _BlockNumbers, turns: SessionTurns, times: Times) -> TraceRequest:
    fields = _fields(line)
    input_tokens = tokens(fields["input_length"], "input_length", least=1)
    output_tokens = tokens(fields["output_length"], "output_length", least=0)
    at_s = times.checked(finite(fields["timestamp"], "timestamp"), "timestamp")
    ids = blocks.of(_components(cast("dict[str, object]", fields["hash_ids"])), input_tokens)
    raw_session = fields.get("session_id")
    session = None if raw_session is None else str(raw_session)
    turn, parent_row = turns.place(session, row)
    return TraceRequest(
        at_s,
        input_tokens,
        output_tokens,
        ids,
        row=row,
        session=session,
        turn=turn,
        parent_row=parent_row,
    )


def _components(parts: dict[str, object]) -> list[int]:
    # The known parts come in the order of the prompt, followed by parts that a later release may add.
    names = [name for name in _PARTS if name in parts] + [name for name in parts if name not in _PARTS]
    found: list[int] = []
    for name in names:
        ids = parts[name]
        if not isinstance(ids, list):
            raise ValueError(f"hash_ids.{name} must be a list")
        found += [whole(i, f"hash_ids.{name}", least=0) for i in cast("list[object]", ids)]
    return found
