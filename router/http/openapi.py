"""The OpenAPI document of the public API, made from the types that bodies are decoded into. Pure."""

import re
from typing import Any, get_args, get_type_hints

import msgspec

from router.batches.bodies import BatchBody
from router.http import openapi_answers as answers
from router.http.openapi_answers import Json
from router.http.tokenizing import DetokenizeBody, TokenizeBody
from router.messages.body import CountedBody, MessagesBody
from router.openai.bodies import ChatBody, CompletionBody, EmbeddingBody, SamplingBounds
from router.responses.body import ResponsesBody

ERRORS = {
    400: "the request is wrong, or can never be served",
    401: "the API key is missing or wrong",
    403: "the API key does not allow this",
    404: "the path, the model, the adapter or the object does not exist",
    405: "the method is not allowed",
    408: "the body did not arrive in time",
    409: "the object is in a state that does not allow this",
    413: "the body is too large",
    415: "the body's encoding is not understood",
    429: "the tenant's budgets do not allow more now",
    500: "the server has a defect",
    503: "the server cannot serve this now; Retry-After says when it may",
    504: "the request's time is over",
}
"""Statuses of errors. Every endpoint may answer with them."""


class Operation(msgspec.Struct, frozen=True):
    method: str
    path: str
    summary: str
    answer: Json
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    media: str = "application/json"
    query: dict[str, Json] = {}


def _page(most: int) -> dict[str, Json]:
    return {"limit": {"type": "integer", "minimum": 1, "maximum": most}, "after": answers.TEXT}


_PAGE, _LONG_PAGE = _page(100), _page(10_000)
_RANGES: dict[str, tuple[float, float | None]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "n": (1, None),
    "best_of": (1, None),
    "top_logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "max_completion_tokens": (1, None),
    "max_output_tokens": (1, None),
    "max_tokens": (1, None),
    "logprobs": (0, 20),
    "min_tokens": (0, None),
    "dimensions": (1, None),
    "seed": (-(2**63), 2**63 - 1),
}
"""Ranges of numbers that no model and no setting makes narrower or wider, by field, in every body."""
_LOWER = {("CompletionBody", "max_tokens"): 0}
"""Lower bounds of one body alone: a completion may ask for its echo."""
_ENUMS: dict[tuple[str, str], list[str]] = {("EmbeddingBody", "encoding_format"): ["float", "base64"]}
_ORDER: dict[str, Json] = {"order": {"enum": ["asc", "desc"]}}
_MODEL_QUERY: dict[str, Json] = {"model": answers.TEXT}

OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a chat.", answers.CHAT, ChatBody, streams=True),
    Operation(
        "post", "/v1/completions", "Continue a text.", answers.COMPLETION, CompletionBody, streams=True
    ),
    Operation("post", "/v1/embeddings", "Make a vector of each text.", answers.EMBEDDINGS, EmbeddingBody),
    Operation(
        "post", "/v1/responses", "OpenAI's Responses API.", answers.RESPONSE, ResponsesBody, streams=True
    ),
    Operation("get", "/v1/responses/{response_id}", "Read a response that is kept.", answers.RESPONSE),
    Operation("delete", "/v1/responses/{response_id}", "Forget a response.", answers.DELETED),
    Operation(
        "get",
        "/v1/responses/{response_id}/input_items",
        "List the items that a response was made from.",
        answers.listed("list", answers.ANY_OBJECT),
        query=_PAGE | _ORDER,
    ),
    Operation(
        "post", "/v1/messages", "Anthropic's Messages API.", answers.MESSAGE, MessagesBody, streams=True
    ),
    Operation("post", "/v1/messages/count_tokens", "Count the prompt's tokens.", answers.COUNT, CountedBody),
    Operation("post", "/tokenize", "Turn a text or a chat into tokens.", answers.TOKENS, TokenizeBody),
    Operation(
        "post",
        "/detokenize",
        "Turn tokens into a text.",
        answers.an_object({"prompt": answers.TEXT}),
        DetokenizeBody,
    ),
    Operation("get", "/tokenizer_info", "Describe the tokenizer.", answers.ANY_OBJECT, query=_MODEL_QUERY),
    Operation(
        "get", "/v1/files", "List files.", answers.listed("list", answers.FILE), query=_LONG_PAGE | _ORDER
    ),
    Operation("get", "/v1/files/{file_id}", "Describe a file.", answers.FILE),
    Operation("delete", "/v1/files/{file_id}", "Delete a file.", answers.DELETED),
    Operation(
        "get", "/v1/files/{file_id}/content", "Read a file.", answers.TEXT, media="application/octet-stream"
    ),
    Operation("post", "/v1/batches", "Run the requests of a file.", answers.BATCH, BatchBody),
    Operation("get", "/v1/batches", "List batches.", answers.listed("list", answers.BATCH), query=_LONG_PAGE),
    Operation("get", "/v1/batches/{batch_id}", "Describe a batch.", answers.BATCH),
    Operation("post", "/v1/batches/{batch_id}/cancel", "Cancel a batch.", answers.BATCH),
    Operation("get", "/v1/models", "List models.", answers.listed("list", answers.MODEL)),
    Operation("get", "/v1/models/{name}", "Describe a model.", answers.MODEL),
    Operation("get", "/health", "Report the state.", answers.ANY_OBJECT),
    Operation("get", "/health/live", "Say whether the process lives.", answers.ANY_OBJECT),
    Operation(
        "get", "/health/ready", "Say whether requests are served.", answers.ANY_OBJECT, query=_MODEL_QUERY
    ),
    Operation("get", "/ping", "Say whether requests are served.", answers.ANY_OBJECT),
    Operation("get", "/version", "Say the version.", answers.an_object({"version": answers.TEXT})),
    Operation("get", "/metrics", "Metrics for Prometheus.", answers.TEXT, media="text/plain"),
    Operation("get", "/docs", "Show this document.", answers.TEXT, media="text/html"),
)
UNREADY = frozenset({"/health/ready", "/ping"})
"""Paths whose answer is the same object with 503."""


