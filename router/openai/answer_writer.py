"""What an API of another shape than chat completions needs, to write the answer of one choice. Pure."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from baton.core.errors import BatonError
from router.openai.responses import Usage, encoded
from router.text.parsers.deltas import Delta


class AnswerEnd(msgspec.Struct, frozen=True):
    """The end of a choice."""

    reason: str
    """OpenAI's finish reason: stop, length or tool_calls."""
    usage: Usage
    reasoning_tokens: int = 0
    stop_string: str | None = None


class AnswerWriter(Protocol):
    """A writer of one answer. It returns events for a stream, and has the whole answer in the end."""

    def begin(self, usage: Usage) -> bytes:
        """Return the first events. Nothing is generated yet, but the prompt's part of the usage is known."""
        ...

    def add(self, deltas: Sequence[Delta], logprobs: list[dict[str, Any]]) -> bytes:
        """Return the events of further deltas. `logprobs` are a chat's, for the tokens of their text."""
        ...

    def end(self, end: AnswerEnd) -> bytes:
        """Return the last events."""
        ...

    def failed(self, error: BatonError) -> bytes:
        """Return the last events of a stream that broke."""
        ...

    def whole(self) -> bytes:
        """Return the whole answer, after its end."""
        ...


def event_bytes(kind: str, body: dict[str, Any]) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encoded(body))
