"""What all requests that workers are needed for share: an id, a trace, a deadline, an outcome."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from xxhash import xxh3_128_hexdigest

from baton.core.errors import BatonError, BodyTooLarge, ClientError
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
from router.http.observe import RequestObserver, RequestOutcome, outcome_of
from router.http.prepare import RequestPreparation
from router.http.request_ids import new_id
from router.http.served_models import Models
from router.http.service import Service
from router.openai.call import Call
from router.openai.responses import error_of, retry_after_s
from router.tenants import service_classes as slo
from router.tenants.service_classes import NO_OBJECTIVES, RequestVerdict, verdict_of_answer, verdict_of_error

ARRIVED = "baton.arrived"
"""Key in the scope: when the request came, if somebody saw it before its handler."""


class RequestHandler(ABC):
    """One request from its body to the last byte of its answer."""

    def __init__(self, service: Service, request_id: RequestId, traceparent: str) -> None:
        self.service = service
        self.request_id, self.traceparent = request_id, traceparent
        self.arrived_s = service.driver.now_s()
        self.deadline_s = self.arrived_s + service.config.request_timeout_s
        self.objectives = NO_OBJECTIVES
        self.client = ANYBODY
        self.message = ""
        """Why it ended as it did, for the log, where that is no error it raised."""
        self.used_tokens = 0
        """Of prompts and answers; what was reserved beyond is given back in the end."""
        self._reserved_tokens: int | None = None
        self.verdict: RequestVerdict | None = None
        """None at the end: it could never work, and so was not offered."""

    def set_arrival(self, arrived_s: float) -> None:
        """Earlier than this handler was made."""
        self.arrived_s = arrived_s
        self.deadline_s = arrived_s + self.service.config.request_timeout_s

    @abstractmethod
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> RequestOutcome:
        """Raises BatonError, ClientDisconnected: nothing is sent then."""

    def preparation(self, call: Call, scope: Scope, body: bytes) -> RequestPreparation:
        """Raises ModelNotFound, ClientError."""
        client = self.client = client_of(scope)
        adapter = self.service.adapter_of(call.model)
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
        """Give back what was reserved and not used."""
        if self._reserved_tokens is not None:
            refund = self._reserved_tokens - self.used_tokens
            self._reserved_tokens = None
            await self.service.access.settle(self.client, lease=self.request_id, refund_tokens=refund)

    def answered(self, *, first_token_s: float, tpot_s: float) -> None:
        """It was answered in full."""
        ttft_s = first_token_s - self.arrived_s
        self.verdict = verdict_of_answer(self.objectives, ttft_s=ttft_s, tpot_s=tpot_s)

    def cancelled(self, first_token_s: float) -> None:
        """By its client; `first_token_s` 0: before its first token, which may be overdue."""
        ttft_s = (first_token_s or self.service.driver.now_s()) - self.arrived_s
        is_late = 0 < self.objectives.ttft_s < ttft_s
        self.verdict = RequestVerdict.MISSED_TTFT if is_late else RequestVerdict.CANCELLED


HandlerFactory = Callable[[Service, RequestId, str], RequestHandler]
"""A kind of handler, made for a model, with the request's id and traceparent."""


class EndpointApp:
    """An ASGI application that answers every request with one `RequestHandler`."""

    def __init__(
        self,
        service: Service,
        kind: HandlerFactory,
        id_prefix: str,
        *,
        observer: RequestObserver | None = None,
    ) -> None:
        """`observer` None: the model's own."""
        self._service, self._kind, self._id_prefix = service, kind, id_prefix
        self._observer = observer or service.observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        observer = self._observer
        request_id = RequestId(self._id_prefix + new_id())
        parent = (header(scope, b"traceparent") or b"").decode("latin-1")
        traceparent = observer.open(request_id, parent, scope.get(REQUEST_ID, ""))
        outcome: RequestOutcome = "failed"
        message = ""
        handler = self._kind(self._service, request_id, traceparent)
        if (arrived_s := scope.get(ARRIVED)) is not None:
            handler.set_arrival(arrived_s)
        handler.verdict = RequestVerdict.FAILED  # unless something else is known in the end
        try:
            outcome = await handler.serve(scope, receive, send)
            message = handler.message
        except ClientDisconnected:
            outcome = "cancelled"
            handler.cancelled(0.0)
        except BodyTooLarge as error:
            outcome, message, handler.verdict = "invalid", str(error), None
            await respond_and_linger(receive, send, error.http_status, error_of(error), JSON)
        except BatonError as error:
            outcome, message = outcome_of(error), str(error)
            handler.verdict = verdict_of_error(error)
            await respond(send, error.http_status, error_of(error), error_headers(error))
        finally:
            tenant = handler.client.name
            observer.on_end(request_id, outcome, message, handler.verdict, handler.objectives, tenant)
            await handler.settle()


class _UnroutedRequest(RequestHandler):
    """A request that never came to a model: it ends with what kept it from one."""

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
        self.client = client_of(scope)
        raise self._error


class ModelDispatch:
    """An ASGI application in front of several models' handlers: it reads the body, since only that says
    which model is asked for."""

    def __init__(
        self, models: Models, kind: HandlerFactory, id_prefix: str, *, observer: RequestObserver
    ) -> None:
        """`observer`: of requests that come to no model."""
        self._models, self._kind, self._id_prefix, self._observer = models, kind, id_prefix, observer
        self._handlers = {service.model: EndpointApp(service, kind, id_prefix) for service in models}
        # A body that names no model is every model's mistake in the same words.
        self._nameless = EndpointApp(models.first, kind, id_prefix, observer=observer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = self._models.first
        scope[ARRIVED] = first.driver.now_s()
        handler = self._nameless
        try:
            body = await read_body(scope, receive, bytes_max=first.config.body_bytes_max)
            if (service := self._models.asked_for(body)) is not None:
                handler = self._handlers[service.model]
            receive = _replayed(body, receive)
        except (BatonError, ClientDisconnected) as error:
            kind = partial(_UnroutedRequest, error=error)
            handler = EndpointApp(first, kind, self._id_prefix, observer=self._observer)
        await handler(scope, receive, send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The whole body once more, then what comes after it."""
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
