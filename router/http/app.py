"""The public HTTP API. Every client error is answered in OpenAI's error shape."""

from collections.abc import Callable
from typing import TypeVar

import msgspec
import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route

from baton.core.errors import BatonError, BodyTooLarge, ClientError
from baton.telemetry.metrics import CONTENT_TYPE
from router.http.asgi import App, Receive, RequestIds, Scope, Send
from router.http.authentication import AuthenticationMiddleware
from router.http.embeddings import EmbeddingRequest
from router.http.error_middleware import ErrorMiddleware
from router.http.error_shapes import error_answer, status_answer
from router.http.generation import ChatRequest, CompletionRequest
from router.http.health import ModelHealth, RouterFacts, StatusGauges, health, is_asleep
from router.http.messages import MessagesRequest, count_tokens
from router.http.observe import RequestRecorder
from router.http.quick import QuickApp
from router.http.request import EndpointApp, ModelDispatch, RequestHandler, error_headers
from router.http.responses import ResponsesRequest, add_kept_responses
from router.http.served_models import Models
from router.http.service import Service
from router.openai.bodies import decode_object, field_error
from router.openai.openapi import document

READ = ["GET", "HEAD"]
SMALL_BODY_BYTES_MAX = 64 * 1024


B = TypeVar("B")


NO_MODEL = "none"
"""Model label of requests that name no model of this router."""


def make_app(models: Models, *, directory_state: Callable[[], str]) -> App:
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None)
    handlers: dict[str, App] = {
        "/v1/chat/completions": _handler(models, ChatRequest, "chatcmpl-"),
        "/v1/completions": _handler(models, CompletionRequest, "cmpl-"),
        "/v1/embeddings": _handler(models, EmbeddingRequest, "embd-"),
        "/v1/responses": _handler(models, ResponsesRequest, "resp_"),
        "/v1/messages": _handler(models, MessagesRequest, "msg_"),
        "/v1/messages/count_tokens": QuickApp(models, count_tokens),
    }
    for path, handler in handlers.items():
        app.router.routes.append(Route(path, handler, methods=["POST"]))
    _add_models(app, models)
    _add_adapters(app, models)
    add_kept_responses(app, models)
    _add_health(app, models, directory_state)
    _add_error_shape(app)
    return RequestIds(
        ErrorMiddleware(AuthenticationMiddleware(_StreamingRoutes(handlers, app), models.first.access))
    )


def _handler(models: Models, kind: type[RequestHandler], id_prefix: str) -> App:
    """Return the application of one endpoint. A router of one model needs no dispatch: the handler of its
    model also reports a wrong model name."""
    first = models.first
    if len(models) == 1:
        return EndpointApp(first, kind, id_prefix)
    shared = first.observer
    observer = RequestRecorder(shared.meter, shared.spans, shared.recent_requests, model=NO_MODEL)
    return ModelDispatch(models, kind, id_prefix, observer=observer)


class _StreamingRoutes:
    """Requests that stream bypass FastAPI, whose seven layers each see every chunk."""

    def __init__(self, handlers: dict[str, App], others: App) -> None:
        self._handlers, self._others = handlers, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._others
        if scope["type"] == "http" and scope["method"] == "POST":
            app = self._handlers.get(scope["path"], app)
        await app(scope, receive, send)


