"""The handling that all requests to workers share: an id, a trace, a deadline, an outcome."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from xxhash import xxh3_128_hexdigest

from baton.core.errors import BatonError, BodyTooLarge, ClientError, DeadlineOver
from baton.core.ids import RequestId
from router.http.asgi import (
    JSON,
    REQUEST_ID,
    ClientDisconnected,
    Headers,
    Message,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    respond,
    respond_and_linger,
)
from router.http.client import ANYBODY, client_of
from router.http.error_shapes import error_answer
from router.http.observe import RequestOutcome, RequestRecorder, outcome_of
from router.http.prepare import RequestPreparation
from router.http.request_ids import new_id
from router.http.served_models import Models
from router.http.service import Service
from router.openai.call import Call, RequestLimits
from router.openai.responses import Usage, retry_after_s
from router.tenants import service_classes as slo
from router.tenants.service_classes import NO_OBJECTIVES, RequestVerdict, verdict_of_answer, verdict_of_error

ARRIVED = "baton.arrived"
"""Key in the scope: the time when the request came, if it was seen before its handler was made."""


ON_LOOP_BODY_BYTES = 8192
"""Larger bodies are parsed in a thread. The costliest ones of this size take 20 ms, common ones 0.1 ms, which
is less than the way to a thread and back."""

R = TypeVar("R")


async def off_loop(service: Service, body_bytes: int, deadline_s: float, work: Callable[[], R]) -> R:
    """Do work that grows with a request's body, in a thread if the body is large. Raises QueueFull when too
    much waits, DeadlineOver, and what `work` raises."""
    if body_bytes <= ON_LOOP_BODY_BYTES:
        return work()
    try:
        async with asyncio.timeout_at(deadline_s):
            return await service.tokenizer.in_thread(work)
    except TimeoutError:
        raise DeadlineOver("the request's time was over before its body was read") from None


class RequestHandler(ABC):
    """The handler of one request, from its body to the last byte of its answer."""

    def __init__(self, service: Service, request_id: RequestId, traceparent: str) -> None:
        self.service = service
        self.request_id, self.traceparent = request_id, traceparent
        self.arrived_s = service.driver.now_s()
        self.deadline_s = self.arrived_s + service.config.request_timeout_s
        self.objectives = NO_OBJECTIVES
        self.client = ANYBODY
        self.message = ""
        """Reason of the end for the log, where that is not an error that was raised."""
        self.used_tokens = 0
        """Tokens of prompts and answers that were computed. Tokens that were reserved beyond them are given
        back in the end, and all of them if the request was refused."""
        self.first_token_s = 0.0
        """Time of the first token, on the driver's clock; 0: there was none. It is set where a request ends
        with an exception."""
        self._reserved_tokens: int | None = None
        self.verdict: RequestVerdict | None = None
        """Verdict on the request. None at the end: the request could never work, and does not count as
        offered."""

    def set_arrival(self, arrived_s: float) -> None:
        """Set the arrival to a time before this handler was made."""
        self.arrived_s = arrived_s
        self.deadline_s = arrived_s + self.service.config.request_timeout_s

    @abstractmethod
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> RequestOutcome:
        """Answer the request. Raises BatonError and ClientDisconnected before anything is sent."""

    async def parsed(self, body: bytes, parse: Callable[[bytes, RequestLimits], Call]) -> Call:
        """Return the checked call. Raises ClientError, QueueFull, DeadlineOver."""
        limits = self.service.limits
        return await off_loop(self.service, len(body), self.deadline_s, lambda: parse(body, limits))

    def preparation(self, call: Call, scope: Scope, body: bytes) -> RequestPreparation:
        """Return the preparation of a parsed call, with its client and objectives. Raises ModelNotFound,
        ClientError."""
        client = self.client
        adapter = self.service.adapter_of(call.model)
        self.service.observer.on_call(self.request_id, call, arrived_s=self.arrived_s)
        named = header(scope, slo.HEADER.encode())
        self.objectives = self.service.classes.of(
            call.slo,
            header=None if named is None else named.decode("latin-1"),
            tenant=client.name,
            record=client.tenant,
            model=call.model,
        )
        self.service.observer.recent_requests.classified(self.request_id, self.objectives, client.name)
        if client.salt and call.priority is not None and call.priority < self.objectives.priority:
            raise ClientError(
                f"priority must be at least {self.objectives.priority}, that of the request's class: a lower "
                "one would go before other tenants",
                param="priority",
            )
        return RequestPreparation(
            self.service,
            call,
            request_id=self.request_id,
            traceparent=self.traceparent,
            deadline_s=self.deadline_s,
            adapter=adapter,
            arrived_s=self.arrived_s,
            objectives=self.objectives,
            client=client,
            request_digest=xxh3_128_hexdigest(body),
            may_block=len(body) <= ON_LOOP_BODY_BYTES,
        )

    async def reserve(self, scope: Scope, tokens: int) -> None:
        """Take a request and so many tokens from the tenant's budgets. Raises RateLimited."""
        if not self.client.has_limits:
            return
        left_s = max(1.0, self.deadline_s - self.service.driver.now_s())
        access = self.service.access
        await access.take(self.client, scope, lease=self.request_id, lease_s=left_s, tokens=tokens)
        self._reserved_tokens = tokens

    async def settle(self) -> None:
        """Give back the tokens that were reserved and not used."""
        if self._reserved_tokens is not None:
            refund = self._reserved_tokens - self.used_tokens
            self._reserved_tokens = None
            await self.service.access.settle(self.client, lease=self.request_id, refund_tokens=refund)

    def answered(self, *, first_token_s: float, tpot_s: float) -> None:
        """Set the verdict of a request that was answered in full."""
        ttft_s = first_token_s - self.arrived_s
        self.verdict = verdict_of_answer(self.objectives, ttft_s=ttft_s, tpot_s=tpot_s)

    def group_answered(self, usage: Usage, *, first_token_s: float) -> None:
        """Set the verdict and record the usage of an answer that was made of many sequences."""
        self.answered(first_token_s=first_token_s, tpot_s=0.0)
        self.service.observer.on_group_answered(
            self.request_id,
            usage,
            first_token_s=first_token_s,
            arrived_s=self.arrived_s,
            now_s=self.service.driver.now_s(),
        )

    def cancelled(self, first_token_s: float) -> None:
        """Set the verdict of a request that its client cancelled. `first_token_s` is 0 before its first
        token, which may be overdue."""
        ttft_s = (first_token_s or self.service.driver.now_s()) - self.arrived_s
        is_late = 0 < self.objectives.ttft_s < ttft_s
        self.verdict = RequestVerdict.MISSED_TTFT if is_late else RequestVerdict.CANCELLED


