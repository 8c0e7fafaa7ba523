"""OpenAI requests: from the body's bytes to a checked `Call`. Pure.

A body is parsed once. Whatever is wrong with it raises ClientError, naming the field.
"""

import gc
import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from baton.core.errors import ClientError, PromptTooLong
from baton.core.sampling import SamplingParams
from router.model_card import ModelCard, prompt_too_long
from router.unsupported import CHAT, COMPLETION, Harmless, refuse_unsupported

STOPS_MAX = 16
STOP_CHARACTERS_MAX = 1024
MESSAGES_MAX = 8192
"""Of one request, and parts of one message: a template's rendering of more would hold everybody up."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""
SEED_BITS = 64
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

Prompt = str | tuple[int, ...]


class Endpoint(StrEnum):
    CHAT = "chat.completion"
    COMPLETION = "text_completion"


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints have. `top_k`, `ignore_eos`, `stop_token_ids` and `return_token_ids` are
    extensions, named as in vLLM."""

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    user: str | None = None


class _ChatBody(_Body, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None


class _CompletionBody(_Body, frozen=True, kw_only=True):
    prompt: str | list[Any]


class Limits(msgspec.Struct, frozen=True):
    """What this server and its model allow."""

    card: ModelCard
    choices_max: int
    default_max_tokens: int


class Call(msgspec.Struct, frozen=True):
    """A checked request: everything is within bounds except what only the tokens can tell."""

    endpoint: Endpoint
    model: str
    prompts: tuple[Prompt, ...]
    """Completions only; each has `n` choices."""
    messages: tuple[dict[str, Any], ...]
    """Chat only, with `content` as text."""
    n: int
    stream: bool
    include_usage: bool
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    return_token_ids: bool
    max_tokens_field: str = "max_tokens"


def parse_chat(body: bytes, limits: Limits) -> Call:
    parsed = _parse(body, _ChatBody, CHAT)
    max_tokens, field = parsed.max_tokens, "max_tokens"
    if parsed.max_completion_tokens is not None:
        max_tokens, field = parsed.max_completion_tokens, "max_completion_tokens"
    return _call(parsed, limits, Endpoint.CHAT, max_tokens, field, messages=check_messages(parsed.messages))


def parse_completion(body: bytes, limits: Limits) -> Call:
    parsed = _parse(body, _CompletionBody, COMPLETION)
    prompts = check_prompts(parsed.prompt, limits)
    max_tokens = COMPLETION_MAX_TOKENS if parsed.max_tokens is None else parsed.max_tokens
    return _call(parsed, limits, Endpoint.COMPLETION, max_tokens, "max_tokens", prompts=prompts)


def sampling_params(call: Call, *, choice_index: int, prompt_tokens: int, limits: Limits) -> SamplingParams:
    """For one choice. Raises PromptTooLong if prompt and answer do not fit into the context."""
    context = limits.card.context_tokens
    room = context - prompt_tokens
    field = "messages" if call.endpoint is Endpoint.CHAT else "prompt"
    if prompt_tokens < 1:
        raise ClientError(f"{field} must not be empty: there is nothing to go on from", param=field)
    if room < 1:
        raise prompt_too_long(prompt_tokens, context, field)
    max_tokens = min(limits.default_max_tokens, room) if call.max_tokens is None else call.max_tokens
    if max_tokens > room:
        raise PromptTooLong(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the {field}, {max_tokens} in the "
            f"completion). Please reduce the {field} or {call.max_tokens_field}.",
            param=field,
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=call.temperature,
        top_p=call.top_p,
        top_k=call.top_k,
        seed=choice_seed(call.seed, choice_index),
        stop_token_ids=tuple(dict.fromkeys((*limits.card.eos_token_ids, *call.stop_token_ids))),
        ignore_eos=call.ignore_eos,
    )


def choice_seed(seed: int, choice_index: int) -> int:
    """The client's own for the first choice; for the others one that follows from it."""
    if choice_index == 0:
        return seed
    digest = blake2b(b"%d/%d" % (seed, choice_index), digest_size=SEED_BITS // 8).digest()
    return int.from_bytes(digest, "little")


# --- the body -------------------------------------------------------------------------------------

B = TypeVar("B", _ChatBody, _CompletionBody)


@contextmanager
def _without_gc() -> Generator[None]:
    """A body of a million small containers takes six times as long to decode while the collector looks
    through them again and again, and none of them is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _parse(body: bytes, kind: type[B], unsupported: dict[str, Harmless]) -> B:
    with _without_gc():
        return _parse_fields(body, kind, unsupported)


def _parse_fields(body: bytes, kind: type[B], unsupported: dict[str, Harmless]) -> B:
    try:
        fields = msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise ClientError(f"the body is not UTF-8: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ClientError(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ClientError("the body must be a JSON object")
    try:
        parsed = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _field_error(error) from error
    refuse_unsupported(fields, unsupported)
    return parsed


def _field_error(error: msgspec.ValidationError) -> ClientError:
    """msgspec says "… - at `$.messages[1]`" or "… missing required field `model`"."""
    what, _, path = str(error).partition(" - at `$.")
    if path:
        return ClientError(f"{what} in {path.rstrip('`')}", param=path.rstrip("`"), code="invalid_type")
    if "missing required field" in what:
        field = what.rsplit("`", 2)[1]
        return ClientError(f"{field} is required", param=field, code="missing_required_parameter")
    return ClientError(what)


def _call(
    body: _Body,
    limits: Limits,
    endpoint: Endpoint,
    max_tokens: int | None,
    max_tokens_field: str,
    *,
    prompts: tuple[Prompt, ...] = (),
    messages: tuple[dict[str, Any], ...] = (),
) -> Call:
    n = _between("n", body.n, 1, limits.choices_max, default=1)
    if len(prompts) * n > limits.choices_max:
        raise ClientError(
            f"{len(prompts)} prompts with n={n} are {len(prompts) * n} choices, at most "
            f"{limits.choices_max} are allowed",
            param="prompt",
        )
    top_p = _between("top_p", body.top_p, 0.0, 1.0, default=1.0)
    top_k = max(0, _between("top_k", body.top_k, -1, 2**31 - 1, default=0))
    return Call(
        endpoint=endpoint,
        model=body.model,
        prompts=prompts,
        messages=messages,
        n=n,
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        max_tokens=_check_max_tokens(max_tokens, max_tokens_field, limits.card.context_tokens),
        temperature=_between("temperature", body.temperature, 0.0, 2.0, default=1.0),
        # A nucleus of nothing is the most likely token alone.
        top_p=top_p if top_p > 0 else 1.0,
        top_k=top_k if top_p > 0 else 1,
        seed=_check_seed(body.seed),
        stops=_check_stops(body.stop),
        stop_token_ids=_check_stop_tokens(body.stop_token_ids or [], limits.card.vocab_size),
        ignore_eos=bool(body.ignore_eos),
        return_token_ids=bool(body.return_token_ids),
        max_tokens_field=max_tokens_field,
    )


# --- fields ---------------------------------------------------------------------------------------

N = TypeVar("N", int, float)


def _between(name: str, value: N | None, low: N, high: N, *, default: N) -> N:
    if value is None:
        return default
    if not low <= value <= high:
        raise ClientError(f"{name} must be from {low} to {high}, not {value}", param=name)
    return value


def _check_max_tokens(value: int | None, field: str, context_tokens: int) -> int | None:
    if value is None:
        return None
    if value < 1:
        raise ClientError(f"{field} must be at least 1, not {value}", param=field)
    if value > context_tokens:
        raise ClientError(
            f"{field} is {value}, but this model's maximum context length is {context_tokens} tokens",
            param=field,
            code="context_length_exceeded",
        )
    return value


def _include_usage(body: _Body) -> bool:
    if body.stream_options is None:
        return False
    if not body.stream:
        raise ClientError("stream_options is only allowed with stream: true", param="stream_options")
    return bool(body.stream_options.include_usage)


def _check_seed(seed: int | None) -> int:
    if seed is None:
        return secrets.randbits(SEED_BITS)
    if not -(2**63) <= seed < 2**63:
        raise ClientError(f"seed must fit into 64 bits, not {seed}", param="seed")
    return seed % 2**SEED_BITS  # unsigned on the wire; no two of them become one


def _check_stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if len(stops) > STOPS_MAX:
        raise ClientError(f"at most {STOPS_MAX} stop strings are allowed, not {len(stops)}", param="stop")
    for one in stops:
        if not 1 <= len(one) <= STOP_CHARACTERS_MAX:
            raise ClientError(
                f"a stop string has from 1 to {STOP_CHARACTERS_MAX} characters, not {len(one)}", param="stop"
            )
    return tuple(dict.fromkeys(stops))


def _check_stop_tokens(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > STOPS_MAX:
        raise ClientError(f"at most {STOPS_MAX} stop tokens are allowed", param="stop_token_ids")
    return _check_ids(ids, "stop_token_ids", vocab_size)


def _check_ids(ids: Sequence[Any], param: str, vocab_size: int) -> tuple[int, ...]:
    for at, token in enumerate(ids):
        if type(token) is not int:
            raise ClientError(f"{param}[{at}] must be a token id", param=param, code="invalid_type")
        if not 0 <= token < vocab_size:
            raise ClientError(
                f"{param}[{at}] is {token}, but this model's token ids are from 0 to {vocab_size - 1}",
                param=param,
            )
    return tuple(ids)


def _check_prompt_ids(ids: list[Any], param: str, limits: Limits) -> tuple[int, ...]:
    """The length first: looking at millions of ids that can't be used anyway holds everybody up."""
    if len(ids) >= limits.card.context_tokens:
        raise prompt_too_long(len(ids), limits.card.context_tokens, "prompt")
    return _check_ids(ids, param, limits.card.vocab_size)


def check_prompts(prompt: str | list[Any], limits: Limits) -> tuple[Prompt, ...]:
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise ClientError("prompt must not be empty", param="prompt")
    first = prompt[0]
    if type(first) is int:
        return (_check_prompt_ids(prompt, "prompt", limits),)
    if len(prompt) > limits.choices_max:
        raise ClientError(
            f"{len(prompt)} prompts, at most {limits.choices_max} choices are allowed", param="prompt"
        )
    if isinstance(first, str | list) and all(type(one) is type(first) for one in prompt):
        if isinstance(first, str):
            return tuple(prompt)
        if not all(prompt):
            raise ClientError("prompt must not be empty", param="prompt")
        return tuple(_check_prompt_ids(one, f"prompt[{at}]", limits) for at, one in enumerate(prompt))
    raise ClientError(
        "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
        param="prompt",
        code="invalid_type",
    )


def check_messages(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    if not messages:
        raise ClientError("messages must not be empty", param="messages")
    if len(messages) > MESSAGES_MAX:
        raise ClientError(
            f"at most {MESSAGES_MAX} messages are allowed, not {len(messages)}", param="messages"
        )
    return tuple(_check_message(message, f"messages[{at}]") for at, message in enumerate(messages))


def _check_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES if isinstance(role, str) else True:
        raise ClientError(
            f"{where}.role must be one of {', '.join(sorted(ROLES))}, not {role!r:.60}", param=f"{where}.role"
        )
    content = message.get("content")
    if isinstance(content, list):
        if len(content) > MESSAGES_MAX:
            raise ClientError(
                f"{where}.content may have at most {MESSAGES_MAX} parts, not {len(content)}",
                param=f"{where}.content",
            )
        content = "\n".join(_part_text(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    elif content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    elif not isinstance(content, str):
        raise ClientError(
            f"{where}.content must be a string or a list of text parts",
            param=f"{where}.content",
            code="invalid_type",
        )
    return {**message, "content": content}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ClientError(f"{where} is {kind!r:.60}: only text parts are supported", param=where)
