"""The public HTTP API. Everything a client can get wrong is answered in OpenAI's error shape."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from hashlib import blake2b

import msgspec
import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route

from baton.config import RouterConfig
from baton.core.errors import BatonError, BodyTooLarge, DeadlineOver, ModelNotFound
from baton.core.ids import RequestId, SequenceId
from baton.telemetry.metrics import CONTENT_TYPE
from router import openai_api
from router.asgi import (
    ABORT,
    EVENTS,
    JSON,
    App,
    ClientGone,
    Headers,
    Receive,
    RequestIds,
    Scope,
    Send,
    header,
    read_body,
    respond,
    respond_and_linger,
    until_disconnected,
)
from router.defects import Defects
from router.detokenizer import Detokenizer
from router.driver import Driver
from router.events import Submit
from router.health import StatusGauges, health
from router.observe import Observer, Outcome, outcome_of
from router.openai_api import Call, Endpoint, Limits
from router.openai_response import AnswerFormat, error_body, error_of, retry_after_s
from router.streaming import Exchange
from router.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CONTEXT_TOKENS = 5
"""Prompt tokens that decide how the first generated ones are spaced."""

READ = ["GET", "HEAD"]

Parse = Callable[[bytes, Limits], Call]


class Service:
    """What the handlers share. One per router process."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        model: str,
        driver: Driver,
        tokenizer: Tokenizer,
        observer: Observer,
        directory_state: Callable[[], str] = lambda: "none",
    ) -> None:
        """`directory_state`: for /health, whether membership is current."""
        self.config, self.model = config, model
        self.driver, self.tokenizer, self.observer = driver, tokenizer, observer
        self.directory_state = directory_state
        self.created = int(time.time())
        self.salt = config.tenant_salt.encode()

    @property
    def limits(self) -> Limits:
        """A sequence is bounded by the model's context and by what the roomiest worker can hold."""
        card, holds = self.tokenizer.card, self.driver.sequence_tokens_max
        if holds is not None and holds < card.context_tokens:
            card = msgspec.structs.replace(card, context_tokens=holds)
        return Limits(
            card=card,
            choices_max=self.config.choices_max,
            default_max_tokens=self.config.default_max_tokens,
        )

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound."""
        if name != self.model:
            raise ModelNotFound(f"The model `{name:.200}` does not exist; this server has `{self.model}`.")

    @property
    def system_fingerprint(self) -> str:
        """Changes when the workers' model, weights or layout do."""
        facts = self.driver.fingerprint or self.model
        return "fp_" + blake2b(facts.encode(), digest_size=5).hexdigest()


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
        service.check_model(call.model)
        exchange = self._exchange(call)
        watch = asyncio.create_task(self._watch(receive, exchange))
        try:
            parts = await self._parts(call)
            if not exchange.is_gone:
                exchange.submit(parts, choices_per_prompt=call.n, with_token_ids=call.return_token_ids)
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
            model=service.model,
            system_fingerprint=service.system_fingerprint,
            include_usage=call.include_usage,
        )
        return Exchange(
            service.driver,
            answer,
            deadline_s=self._deadline_s,
            unsent_tokens_max=service.config.output_buffer_tokens_max,
        )

    async def _prompts(self, call: Call) -> list[tuple[int, ...]]:
        tokenizer = self._service.tokenizer
        try:
            async with asyncio.timeout_at(self._deadline_s):
                if call.endpoint is Endpoint.CHAT:
                    return [await tokenizer.encode_chat(call.messages)]
                return [
                    await tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                    for prompt in call.prompts
                ]
        except TimeoutError:
            raise DeadlineOver("the request's time was over before its prompt was tokenised") from None

    async def _parts(self, call: Call) -> list[tuple[Submit, Detokenizer]]:
        prompts = await self._prompts(call)
        return [
            self._part(call, prompt, prompt_index * call.n + i)
            for prompt_index, prompt in enumerate(prompts)
            for i in range(call.n)
        ]

    def _part(self, call: Call, prompt: tuple[int, ...], index: int) -> tuple[Submit, Detokenizer]:
        service = self._service
        sampling = openai_api.sampling_params(
            call, choice_index=index, prompt_tokens=len(prompt), limits=service.limits
        )
        submit = Submit(
            seq_id=SequenceId(f"{self._request_id}/{index}"),
            request_id=self._request_id,
            prompt=prompt,
            sampling=sampling,
            salt=service.salt,
            deadline_s=self._deadline_s,
            traceparent=self._traceparent,
        )
        detokenizer = Detokenizer(
            service.tokenizer.decode,
            special_ids=service.tokenizer.special_ids,
            stop_ids=frozenset() if sampling.ignore_eos else frozenset(sampling.stop_token_ids),
            stops=call.stops,
            context=prompt[-CONTEXT_TOKENS:],
        )
        return submit, detokenizer

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


# --- the app --------------------------------------------------------------------------------------


def make_app(service: Service) -> App:
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None)
    for path, endpoint in (("/v1/chat/completions", Endpoint.CHAT), ("/v1/completions", Endpoint.COMPLETION)):
        app.router.routes.append(Route(path, Generation(service, endpoint), methods=["POST"]))
    _add_models(app, service)
    _add_health(app, service)
    _add_error_shape(app)
    return RequestIds(Defects(app))


def _json(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _add_models(app: FastAPI, service: Service) -> None:
    def card() -> dict[str, object]:
        limits = service.limits.card
        return {
            "id": service.model,
            "object": "model",
            "created": service.created,
            "owned_by": "baton",
            "max_model_len": limits.context_tokens,
            "vocab_size": limits.vocab_size,
        }

    @app.api_route("/v1/models", methods=READ)
    async def models() -> Response:
        return _json({"object": "list", "data": [card()]})

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def model(name: str) -> Response:
        service.check_model(name)
        return _json(card())


def _add_health(app: FastAPI, service: Service) -> None:
    gauges = StatusGauges(service.observer.meter)

    def report() -> dict[str, object]:
        return health(
            service.driver.status(),
            model=service.model,
            is_draining=service.driver.is_draining,
            directory=service.directory_state(),
        )

    @app.api_route("/health/live", methods=READ)
    async def live() -> Response:
        return _json({"status": "ok"})

    @app.api_route("/health/ready", methods=READ)
    async def ready() -> Response:
        body = report()
        return _json(body, 200 if body["ready"] else 503)

    @app.api_route("/health", methods=READ)
    async def overview() -> Response:
        return _json(report())

    @app.api_route("/metrics", methods=READ)
    async def metrics() -> Response:
        gauges.update(service.driver.status())
        return Response(service.observer.meter.render(), media_type=CONTENT_TYPE)


def _add_error_shape(app: FastAPI) -> None:
    async def baton_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, BatonError)
        headers = {key.decode(): value.decode() for key, value in error_headers(error)}
        return Response(error_of(error), error.http_status, headers)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = {404: "There is nothing at", 405: f"{request.method} is not allowed at"}
        message = f"{what.get(error.status_code, error.detail)} {request.url.path:.200}"
        body = error_body(message, "invalid_request_error")
        return Response(body, error.status_code, error.headers, media_type="application/json")

    async def invalid(_: Request, error: Exception) -> Response:
        return Response(error_body(str(error), "invalid_request_error"), 400, media_type="application/json")

    async def defect(_: Request, error: Exception) -> Response:
        return Response(error_body("internal error", "server_error"), 500, media_type="application/json")

    app.add_exception_handler(BatonError, baton_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, defect)
