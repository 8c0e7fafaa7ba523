"""Pages about the router and its models: health, metrics, version, tokenizers, the API's document."""

from collections.abc import Callable

import orjson
from fastapi import FastAPI, Response

from baton.core.errors import ClientError
from baton.core.version import VERSION
from baton.telemetry.metrics import CONTENT_TYPE
from router.http.docs_page import DOCS_PAGE
from router.http.health import ModelHealth, RouterFacts, StatusGauges, health, is_asleep
from router.http.openapi import document
from router.http.served_models import Models
from router.http.service import Service

READ = ["GET", "HEAD"]


def json_response(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def add_pages(app: FastAPI, models: Models, directory_state: Callable[[], str]) -> None:
    _add_health(app, models, directory_state)
    _add_about(app, models)


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
        return json_response({"status": "ok"})

    @app.api_route("/health/ready", methods=READ)
    async def ready(model: str = "") -> Response:
        asked = [models.of(model)] if model else models
        body = health([of(service) for service in asked], facts())
        return json_response(body, 200 if body["ready"] else 503)

    @app.api_route("/ping", methods=[*READ, "POST"])
    async def ping() -> Response:
        body = health([of(service) for service in models], facts())
        return json_response({"status": body["status"]}, 200 if body["ready"] else 503)

    @app.api_route("/health", methods=READ)
    async def overview() -> Response:
        return json_response(health([of(service) for service in models], facts()))

    @app.api_route("/metrics", methods=READ)
    async def metrics() -> Response:
        for service in models:
            status, directory = service.driver.status(), directory_state()
            sleeps = is_asleep(status, may_sleep=service.may_sleep, directory=directory)
            gauges[service.model].update(status, is_asleep=sleeps)
        return Response(models.first.observer.meter.render(), media_type=CONTENT_TYPE)


def _add_about(app: FastAPI, models: Models) -> None:
    @app.api_route("/version", methods=READ)
    async def version() -> Response:
        return json_response({"version": VERSION})

    @app.api_route("/tokenizer_info", methods=READ)
    async def tokenizer(model: str = "") -> Response:
        if not model and len(models) > 1:
            known = ", ".join(models.names)
            raise ClientError(f"model is required: add ?model=NAME, one of {known:.2000}", param="model")
        service = models.of(model) if model else models.first
        return json_response(service.tokenizer.info())

    @app.api_route("/openapi.json", methods=READ)
    async def openapi() -> Response:
        return json_response(document(body_bytes_max=models.first.config.body_bytes_max))

    @app.api_route("/docs", methods=READ)
    async def docs() -> Response:
        return Response(DOCS_PAGE, media_type="text/html; charset=utf-8")
