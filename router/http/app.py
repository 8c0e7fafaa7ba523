"""The public HTTP API. Every client error is answered in OpenAI's error shape."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route

from baton.core.errors import BatonError, BodyTooLarge, ClientError
from router.http.asgi import App, Receive, RequestIds, Scope, Send
from router.http.authentication import AuthenticationMiddleware
from router.http.batch_runner import BatchRunner
from router.http.chat_page import add_chat_page
from router.http.embeddings import EmbeddingRequest
from router.http.error_middleware import ErrorMiddleware
from router.http.error_shapes import error_answer, status_answer
from router.http.files import add_batches, add_files
from router.http.generation import ChatRequest, CompletionRequest
from router.http.messages import MessagesRequest, count_tokens
from router.http.observe import RequestRecorder
from router.http.pages import READ, add_pages, json_response
from router.http.quick import QuickApp
from router.http.request import EndpointApp, ModelDispatch, RequestHandler, error_headers
from router.http.responses import ResponsesRequest, add_kept_responses
from router.http.served_models import Models
from router.http.service import Service
from router.http.tokenizing import detokenize, tokenize
from router.openai.bodies import decode_object, field_error

SMALL_BODY_BYTES_MAX = 64 * 1024


B = TypeVar("B")


ANTHROPIC_VERSION = "anthropic-version"
"""Header of Anthropic's clients. Models that they ask for have the fields of both APIs."""

NO_MODEL = "none"
"""Model label of requests that name no model of this router."""


def make_app(
    models: Models, *, directory_state: Callable[[], str], batches: BatchRunner | None = None
) -> App:
    """Return the application. `batches` runs the requests of batches by its handlers."""
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None)
    handlers: dict[str, App] = {
        "/v1/chat/completions": _handler(models, ChatRequest, "chatcmpl-"),
        "/v1/completions": _handler(models, CompletionRequest, "cmpl-"),
        "/v1/embeddings": _handler(models, EmbeddingRequest, "embd-"),
        "/v1/responses": _handler(models, ResponsesRequest, "resp_"),
        "/v1/messages": _handler(models, MessagesRequest, "msg_"),
        "/v1/messages/count_tokens": QuickApp(models, count_tokens),
        "/tokenize": QuickApp(models, tokenize),
        "/detokenize": QuickApp(models, detokenize),
    }
    for path, handler in handlers.items():
        app.router.routes.append(Route(path, handler, methods=["POST"]))
    _add_models(app, models)
    _add_adapters(app, models)
    add_kept_responses(app, models)
    if batches is not None:
        batches.handlers = handlers
        add_files(app, batches)
        add_batches(app, batches)
    if models.first.config.chat_page:
        add_chat_page(app)
    add_pages(app, models, directory_state)
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


def _model_card(service: Service, name: str) -> dict[str, Any]:
    """Return the entry of `/v1/models` for the model of the service, or for an adapter of it. Raises
    ModelNotFound."""
    limits = service.limits.card
    base: dict[str, Any] = {
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
    def card_of(request: Request, name: str) -> dict[str, Any]:
        card = _model_card(models.of(name), name)
        if ANTHROPIC_VERSION not in request.headers:
            return card
        created = datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return card | {"type": "model", "display_name": name, "created_at": created}

    @app.api_route("/v1/models", methods=READ)
    async def listed(request: Request) -> Response:
        data = [card_of(request, name) for name in models.names]
        found: dict[str, Any] = {"object": "list", "data": data}
        if ANTHROPIC_VERSION in request.headers:
            found |= {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
        return json_response(found)

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def model(request: Request, name: str) -> Response:
        return json_response(card_of(request, name))


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
