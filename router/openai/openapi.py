"""The OpenAPI document of the public API, made from the types that bodies are decoded into. Pure."""

from typing import Any

import msgspec

from router.openai.bodies import ChatBody, CompletionBody, EmbeddingBody

Json = dict[str, Any]

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
}
ERRORS = {
    400: "the request is wrong, or can never be served",
    401: "the API key is missing or wrong",
    403: "the API key does not allow this",
    404: "the path, the model or the adapter does not exist",
    405: "the method is not allowed",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body's encoding is not understood",
    429: "the tenant's budgets do not allow more now",
    500: "the server has a defect",
    503: "the server cannot serve this now; Retry-After says when it may",
}
"""Statuses of errors. Every endpoint may answer with them."""

_NULLABLE_TEXT: Json = {"type": ["string", "null"]}
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE_TEXT,
                "code": _NULLABLE_TEXT,
            },
            "additionalProperties": False,
        }
    },
}
_USAGE: Json = {
    "type": "object",
    "required": ["prompt_tokens", "total_tokens"],
    "properties": {
        name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    },
}


def _listed(kind: str, item: Json, *, list_field: str, **more: Json) -> Json:
    """Return the schema of an answer of the given kind, with a list of items."""
    return {
        "type": "object",
        "required": ["object", list_field, *more],
        "properties": {"object": {"const": kind}, list_field: {"type": "array", "items": item}, **more},
    }


def _choice(content: str, kind: Json) -> Json:
    return {
        "type": "object",
        "required": ["index", content, "finish_reason"],
        "properties": {"index": {"type": "integer"}, content: kind, "finish_reason": {"type": "string"}},
    }


_TEXT: Json = {"type": "string"}
_VECTOR: Json = {
    "type": "object",
    "required": ["object", "index", "embedding"],
    "properties": {
        "object": {"const": "embedding"},
        "index": {"type": "integer"},
        "embedding": {"type": ["array", "string"], "items": {"type": "number"}},
    },
}
_GENERATED: Json = {"id": _TEXT, "model": _TEXT, "usage": _USAGE}
_MESSAGE = _choice("message", {"type": "object"})
_ANSWERS: dict[str, Json] = {
    "/v1/chat/completions": _listed("chat.completion", _MESSAGE, list_field="choices", **_GENERATED),
    "/v1/completions": _listed("text_completion", _choice("text", _TEXT), list_field="choices", **_GENERATED),
    "/v1/embeddings": _listed("list", _VECTOR, list_field="data", model=_TEXT, usage=_USAGE),
}
_MODEL: Json = {"type": "object", "required": ["id", "object"], "properties": {"object": {"const": "model"}}}
_HEALTH: Json = {"type": "object"}
_PAGES: dict[str, tuple[str, Json]] = {
    "/v1/models": ("application/json", _listed("list", _MODEL, list_field="data")),
    "/v1/models/{name}": ("application/json", _MODEL),
    "/health": ("application/json", _HEALTH),
    "/health/live": ("application/json", _HEALTH),
    "/health/ready": ("application/json", _HEALTH),
    "/metrics": ("text/plain", _TEXT),
}


def document(*, body_bytes_max: int) -> Json:
    """Return the document. `body_bytes_max` is told to readers of it."""
    (schemas, components) = msgspec.json.schema_components(
        BODIES.values(), ref_template="#/components/schemas/{name}"
    )
    paths: Json = {}
    for (path, _), schema in zip(BODIES.items(), schemas, strict=True):
        paths[path] = {"post": _post(schema, _ANSWERS[path], streams=path != "/v1/embeddings")}
    for path, (media, schema) in _PAGES.items():
        paths[path] = {"get": _get(path, media, schema)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": "1",
            "description": f"OpenAI's API. A body has at most {body_bytes_max} bytes.",
        },
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}},
    }


def _errors() -> Json:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": text, "content": content} for status, text in ERRORS.items()}


def _post(body: Json, answer: Json, *, streams: bool) -> Json:
    content: Json = {"application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "the answer", "content": content}, **_errors()},
    }


def _get(path: str, media: str, schema: Json) -> Json:
    answer: Json = {"description": "the answer", "content": {media: {"schema": schema}}}
    responses = {"200": answer, **_errors()}
    if path == "/health/ready":
        responses["503"] = answer
    found: Json = {"responses": responses}
    if "{name}" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return found