def _json(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _model_card(service: Service, name: str) -> dict[str, object]:
    """Return the entry of `/v1/models` for the model of the service, or for an adapter of it. Raises
    ModelNotFound."""
    limits = service.limits.card
    base: dict[str, object] = {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "baton",
        "root": service.model_path,
        "parent": None,
        "max_model_len": limits.context_tokens,
        "vocab_size": limits.vocab_size,
    }
    if service.adapter_of(name) is None:
        return base
    adapter = service.adapters.get(name)
    assert adapter is not None
    return base | {"id": name, "created": adapter.created, "root": adapter.ref.path, "parent": service.model}


def _add_models(app: FastAPI, models: Models) -> None:
    @app.api_route("/v1/models", methods=READ)
    async def listed() -> Response:
        data = [_model_card(models.of(name), name) for name in models.names]
        return _json({"object": "list", "data": data})

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def model(name: str) -> Response:
        return _json(_model_card(models.of(name), name))


class LoadAdapter(msgspec.Struct):
    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    model: str | None = None
    """Base model of the adapter. It may be left out where the router serves one model."""


class UnloadAdapter(msgspec.Struct):
    lora_name: str
    lora_int_id: int | None = None


def _add_adapters(app: FastAPI, models: Models) -> None:
    """Add vLLM's endpoints for adapters. They answer in plain text."""

    async def body_of(request: Request, kind: type[B]) -> B:
        if not models.first.adapters.may_change:
            raise ClientError("this server loads no adapters on request (router.adapter_loading)")
        size = 0
        parts: list[bytes] = []
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > SMALL_BODY_BYTES_MAX:
                raise BodyTooLarge(f"the body may have at most {SMALL_BODY_BYTES_MAX} bytes")
        try:
            return msgspec.convert(decode_object(b"".join(parts)), kind)
        except msgspec.ValidationError as error:
            raise field_error(error) from error

    def base_of(body: LoadAdapter) -> Service:
        if body.model is None and len(models) > 1:
            known = ", ".join(service.model for service in models)
            raise ClientError(
                f"model is required: it names the adapter's base model, one of {known}", param="model"
            )
        return models.first if body.model is None else models.of(body.model)

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        body = await body_of(request, LoadAdapter)
        adapters = base_of(body).adapters
        done = await adapters.load(body.lora_name, body.lora_path, in_place=bool(body.load_inplace))
        return Response(done, media_type="text/plain")

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        body = await body_of(request, UnloadAdapter)
        holders = [service for service in models if service.adapters.get(body.lora_name) is not None]
        adapters = (holders[0] if holders else models.first).adapters
        return Response(adapters.unload(body.lora_name), media_type="text/plain")


def _add_health(app: FastAPI, models: Models, directory_state: Callable[[], str]) -> None:
    gauges = {service.model: StatusGauges(service.observer.meter, service.model) for service in models}

    def of(service: Service) -> ModelHealth:
        return ModelHealth(service.model, service.driver.status(), service.may_sleep)

    def facts() -> RouterFacts:
        first = models.first
        is_draining = first.driver.is_draining
        return RouterFacts(is_draining, directory_state(), first.access.state())

    @app.api_route("/health/live", methods=READ)
    async def live() -> Response:
        return _json({"status": "ok"})

    @app.api_route("/health/ready", methods=READ)
    async def ready(model: str = "") -> Response:
        asked = [models.of(model)] if model else models
        body = health([of(service) for service in asked], facts())
        return _json(body, 200 if body["ready"] else 503)

    @app.api_route("/health", methods=READ)
    async def overview() -> Response:
        return _json(health([of(service) for service in models], facts()))

    @app.api_route("/openapi.json", methods=READ)
    async def openapi() -> Response:
        return _json(document(body_bytes_max=models.first.config.body_bytes_max))

    @app.api_route("/metrics", methods=READ)
    async def metrics() -> Response:
        for service in models:
            status, directory = service.driver.status(), directory_state()
            sleeps = is_asleep(status, may_sleep=service.may_sleep, directory=directory)
            gauges[service.model].update(status, is_asleep=sleeps)
        return Response(models.first.observer.meter.render(), media_type=CONTENT_TYPE)


def _add_error_shape(app: FastAPI) -> None:
    async def baton_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, BatonError)
        headers = {key.decode(): value.decode() for key, value in error_headers(error)}
        return Response(error_answer(request.url.path, error), error.http_status, headers)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = {404: "There is nothing at", 405: f"{request.method} is not allowed at"}
        message = f"{what.get(error.status_code, error.detail)} {request.url.path:.200}"
        body = status_answer(request.url.path, error.status_code, message)
        return Response(body, error.status_code, error.headers, media_type="application/json")

    async def invalid(request: Request, error: Exception) -> Response:
        body = status_answer(request.url.path, 400, str(error))
        return Response(body, 400, media_type="application/json")

    async def defect(request: Request, error: Exception) -> Response:
        body = status_answer(request.url.path, 500, "internal error")
        return Response(body, 500, media_type="application/json")

    app.add_exception_handler(BatonError, baton_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, defect)
