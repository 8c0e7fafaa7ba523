"""The answer of the Responses API: its object, and the events of its stream. Pure.

Events and object come from one state, so that both say the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

from baton.core.errors import BatonError, ClientError, Overloaded
from router.openai.answer_writer import AnswerEnd, event_bytes
from router.openai.responses import Usage, encoded
from router.responses.body import ResponsesBody
from router.text.parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning

Json = dict[str, Any]

_PART = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponsesWriter:
    """The writer of one response."""

    def __init__(self, head: Json, *, new_call_id: Callable[[], str], now_s: Callable[[], int]) -> None:
        """`head` is the response before anything is generated, as `response_head` makes it."""
        self._head = head
        self._new_call_id, self._now_s = new_call_id, now_s
        self._key = str(head["id"]).removeprefix("resp_")
        self._sequence = 0
        self._has_begun = False
        self.output: list[Json] = []
        """Items, the last of which may be unfinished."""
        self._is_open = False
        self._texts: list[str] = []
        """Pieces of the open item's text, or of its arguments."""
        self._logprobs: list[Json] = []

    # --- the answer -------------------------------------------------------------------------------

    def begin(self, usage: Usage) -> bytes:
        self._has_begun = True
        created = self._event("response.created", {"response": self._head})
        return created + self._event("response.in_progress", {"response": self._head})

    def add(self, deltas: Sequence[Delta], logprobs: list[Json]) -> bytes:
        events = b""
        for delta in deltas:
            match delta:
                case Content(text):
                    events += self._text("message", text, logprobs)
                    logprobs = []
                case Reasoning(text):
                    events += self._text("reasoning", text, [])
                case CallStart(_, name):
                    events += self._close() + self._open_call(name)
                case CallArguments(_, text):
                    self._texts.append(text)
                    events += self._in_item("response.function_call_arguments.delta", {"delta": text})
        return events

    def end(self, end: AnswerEnd) -> bytes:
        is_cut = end.reason == "length"
        events = b"" if self.output else self._open("message")
        events += self._close(status="incomplete" if is_cut else "completed")
        self._head |= {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else self._now_s(),
            "output": self.output,
            "usage": _usage(end),
        }
        kind = "response.incomplete" if is_cut else "response.completed"
        return events + self._event(kind, {"response": self._head})

    def failed(self, error: BatonError) -> bytes:
        events = b"" if self._has_begun else self.begin(Usage())
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        if isinstance(error, ClientError):
            code = "invalid_prompt"
        events += self._close(status="incomplete")
        failure = {"code": code, "message": str(error)}
        self._head |= {"status": "failed", "error": failure, "output": self.output}
        return events + self._event("response.failed", {"response": self._head})

    def whole(self) -> bytes:
        return encoded(self._head)

    @property
    def response(self) -> Json:
        """The response as it is now."""
        return self._head

    # --- events -----------------------------------------------------------------------------------

    def _event(self, kind: str, body: Json) -> bytes:
        written = event_bytes(kind, {"type": kind, "sequence_number": self._sequence, **body})
        self._sequence += 1
        return written

    def _in_item(self, kind: str, body: Json, **more: Any) -> bytes:
        """Return an event about the item that is open."""
        place = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **more}
        return self._event(kind, place | body)

    # --- items ------------------------------------------------------------------------------------

    def _text(self, kind: str, text: str, logprobs: list[Json]) -> bytes:
        events = b""
        if not self._is_open or self.output[-1]["type"] != kind:
            events = self._close() + self._open(kind)
        self._texts.append(text)
        body: Json = {"delta": text}
        if kind == "message":
            self._logprobs += logprobs
            body["logprobs"] = [_without_bytes(one) for one in logprobs]
        return events + self._in_item(f"response.{_PART[kind]}.delta", body, content_index=0)

    def _open(self, kind: str) -> bytes:
        prefix = "msg" if kind == "message" else "rs"
        item: Json = {"id": f"{prefix}_{self._key}{len(self.output):02x}", "type": kind}
        item |= {"status": "in_progress", "content": []}
        item |= {"role": "assistant"} if kind == "message" else {"summary": []}
        part = self._part(kind, "")
        return self._added(item) + self._in_item(
            "response.content_part.added", {"part": part}, content_index=0
        )

    def _open_call(self, name: str) -> bytes:
        item: Json = {"id": f"fc_{self._key}{len(self.output):02x}", "type": "function_call"}
        call = {"call_id": self._new_call_id(), "name": name, "arguments": "", "status": "in_progress"}
        return self._added(item | call)

    def _added(self, item: Json) -> bytes:
        self.output.append(item)
        self._is_open = True
        return self._event("response.output_item.added", {"output_index": len(self.output) - 1, "item": item})

    def _part(self, kind: str, text: str) -> Json:
        part: Json = {"type": _PART[kind], "text": text}
        if kind == "message":
            part |= {"annotations": [], "logprobs": self._logprobs}
        return part

    def _close(self, status: str = "completed") -> bytes:
        """Return the events that end the open item, if there is one."""
        if not self._is_open:
            return b""
        item, text = self.output[-1], "".join(self._texts)
        kind = item["type"]
        if kind == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            events = self._in_item("response.function_call_arguments.done", done)
        else:
            part = self._part(kind, text)
            item["content"] = [part]
            done = {"text": text}
            if kind == "message":
                done |= {"logprobs": [_without_bytes(one) for one in self._logprobs]}
            events = self._in_item(f"response.{_PART[kind]}.done", done, content_index=0)
            events += self._in_item("response.content_part.done", {"part": part}, content_index=0)
        item["status"] = status
        self._is_open, self._texts, self._logprobs = False, [], []
        index = len(self.output) - 1
        return events + self._event("response.output_item.done", {"output_index": index, "item": item})


def _without_bytes(entry: Json) -> Json:
    """Return a token's logprobs as events have them, without bytes."""
    top = [{"token": one["token"], "logprob": one["logprob"]} for one in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}


def _usage(end: AnswerEnd) -> Json:
    usage = end.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def response_head(
    body: ResponsesBody, *, response_id: str, created: int, temperature: float, top_p: float, is_stored: bool
) -> Json:
    """Return the response of a request before anything is generated."""
    text, reasoning = body.text, body.reasoning
    form = None if text is None else text.format
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": temperature,
        "text": {"format": _named(form) if isinstance(form, dict) else {"type": "text"}},
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _named(form: Json) -> Json:
    return {"name": "response", **form} if form.get("type") == "json_schema" else form


def _tool(tool: Json) -> Json:
    return {"description": None, "parameters": None, "strict": None, **tool}