def document(*, body_bytes_max: int) -> Json:
    """Return the document. `body_bytes_max` is told to readers of it."""
    bodies = [one.body for one in OPERATIONS if one.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(bodies, schemas, strict=True))
    for body in bodies:
        _narrow(components, body)
    paths: Json = {}
    for one in OPERATIONS:
        schema = None if one.body is None else schema_of[one.body]
        paths.setdefault(one.path, {})[one.method] = _operation(one, schema)
    paths["/v1/files"]["post"] = _upload()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": "1",
            "description": f"The APIs of OpenAI and Anthropic. A body has at most {body_bytes_max} bytes.",
        },
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": answers.ERROR, "MessagesError": answers.MESSAGES_ERROR}
        },
    }


def _narrow(components: Json, body: type[msgspec.Struct]) -> None:
    """Write ranges and values into the fields of a body's schema."""
    properties = components.get(body.__name__, {}).get("properties", {})
    annotations = get_type_hints(body, include_extras=True)
    for name, field in properties.items():
        found = [one for one in get_args(annotations[name]) if isinstance(one, SamplingBounds)]
        low, high = (found[0].low, found[0].high) if found else _RANGES.get(name, (None, None))
        low = _LOWER.get((body.__name__, name), low)
        for branch in field.get("anyOf", [field]):
            if low is not None and branch.get("type") in ("integer", "number"):
                branch["minimum"] = low
                if high is not None:
                    branch["maximum"] = high
            if (values := _ENUMS.get((body.__name__, name))) and branch.get("type") == "string":
                branch["enum"] = values


def _errors(path: str) -> Json:
    name = "MessagesError" if path.startswith("/v1/messages") else "Error"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {str(status): {"description": text, "content": content} for status, text in ERRORS.items()}


def _operation(one: Operation, body: Json | None) -> Json:
    content: Json = {one.media: {"schema": one.answer}}
    if one.streams:
        content["text/event-stream"] = {"schema": answers.TEXT}
    answer: Json = {"description": "the answer", "content": content}
    responses = {"200": answer, **_errors(one.path)}
    if one.path in UNREADY:
        responses["503"] = answer
    found: Json = {"summary": one.summary, "responses": responses}
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    parameters: list[Any] = [
        {"name": name, "in": "path", "required": True, "schema": answers.TEXT}
        for name in re.findall(r"{(\w+)}", one.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in one.query.items()]
    return found | ({"parameters": parameters} if parameters else {})


def _upload() -> Json:
    fields = answers.an_object(
        {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}}
    ) | {"required": ["file", "purpose"]}
    answer: Json = {"description": "the file", "content": {"application/json": {"schema": answers.FILE}}}
    return {
        "summary": "Upload a file of requests.",
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": fields}}},
        "responses": {"200": answer, **_errors("/v1/files")},
    }