HandlerFactory = Callable[[Service, RequestId, str], RequestHandler]
"""A function that makes a handler from a model's service, the request's id and its traceparent."""


class EndpointApp:
    """An ASGI application that answers every request with one `RequestHandler`."""

    def __init__(
        self,
        service: Service,
        kind: HandlerFactory,
        id_prefix: str,
        *,
        observer: RequestRecorder | None = None,
        new_id: Callable[[], str] = new_id,
    ) -> None:
        """The model's own observer is used if there is no `observer`. `new_id` names a request."""
        self._new_id = new_id
        self._service, self._kind, self._id_prefix = service, kind, id_prefix
        self._observer = observer or service.observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        observer = self._observer
        request_id = RequestId(self._id_prefix + self._new_id())
        parent = (header(scope, b"traceparent") or b"").decode("latin-1")
        traceparent = observer.open(request_id, parent, scope.get(REQUEST_ID, ""))
        outcome: RequestOutcome = "failed"
        message = ""
        handler = self._kind(self._service, request_id, traceparent)
        handler.client = client_of(scope)  # Whose request it is counts even if nobody can read its body.
        if (arrived_s := scope.get(ARRIVED)) is not None:
            handler.set_arrival(arrived_s)
        handler.verdict = RequestVerdict.FAILED  # This verdict stays if a defect ends the request.
        try:
            outcome = await handler.serve(scope, receive, send)
            message = handler.message
        except ClientDisconnected:
            outcome = "cancelled"
            handler.cancelled(handler.first_token_s)
        except BodyTooLarge as error:
            outcome, message, handler.verdict = "invalid", str(error), None
            answer = error_answer(scope["path"], error)
            await respond_and_linger(receive, send, error.http_status, answer, JSON)
        except BatonError as error:
            outcome, message = outcome_of(error), str(error)
            handler.verdict = verdict_of_error(error)
            if outcome == "refused":
                handler.used_tokens = 0
            answer = error_answer(scope["path"], error)
            await respond(send, error.http_status, answer, error_headers(error))
        finally:
            tenant = handler.client.name
            try:
                now_s = self._service.driver.now_s()
                observer.on_end(
                    request_id, outcome, message, handler.verdict, handler.objectives, tenant, now_s
                )
            finally:
                await handler.settle()


class _UnroutedRequest(RequestHandler):
    """A request that never reached a model. It ends with the error that kept it from one."""

    def __init__(
        self,
        service: Service,
        request_id: RequestId,
        traceparent: str,
        *,
        error: BatonError | ClientDisconnected,
    ) -> None:
        super().__init__(service, request_id, traceparent)
        self._error = error

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> RequestOutcome:
        raise self._error


class ModelDispatch:
    """An ASGI application in front of several models' handlers. It reads the body, since only the body names
    the model."""

    def __init__(
        self, models: Models, kind: HandlerFactory, id_prefix: str, *, observer: RequestRecorder
    ) -> None:
        """`observer` counts the requests that reach no model."""
        self._models, self._kind, self._id_prefix, self._observer = models, kind, id_prefix, observer
        self._handlers = {service.model: EndpointApp(service, kind, id_prefix) for service in models}
        # All handlers answer a body that names no model with the same error.
        self._nameless = EndpointApp(models.first, kind, id_prefix, observer=observer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = self._models.first
        scope[ARRIVED] = first.driver.now_s()
        handler = self._nameless
        try:
            body = await read_body(scope, receive, bytes_max=first.config.body_bytes_max)
            deadline_s = scope[ARRIVED] + first.config.request_timeout_s
            asked_for = partial(self._models.asked_for, body)
            if (service := await off_loop(first, len(body), deadline_s, asked_for)) is not None:
                handler = self._handlers[service.model]
            receive = _replayed(body, receive)
        except (BatonError, ClientDisconnected) as error:
            kind = partial(_UnroutedRequest, error=error)
            handler = EndpointApp(first, kind, self._id_prefix, observer=self._observer)
        await handler(scope, receive, send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that delivers the whole body once more, and then what comes after it."""
    is_sent = False

    async def once_more() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return once_more


def error_headers(error: BatonError) -> Headers:
    seconds = retry_after_s(error)
    return JSON if seconds is None else [*JSON, (b"retry-after", b"%d" % seconds)]
