"""The answer of the Messages API: its object, and the events of its stream. Pure."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from baton.core.errors import BatonError
from router.messages.errors import messages_error
from router.openai.answer_writer import AnswerEnd, event_bytes
from router.openai.responses import Usage, encoded
from router.text.parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning

Json = dict[str, Any]


class MessagesWriter:
    """The writer of one message."""

    def __init__(self, *, message_id: str, model: str, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self._message: Json = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }
        self._content: list[Json] = self._message["content"]
        self._is_open = False
        self._texts: list[str] = []

    def begin(self, usage: Usage) -> bytes:
        self._message["usage"] = _usage(usage)
        return self._event("message_start", {"message": self._message}) + self._event("ping", {})

    def add(self, deltas: Sequence[Delta], logprobs: list[Json]) -> bytes:
        events = b""
        for delta in deltas:
            match delta:
                case Content(text):
                    events += self._in_block("text", {"type": "text_delta", "text": text}, text)
                case Reasoning(text):
                    events += self._in_block("thinking", {"type": "thinking_delta", "thinking": text}, text)
                case CallStart(_, name):
                    call_id = self._new_call_id().replace("call_", "toolu_")
                    events += self._close()
                    events += self._open({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case CallArguments(_, text):
                    events += self._in_block(
                        "tool_use", {"type": "input_json_delta", "partial_json": text}, text
                    )
        return events

    def end(self, end: AnswerEnd) -> bytes:
        events = b"" if self._content else self._open(_empty("text"))
        events += self._close()
        stop = {"stop_reason": _stop_reason(end), "stop_sequence": end.stop_string}
        usage = _usage(end.usage)
        self._message |= {**stop, "usage": usage}
        events += self._event("message_delta", {"delta": stop, "usage": usage})
        return events + self._event("message_stop", {})

    def failed(self, error: BatonError) -> bytes:
        return event_bytes("error", messages_error(error))

    def whole(self) -> bytes:
        return encoded(self._message)

    # --- blocks -----------------------------------------------------------------------------------

    def _event(self, kind: str, body: Json) -> bytes:
        return event_bytes(kind, {"type": kind, **body})

    def _in_block(self, kind: str, delta: Json, text: str) -> bytes:
        events = b""
        if not self._is_open or self._content[-1]["type"] != kind:
            events = self._close() + self._open(_empty(kind))
        self._texts.append(text)
        place = {"index": len(self._content) - 1}
        return events + self._event("content_block_delta", place | {"delta": delta})

    def _open(self, block: Json) -> bytes:
        self._content.append(block)
        self._is_open = True
        place = {"index": len(self._content) - 1}
        return self._event("content_block_start", place | {"content_block": block})

    def _close(self) -> bytes:
        """Return the event that ends the open block, if there is one."""
        if not self._is_open:
            return b""
        block, text = self._content[-1], "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[block["type"]] = text
        self._is_open, self._texts = False, []
        return self._event("content_block_stop", {"index": len(self._content) - 1})


def _empty(kind: str) -> Json:
    block: Json = {"type": kind, kind: ""}
    return block | ({"signature": ""} if kind == "thinking" else {})


def _input(arguments: str) -> Json:
    """Return a tool's arguments as an object. Arguments that are none, such as those that max_tokens cut, are
    under a name of their own."""
    try:
        found = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {"invalid_arguments": arguments}


def _stop_reason(end: AnswerEnd) -> str:
    if end.stop_string is not None:
        return "stop_sequence"
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(end.reason, "end_turn")


def _usage(usage: Usage) -> Json:
    """Return the usage. Tokens that were found in a cache are not among the input tokens here."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
