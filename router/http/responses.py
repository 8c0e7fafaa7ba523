"""POST /v1/responses, and the responses that are kept."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from baton.core.errors import ClientError, PeerFailure
from router.http.asgi import Receive, Scope, Send
from router.http.client import client_of
from router.http.generation import GenerationRequest
from router.http.observe import RequestOutcome
from router.http.request import off_loop
from router.http.served_models import Models
from router.http.streaming import ResponseStream
from router.http.written_stream import WrittenStream
from router.openai.bodies import parse_body
from router.openai.call import Call, RequestLimits
from router.openai.choice_stream import ChoiceStream
from router.openai.requests import chat_call
from router.openai.responses import encoded
from router.openai.tool_grammar import STRICT_PARSERS
from router.openai.turns import SourcePlace
from router.responses.body import UNSUPPORTED, ResponsesBody
from router.responses.conversation import NAMES, chat_of, items_of
from router.responses.keeper import ResponseKeeper
from router.responses.store import Absence, StoredResponse
from router.responses.writer import ResponsesWriter, response_head

log = logging.getLogger(__name__)

PAGE_MAX = 100


class ResponseNotFound(ClientError):
    http_status = 404


def not_found(response_id: str, absence: Absence, keeper: ResponseKeeper, *, param: str) -> ResponseNotFound:
    where = "" if keeper.is_shared else "; each router keeps its own, unless router.state_url names a Redis"
    return ResponseNotFound(
        f"Response with id '{response_id:.60}' not found: {absence.value}{where}. Send the whole conversation"
        " as input instead.",
        param=param,
        code="previous_response_not_found" if param == "previous_response_id" else "response_not_found",
    )


class ResponsesRequest(GenerationRequest):
    _body: ResponsesBody
    _places: Sequence[SourcePlace] = ()
    _before: Sequence[dict[str, Any]] = ()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> RequestOutcome:
        try:
            return await super().serve(scope, receive, send)
        except ClientError as error:
            # Often it is the same error, which would be its own cause, and left to the garbage collector.
            raise self._renamed(error) from None

    def _renamed(self, error: ClientError) -> ClientError:
        return NAMES.renamed(error, self._places)

    async def read_call(self, body: bytes) -> Call:
        service, deadline_s = self.service, self.deadline_s
        parsed = await off_loop(
            service, len(body), deadline_s, lambda: parse_body(body, ResponsesBody, UNSUPPORTED)
        )
        self._body = parsed
        stored: bytes | None = None
        if parsed.previous_response_id:
            stored = await self._items_before(parsed.previous_response_id)
        limits = service.limits
        size = len(body) + len(stored or b"")
        return await off_loop(service, size, deadline_s, lambda: self._call(parsed, stored, limits))

    async def _items_before(self, response_id: str) -> bytes:
        """Return the items of the conversation before this request, as JSON."""
        keeper = self.service.responses
        found = await keeper.get(self.client.name, response_id)
        if isinstance(found, Absence):
            raise not_found(response_id, found, keeper, param="previous_response_id")
        output = orjson.loads(found.response)["output"]
        return encoded(orjson.loads(found.items) + output)

    def _call(self, parsed: ResponsesBody, stored: bytes | None, limits: RequestLimits) -> Call:
        self._before = () if stored is None else orjson.loads(stored)
        can_be_strict = self.service.parsers.tool in STRICT_PARSERS
        chat = chat_of(parsed, self._before, can_be_strict=can_be_strict)
        self._places = chat.places
        return chat_call(chat.body, limits)

    def response_stream(self, call: Call) -> WrittenStream:
        service = self.service

        def writer(choices: Sequence[ChoiceStream]) -> ResponsesWriter:
            head = response_head(
                self._body,
                response_id=self.request_id,
                created=int(time.time()),
                temperature=call.sampling.temperature,
                top_p=call.sampling.top_p,
                is_stored=self._is_stored,
            )
            return ResponsesWriter(
                head,
                new_call_id=choices[0].options.new_call_id if choices else str,
                now_s=lambda: int(time.time()),
            )

        return WrittenStream(
            service.driver,
            self.answer_format(call),
            deadline_s=self.deadline_s,
            unsent_tokens_max=service.config.output_buffer_tokens_max,
            writer=writer,
            renamed=self._renamed,
        )

    @property
    def _is_stored(self) -> bool:
        return self._body.store is not False and self.service.config.responses_max > 0

    async def before_end(self, response: ResponseStream) -> None:
        """Keep the response before the client has its end, since the next request may follow at once."""
        if not self._is_stored:
            return
        assert isinstance(response, WrittenStream)
        writer = response.writer
        assert isinstance(writer, ResponsesWriter)
        items = [*self._before, *items_of(self._body.input)]
        stored = StoredResponse(writer.whole(), encoded(items))
        try:
            is_kept = await self.service.responses.put(self.client.name, self.request_id, stored)
            trouble = "" if is_kept else f"it has {stored.size} bytes (router.responses_bytes_max)"
        except PeerFailure as error:
            trouble = str(error)
        if trouble:
            log.warning("response %s is not kept: %s", self.request_id, trouble)


# --- what is kept ---------------------------------------------------------------------------------


def add_kept_responses(app: FastAPI, models: Models) -> None:
    keeper = models.first.responses

    async def found(request: Request, response_id: str) -> StoredResponse:
        stored = await keeper.get(client_of(request.scope).name, response_id)
        if isinstance(stored, Absence):
            raise not_found(response_id, stored, keeper, param="response_id")
        return stored

    @app.get("/v1/responses/{response_id}")
    async def read(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream") == "true":
            raise ClientError("a response that is kept is not streamed again", param="stream")
        return _json((await found(request, response_id)).response)

    @app.delete("/v1/responses/{response_id}")
    async def forget(request: Request, response_id: str) -> Response:
        stored = await keeper.delete(client_of(request.scope).name, response_id)
        if isinstance(stored, Absence):
            raise not_found(response_id, stored, keeper, param="response_id")
        return _json(orjson.dumps({"id": response_id, "object": "response", "deleted": True}))

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        await found(request, response_id)
        raise ClientError(
            "only a response made with background: true can be cancelled, and this server makes none",
            param="response_id",
        )

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        stored = await found(request, response_id)
        items = [_with_id(item, response_id, at) for at, item in enumerate(orjson.loads(stored.items))]
        return _json(orjson.dumps(_page(items, request)))


def _json(body: bytes) -> Response:
    return Response(body, 200, media_type="application/json")


def _with_id(item: dict[str, Any], response_id: str, at: int) -> dict[str, Any]:
    """Return an item as OpenAI lists it, with an id and its type."""
    prefix = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
    kind = item.get("type", "message")
    key = f"{prefix.get(kind, 'msg')}_{response_id.removeprefix('resp_')}i{at:02x}"
    listed = {"id": key, "type": kind, "status": "completed"} | item
    if kind == "message" and isinstance(content := item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        more = {"annotations": []} if part == "output_text" else {}
        listed["content"] = [{"type": part, "text": content, **more}]
    return listed


def _page(items: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """Return a page of a list, as `limit`, `order` and `after` ask for it. Raises ClientError."""
    query = request.query_params
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= PAGE_MAX):
        raise ClientError(f"limit must be from 1 to {PAGE_MAX}, not {limit!r:.40}", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ClientError("order must be asc or desc", param="order")
    ordered = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise ClientError(f"after names {after!r:.80}, which is not in the list", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(limit)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, **ends, "has_more": len(ordered) > len(page)}
