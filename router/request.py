"""What all requests that workers are needed for share: an id, a trace, a deadline, an outcome."""

import uuid
from abc import ABC, abstractmethod

from baton.core.errors import BatonError, BodyTooLarge
from baton.core.ids import RequestId
from router.asgi import (
    JSON,
    ClientGone,
    Headers,
    Receive,
    Scope,
    Send,
    header,
    respond,
    respond_and_linger,
)
from router.call import Call
from router.observe import Outcome, outcome_of
from router.openai_response import error_of, retry_after_s
from router.prepare import Preparation
from router.service import Service


class RequestFrame(ABC):
    """One request from its body to the last byte of its answer."""

    def __init__(self, service: Service, request_id: RequestId, traceparent: str) -> None:
        self.service = service
        self.request_id, self.traceparent = request_id, traceparent
        self.arrived_s = service.driver.now_s()
        self.deadline_s = self.arrived_s + service.config.request_timeout_s

    @abstractmethod
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> Outcome:
        """Raises BatonError, ClientGone: nothing is sent then."""

    def preparation(self, call: Call) -> Preparation:
        """Raises ModelNotFound."""
        return Preparation(
            self.service,
            call,
            request_id=self.request_id,
            traceparent=self.traceparent,
            deadline_s=self.deadline_s,
            adapter=self.service.adapter_of(call.model),
        )


class Handler:
    """An ASGI application that answers every request with one `RequestFrame`."""

    def __init__(self, service: Service, kind: type[RequestFrame], id_prefix: str) -> None:
        self._service, self._kind, self._id_prefix = service, kind, id_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        observer = self._service.observer
        request_id = RequestId(self._id_prefix + uuid.uuid4().hex)
        traceparent = observer.open(request_id, (header(scope, b"traceparent") or b"").decode("latin-1"))
        outcome: Outcome = "failed"
        message = ""
        try:
            outcome = await self._kind(self._service, request_id, traceparent).serve(scope, receive, send)
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


def error_headers(error: BatonError) -> Headers:
    seconds = retry_after_s(error)
    return JSON if seconds is None else [*JSON, (b"retry-after", b"%d" % seconds)]
