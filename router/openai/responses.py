"""OpenAI answers, as bytes. Pure.

A stream's chunks differ in very little, so their common part is encoded once. Building them so costs a tenth
of encoding an object per token.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec
import orjson

from baton.core.errors import BatonError, ClientError, Overloaded, PeerFailure, RateLimited
from router.openai.call import Endpoint
from router.text.surrogates import replaced_in

DONE = b"data: [DONE]\n\n"


def encoded(value: Any) -> bytes:
    """Return JSON. Lone surrogates, which UTF-8 lacks, become U+FFFD."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(replaced_in(value))


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class AnswerFormat:
    """The shapes of one request's answer: the whole of it, or its stream's chunks."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        request_id: str,
        created: int,
        model: str,
        system_fingerprint: Callable[[], str],
        include_usage: bool = False,
    ) -> None:
        """`system_fingerprint` is called once, when the answer begins, since a request may have waited for
        the first worker."""
        self.is_chat = endpoint is Endpoint.CHAT
        self.request_id = request_id
        self.prompt_field = "messages" if self.is_chat else "prompt"
        self._known_head = {"id": request_id, "object": endpoint.value, "created": created, "model": model}
        self._system_fingerprint = system_fingerprint
        self._chunk_tail = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._text_key = b',"delta":{"content":' if self.is_chat else b',"text":'
        self._text_end = (
            b'},"logprobs":null,"finish_reason":' if self.is_chat else b',"logprobs":null,"finish_reason":'
        )

    @cached_property
    def _head(self) -> dict[str, Any]:
        return self._known_head | {"system_fingerprint": self._system_fingerprint()}

    @cached_property
    def _stream_head(self) -> bytes:
        head = self._head | ({"object": "chat.completion.chunk"} if self.is_chat else {})
        return b"data: " + encoded(head)[:-1]

    @cached_property
    def _chunk_head(self) -> bytes:
        return self._stream_head + b',"choices":[{"index":'

    def first_chunk(self, index: int, prompt_ids: Sequence[int] | None = None) -> bytes:
        """Return the chunk before a choice's text. It has the role and, if the client wants token ids, those
        of the prompt. Completions have no such chunk otherwise."""
        if not self.is_chat:
            said = {"text": "", "prompt_token_ids": prompt_ids}
            return b"" if prompt_ids is None else self.rich_chunk(index, said, None, [])
        role = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        tail = self._chunk_tail
        if prompt_ids is not None:
            tail = b'}],"prompt_token_ids":' + encoded(prompt_ids) + tail[len(b"}]") :]
        return b"%b%d%b%b" % (self._chunk_head, index, role, tail)

    def chunk(self, index: int, text: str, token_ids: Sequence[int] | None = None) -> bytes:
        """Return a chunk with text. `token_ids` is None if the client does not want any."""
        return b"%b%d%b%b%bnull%b%b" % (
            self._chunk_head,
            index,
            self._text_key,
            encoded(text),
            self._text_end,
            b"" if token_ids is None else b',"token_ids":' + encoded(token_ids),
            self._chunk_tail,
        )

    def last_chunk(self, index: int, reason: str) -> bytes:
        body = b',"delta":{}' if self.is_chat else b',"text":""'
        return b'%b%d%b,"logprobs":null,"finish_reason":"%b"%b' % (
            self._chunk_head,
            index,
            body,
            reason.encode(),
            self._chunk_tail,
        )

    def end_chunk(self, usage: Usage | None, baton: dict[str, Any] | None) -> bytes:
        """Return the chunk after all choices, with usage and `baton` as far as the client asked for them."""
        said: dict[str, Any] = {} if usage is None else {"usage": usage.as_dict()}
        if baton is not None:
            said["baton"] = baton
        return self._stream_head + b',"choices":[],' + encoded(said)[1:] + b"\n\n"

    def rich_chunk(
        self,
        index: int,
        said: dict[str, Any],
        logprobs: dict[str, Any] | None,
        token_ids: Sequence[int] | None,
    ) -> bytes:
        """Return a chunk with logprobs or token ids. `said` has the chunk's delta or text."""
        body = {"index": index, **said, "logprobs": logprobs, "finish_reason": None}
        if token_ids is not None:
            body["token_ids"] = token_ids
        # `_chunk_head` and `_chunk_tail` bring the rest of the object.
        inner = encoded(body)[len(b'{"index":') : -1]
        return self._chunk_head + inner + self._chunk_tail

    def whole(
        self, choices: Sequence[dict[str, Any] | orjson.Fragment], usage: Usage, extra: dict[str, Any]
    ) -> bytes:
        """Return the complete answer. `choices` are made by `choice`, by index, and may be encoded. `extra`
        has further fields."""
        return encoded(self._head | {"choices": choices, "usage": usage.as_dict()} | extra)

    def choice(
        self,
        index: int,
        said: dict[str, Any],
        reason: str,
        logprobs: dict[str, Any] | None,
        token_ids: Sequence[int] | None,
    ) -> dict[str, Any]:
        """Return one choice. `said` has its message or text and further fields."""
        ids = {} if token_ids is None else {"token_ids": token_ids}
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason, **ids}


# --- errors ---------------------------------------------------------------------------------------


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> bytes:
    return encoded({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_of(error: BatonError) -> bytes:
    param, code = (error.param, error.code) if isinstance(error, ClientError) else (None, None)
    if isinstance(error, RateLimited):
        return error_body(str(error), error.kind, code=error.code)
    return error_body(str(error), error.openai_type, param=param, code=code)


def error_event(error: BatonError) -> bytes:
    """Return the last event of a stream that broke. No [DONE] follows it."""
    return b"data: " + error_of(error) + b"\n\n"


def retry_after_s(error: BatonError) -> int | None:
    """Return whole seconds for the Retry-After header, where trying again may help."""
    if isinstance(error, RateLimited) and error.is_final:
        return None
    if isinstance(error, Overloaded):
        return max(1, math.ceil(error.retry_after_s))
    return 1 if isinstance(error, PeerFailure) else None
