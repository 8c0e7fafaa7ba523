"""Reads the server-sent events of OpenAI's streams into a `RequestRecord`. Pure: bytes and instants go in."""

from dataclasses import dataclass, field
from typing import cast

import orjson

from loadgen.records import ErrorKind, RequestOutcome, RequestRecord

EVENT_BYTES_MAX = 4 * 2**20
_PREDICTIONS = (
    "predicted_ttft_s",
    "predicted_ttft_p90_s",
    "predicted_tpot_s",
    "predicted_tpot_p90_s",
    "predicted_meets",
)


class StreamFault(Exception):
    """The stream cannot be parsed, or reports an error itself."""

    def __init__(self, kind: ErrorKind, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail


@dataclass(slots=True)
class Answer:
    """The answer that a client received."""

    pieces: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    """Empty if the server does not send them."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class OpenAIStream:
    """Parses the body of a response; `is_done` is true after `[DONE]`. Raises StreamFault."""

    def __init__(
        self, record: RequestRecord, *, says_done: bool = True, answer: Answer | None = None
    ) -> None:
        """`answer` collects the text, without reasoning, which clients do not send back."""
        self._record = record
        self._answer = answer
        self.tokens_seen = 0
        """Number of token ids, or of events with text if the server sends no ids."""
        self._says_done = says_done
        self._rest = b""
        self.is_done = False

    def feed(self, data: bytes, *, now_s: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise StreamFault(ErrorKind.STREAM_GARBAGE, f"a line of more than {EVENT_BYTES_MAX} bytes")
        for line in lines:
            self._line(line.rstrip(b"\r"), now_s)

    def _line(self, line: bytes, now_s: float) -> None:
        if not line or line.startswith((b":", b"event:", b"id:", b"retry:")) or self.is_done:
            return
        if not line.startswith(b"data:"):
            raise StreamFault(ErrorKind.STREAM_GARBAGE, f"not an event: {line[:80]!r}")
        data = line[5:].strip()
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            value: object = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise StreamFault(ErrorKind.STREAM_GARBAGE, f"not JSON: {data[:80]!r}") from None
        if not isinstance(value, dict):
            raise StreamFault(ErrorKind.STREAM_GARBAGE, f"not an object: {data[:80]!r}")
        self._event(cast("dict[str, object]", value), now_s)

    def _event(self, event: dict[str, object], now_s: float) -> None:
        if event.get("error") is not None:
            raise StreamFault(ErrorKind.STREAM_ERROR, error_text(event))
        choice = _first_choice(event)
        # A server that knows `return_token_ids` also sends ids of tokens that show no text.
        token_ids = choice.get("token_ids")
        if token_ids or _text_of(choice):
            self._record.token_instants_s.append(now_s)
            self.tokens_seen += len(cast("list[object]", token_ids)) if isinstance(token_ids, list) else 1
            if self._answer is not None:
                _hear(self._answer, choice)
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self._record.finish_reason = reason
        usage = event.get("usage")
        if isinstance(usage, dict):
            read_usage(self._record, cast("dict[str, object]", usage))
        baton = event.get("baton")
        if isinstance(baton, dict):
            read_timings(self._record, cast("dict[str, object]", baton))

    def end(self, *, now_s: float, is_complete: bool = True) -> None:
        """The body has ended; `is_complete` is HTTP's verdict. Raises StreamFault unless it ended
        properly."""
        record = self._record
        if not self._says_done:
            self.is_done = is_complete and record.finish_reason is not None
        if not self.is_done:
            raise StreamFault(
                ErrorKind.STREAM_BROKEN,
                "the stream ended before [DONE]" if self._says_done else "the stream broke off",
            )
        if not record.tokens_out and record.finish_reason is None:
            raise StreamFault(ErrorKind.STREAM_BROKEN, "the stream ended with no token and no finish reason")
        if not record.token_instants_s and record.tokens_out:
            # Some tokens never become text (half a character). The last instant is then the end that the
            # client saw.
            record.token_instants_s.append(now_s)
        record.outcome = RequestOutcome.COMPLETED


def read_usage(record: RequestRecord, usage: dict[str, object]) -> None:
    record.prompt_tokens = _count(usage.get("prompt_tokens"))
    record.completion_tokens = _count(usage.get("completion_tokens"))
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        record.cached_tokens = _count(cast("dict[str, object]", details).get("cached_tokens"))


def read_timings(record: RequestRecord, baton: dict[str, object]) -> None:
    """Read Baton's object: phases and predictions into `timings`, workers into `served_by`. Unknown entries
    are ignored."""
    phases = baton.get("timings")
    entries = dict(cast("dict[str, object]", phases)) if isinstance(phases, dict) else {}
    entries |= {name: baton.get(name) for name in _PREDICTIONS}
    seconds = {
        name: float(value)
        for name, value in entries.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if seconds:
        record.timings = (record.timings or {}) | seconds
    names = [baton.get(role) for role in ("prefill_worker", "decode_worker")]
    served = tuple(dict.fromkeys(name for name in names if isinstance(name, str) and name))
    if served:
        record.served_by = served
    record.attempts = _count(baton.get("attempts"))


def error_text(body: dict[str, object]) -> str:
    """The message of OpenAI's error object, or as much of it as there is."""
    error = body.get("error")
    if isinstance(error, dict):
        return str(cast("dict[str, object]", error).get("message", error))[:200]
    return str(error)[:200]


def _first_choice(event: dict[str, object]) -> dict[str, object]:
    choices = event.get("choices")
    if isinstance(choices, list) and choices:
        first: object = cast("list[object]", choices)[0]
        if isinstance(first, dict):
            return cast("dict[str, object]", first)
    return {}


def _text_of(choice: dict[str, object]) -> str:
    text = choice.get("text")
    if isinstance(text, str):
        return text
    delta = choice.get("delta")
    if isinstance(delta, dict):
        fields = cast("dict[str, object]", delta)
        for name in ("content", "reasoning_content", "reasoning"):
            content = fields.get(name)
            if isinstance(content, str) and content:
                return content
        if fields.get("tool_calls"):
            return "call"
    return ""


def _hear(answer: Answer, choice: dict[str, object]) -> None:
    token_ids = choice.get("token_ids")
    if isinstance(token_ids, list):
        answer.token_ids += [i for i in cast("list[object]", token_ids) if isinstance(i, int)]
    delta = choice.get("delta")
    text = choice.get("text")
    if isinstance(delta, dict):
        text = cast("dict[str, object]", delta).get("content")
    if isinstance(text, str):
        answer.pieces.append(text)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
