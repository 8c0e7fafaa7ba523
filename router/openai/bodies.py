"""The fields of OpenAI requests, by endpoint, and the decoding of a body's bytes into them. Pure."""

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import orjson

from baton.core.errors import ClientError
from router.openai.unsupported import Harmless, refuse_unsupported
from router.text.json_bounds import JsonBudget


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class BatonOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `baton`, with options that only this server has."""

    slo_class: str | None = None
    """Name of a class of `slo.classes`."""
    ttft_ms: float | None = None
    """Objective of the time to the first token, in place of the class's."""
    tpot_ms: float | None = None
    """Objective of the time per output token, in place of the class's."""
    timings: bool | None = None
    """True if the answer says where the time to its first token went, and who served it."""


class SamplingBounds(NamedTuple):
    """Bounds of a field that becomes the field of the same name in `SamplingParams`.

    The default of that field changes nothing. It is used if the request has no value, and it is the only
    value that beam search accepts.
    """

    low: float
    high: float


class AnyBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    user: str | None = None
    safety_identifier: str | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    service_tier: str | None = None
    baton: BatonOptions | None = None


class Body(AnyBody, frozen=True, kw_only=True):
    """Fields of both generating endpoints. Names that OpenAI lacks are vLLM's."""

    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: Annotated[float | None, SamplingBounds(0.0, 1.0)] = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    repetition_penalty: Annotated[float | None, SamplingBounds(0.01, 10.0)] = None
    presence_penalty: Annotated[float | None, SamplingBounds(-2.0, 2.0)] = None
    frequency_penalty: Annotated[float | None, SamplingBounds(-2.0, 2.0)] = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: Any = None
    # SGLang's and llama.cpp's names.
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    json_schema: Any = None


class ChatBody(Body, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, str]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    prompt: str | list[Any]
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None


class EmbeddingBody(AnyBody, frozen=True, kw_only=True):
    input: str | list[Any]
    encoding_format: str | None = None
    dimensions: int | None = None


B = TypeVar("B", bound=msgspec.Struct)


@contextmanager
def _without_gc() -> Generator[None]:
    """Turn the garbage collector off. It would look through a body of a million small containers again and
    again, which takes six times as long, and none of them is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse_body(body: bytes, kind: type[B], unsupported: dict[str, Harmless]) -> B:
    with _without_gc():
        return _parse_fields(body, kind, unsupported)


def _utf8_error(body: bytes) -> str:
    """Return the error with its position in the body. The decoder only knows the position within a string."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"{error.reason} at byte {error.start}"
    return ""


def _json_error(body: bytes) -> str:
    """Return the error with its line and column. msgspec gives neither, and calls half of a surrogate pair
    truncated."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return str(error)
    return ""


def decode_object(body: bytes) -> dict[str, Any]:
    """Return the fields of a JSON object. Raises ClientError if the body is none, or has too many values."""
    if not body.strip():
        raise ClientError("the body is empty: it must be a JSON object")
    JsonBudget().take_body(body)
    try:
        fields = msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise ClientError(f"the body is not UTF-8: {_utf8_error(body) or error.reason}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ClientError(f"the body is not valid JSON: {_json_error(body) or error}") from error
    if not isinstance(fields, dict):
        raise ClientError("the body must be a JSON object")
    return fields


def _parse_fields(body: bytes, kind: type[B], unsupported: dict[str, Harmless]) -> B:
    fields = decode_object(body)
    try:
        parsed = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise field_error(error) from error
    refuse_unsupported(fields, unsupported)
    return parsed


def field_error(error: msgspec.ValidationError) -> ClientError:
    """Return the error with the field that it names. msgspec says "… - at `$.messages[1]`" or "… missing
    required field `model`"."""
    what, _, path = str(error).partition(" - at `$.")
    if path:
        return ClientError(f"{what} in {path.rstrip('`')}", param=path.rstrip("`"), code="invalid_type")
    if "missing required field" in what:
        field = what.rsplit("`", 2)[1]
        return ClientError(f"{field} is required", param=field, code="missing_required_parameter")
    return ClientError(what)
