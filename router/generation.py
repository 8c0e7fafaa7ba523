"""POST /v1/chat/completions and /v1/completions: a request from its body to the last byte of its answer."""

import asyncio
import time
import uuid
from collections.abc import Callable

from baton.core.errors import BatonError, BodyTooLarge
from baton.core.ids import RequestId
from baton.core.messages import AdapterRef
from router import openai_api
from router.asgi import (
    ABORT,
    EVENTS,
    JSON,
    ClientGone,
    Headers,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    respond,
    respond_and_linger,
    until_disconnected,
)
from router.call import Call, Endpoint, Limits
from router.observe import Outcome, outcome_of
from router.openai_response import AnswerFormat, error_of, retry_after_s
from router.prepare import Preparation
from router.service import Service
from router.streaming import Exchange

Parse = Callable[[bytes, Limits], Call]


class Generation:
    """POST /v1/chat/completions or /v1/completions."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service = service
        self._parse: Parse
        if endpoint is Endpoint.CHAT:
            self._parse, self._id_prefix = openai_api.parse_chat, "chatcmpl-"
        else:
            self._parse, self._id_prefix = openai_api.parse_completion, "cmpl-"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        observer = self._service.observer
        request_id = RequestId(self._id_prefix + uuid.uuid4().hex)
        traceparent = observer.open(request_id, (header(scope, b"traceparent") or b"").decode("latin-1"))
        outcome: Outcome = "failed"
        message = ""
        try:
            outcome = await _Request(self._service, self._parse, request_id, traceparent).serve(
                scope, receive, send
            )
        except ClientGone:
            outcome = "cancelled"
        except BodyTooLarge as error:
            outcome, message = "invalid", str(error)
            await respond_and_linger(receive, send, error.http_status, error_of(error), JSON)
        except BatonError as error:
            outcome, message = outcome_of(error), str(error)
            await respond(send, error.http_status, error_of(error), error_headers(error))
        finally:
            observer.close(request_id, outcome, message)


class _Request:
    """One request from its body to the last byte of its answer."""

    def __init__(self, service: Service, parse: Parse, request_id: RequestId, traceparent: str) -> None:
        self._service, self._parse = service, parse
        self._request_id, self._traceparent = request_id, traceparent
        self._arrived_s = service.driver.now_s()
        self._deadline_s = self._arrived_s + service.config.request_timeout_s

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> Outcome:
        """Raises BatonError, ClientGone: nothing is sent then."""
        service = self._service
        body = await read_body(scope, receive, bytes_max=service.config.body_bytes_max)
        call = self._parse(body, service.limits)
        preparation = Preparation(
            service,
            call,
            request_id=self._request_id,
            traceparent=self._traceparent,
            deadline_s=self._deadline_s,
            adapter=service.adapter_of(call.model),
        )
        exchange = self._exchange(call)
        exchange.prompt_format = preparation.prompt_form
        watch = asyncio.create_task(self._watch(receive, exchange))
        try:
            prompts = await preparation.prompts()
            if call.beam is not None:
                await self._search(call, preparation, prompts, exchange, send)
                return self._outcome(exchange)
            parts = await preparation.parts(prompts)
            if not exchange.is_gone:
                exchange.submit(
                    parts, choices_per_prompt=call.sequences_per_prompt, answers_per_prompt=call.n
                )
                await self._answer(call, exchange, scope, send)
        finally:
            exchange.close()
            watch.cancel()
        return self._outcome(exchange)

    async def _watch(self, receive: Receive, exchange: Exchange) -> None:
        await until_disconnected(receive)
        exchange.client_gone()

    def _exchange(self, call: Call) -> Exchange:
        service = self._service
        answer = AnswerFormat(
            call.endpoint,
            request_id=self._request_id,
            created=int(time.time()),
            model=call.model,
            system_fingerprint=service.system_fingerprint,
            include_usage=call.include_usage,
        )
        return Exchange(
            service.driver,
            answer,
            deadline_s=self._deadline_s,
            unsent_tokens_max=service.config.output_buffer_tokens_max,
        )

    async def _answer(self, call: Call, exchange: Exchange, scope: Scope, send: Send) -> None:
        abort: Callable[[], None] = scope.get(ABORT, _no_way_to_hang_up)
        if not call.stream:
            body = await exchange.whole()
            if not exchange.is_gone:
                await exchange.last_words(respond(send, 200, body, JSON), on_drop=abort)
            return
        await exchange.begin()
        if exchange.is_gone:
            return

        async def write(events: bytes) -> None:
            await send({"type": "http.response.body", "body": events, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await exchange.stream(write, include_usage=call.include_usage, on_drop=abort)
        if not exchange.is_gone:
            await exchange.last_words(send({"type": "http.response.body", "body": b""}), on_drop=abort)

    def _outcome(self, exchange: Exchange) -> Outcome:
        observer = self._service.observer
        if exchange.is_too_slow:
            observer.on_slow_client()
        if exchange.is_gone:
            return "cancelled"
        if exchange.error is not None:
            return outcome_of(exchange.error)
        observer.on_answered(exchange, arrived_s=self._arrived_s)
        return "completed"


def _no_way_to_hang_up() -> None:
    """Under another server than ours: what is written no more will show the client."""


def error_headers(error: BatonError) -> Headers:
    seconds = retry_after_s(error)
    return JSON if seconds is None else [*JSON, (b"retry-after", b"%d" % seconds)]


