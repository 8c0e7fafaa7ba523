"""Endpoints that need a model's tokenizer and no worker. They are answered at once, and are not among the
requests that metrics and objectives count."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from baton.core.errors import BatonError, BodyTooLarge, ClientError, DeadlineOver
from baton.core.ids import RequestId
from router.http.asgi import (
    JSON,
    Receive,
    Scope,
    Send,
    read_body,
    respond,
    respond_and_linger,
)
from router.http.client import AuthenticatedClient, client_of
from router.http.error_shapes import error_answer
from router.http.prepare import RequestPreparation
from router.http.request import ON_LOOP_BODY_BYTES, error_headers, off_loop
from router.http.served_models import Models
from router.http.service import Service
from router.openai.call import Call, RequestLimits
from router.openai.responses import encoded

QuickAnswer = Callable[[Service, AuthenticatedClient, bytes], Awaitable[object]]
"""A function from a model's service, the client and the body to the answer's JSON value. It raises
BatonError."""


class QuickApp:
    """An ASGI application that answers with one `QuickAnswer`."""

    def __init__(self, models: Models, answer: QuickAnswer) -> None:
        self._models, self._answer = models, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = self._models.first
        deadline_s = first.driver.now_s() + first.config.request_timeout_s
        try:
            body = await read_body(scope, receive, bytes_max=first.config.body_bytes_max)
            service = await off_loop(first, len(body), deadline_s, partial(self._models.asked_for, body))
            if service is None and len(self._models) > 1 and b'"model"' not in body:
                known = ", ".join(self._models.names)
                raise ClientError(f"model is required: one of {known:.2000}", param="model")
            async with asyncio.timeout_at(deadline_s):
                answer = await self._answer(service or first, client_of(scope), body)
            await respond(send, 200, encoded(answer), JSON)
        except TimeoutError:
            error = DeadlineOver("the request's time is over")
            await respond(send, error.http_status, error_answer(scope["path"], error), JSON)
        except BodyTooLarge as error:
            answer = error_answer(scope["path"], error)
            await respond_and_linger(receive, send, error.http_status, answer, JSON)
        except BatonError as error:
            await respond(send, error.http_status, error_answer(scope["path"], error), error_headers(error))


async def tokens_of(
    service: Service,
    client: AuthenticatedClient,
    body: bytes,
    parse: Callable[[bytes, RequestLimits], Call],
) -> tuple[int, ...]:
    """Return the prompt's tokens of a request that is parsed like one for an answer. Raises BatonError."""
    deadline_s = service.driver.now_s() + service.config.request_timeout_s
    limits = service.limits
    call = await off_loop(service, len(body), deadline_s, lambda: parse(body, limits))
    preparation = RequestPreparation(
        service,
        call,
        request_id=RequestId("tokens"),
        traceparent="",
        deadline_s=deadline_s,
        adapter=service.adapter_of(call.model),
        client=client,
        may_block=len(body) <= ON_LOOP_BODY_BYTES,
    )
    (prompt,) = await preparation.prompts()
    return prompt.tokens
