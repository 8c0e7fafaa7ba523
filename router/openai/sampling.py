"""The sampling of a request, as `SamplingParams`. Pure."""

from hashlib import blake2b
from typing import Any, get_type_hints

import msgspec

from baton.core.errors import ClientError, PromptTooLong
from baton.core.sampling import Grammar, SamplingParams
from router.openai.bodies import Body, SamplingBounds
from router.openai.call import Call, RequestLimits
from router.openai.checks import (
    LOGPROBS_MAX,
    SEED_BITS,
    N,
    between,
    check_allowed_ids,
    check_logit_bias,
    check_seed,
    check_stop_tokens,
)
from router.text.model_card import ModelCard, prompt_too_long
from router.text.sampling_defaults import NO_DEFAULTS, SamplingDefaults

TEMPERATURE_MIN = 1e-5
"""Temperatures below this count as greedy."""

DEFAULTS: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


def _bounded_fields() -> dict[str, SamplingBounds]:
    hints = get_type_hints(Body, include_extras=True)
    bounds = ((name, getattr(hint, "__metadata__", ())) for name, hint in hints.items())
    return {name: one for name, metadata in bounds for one in metadata if isinstance(one, SamplingBounds)}


BOUNDED = _bounded_fields()
"""Fields of bodies with `SamplingBounds`. Each becomes the field of the same name in `SamplingParams`."""


def _bounded_values(body: Body, own: SamplingDefaults) -> dict[str, Any]:
    """`own` has the model's values for fields that the request leaves out."""
    return {
        name: between(
            name,
            getattr(body, name),
            bounds.low,
            bounds.high,
            default=_or(getattr(own, name, None), DEFAULTS[name]),
        )
        for name, bounds in BOUNDED.items()
    }


def _or(own: N | None, default: N) -> N:
    return default if own is None else own


def sampling_params(
    call: Call,
    *,
    choice_index: int,
    prompt_tokens: int,
    limits: RequestLimits,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Return the sampling of one choice. Raises PromptTooLong if prompt and answer do not fit into the
    context."""
    context = limits.card.context_tokens
    room = context - prompt_tokens
    field = call.prompt_field
    if prompt_tokens < 1:
        raise ClientError(f"{field} must not be empty: give it at least one token", param=field)
    if room < 1:
        raise prompt_too_long(prompt_tokens, context, field)
    most = _or(limits.card.sampling.max_new_tokens, context)
    max_tokens = min(
        *((limits.default_max_tokens, room) if call.max_tokens is None else (call.max_tokens,)), most
    )
    if max_tokens > room:
        raise PromptTooLong(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the {field}, {max_tokens} in the "
            f"completion). Please reduce the {field} or {call.max_tokens_field}.",
            param=field,
        )
    sampling = call.sampling
    if sampling.min_tokens > max_tokens:
        raise ClientError(
            f"min_tokens must be at most {max_tokens}, as {call.max_tokens_field}", param="min_tokens"
        )
    own = sampling.stop_token_ids
    # vLLM's meaning: the client's own stop tokens count even where the model's are ignored.
    ends = own if sampling.ignore_eos and own else (*limits.card.eos_token_ids, *own)
    allowed = sampling.allowed_token_ids
    if grammar is not None and allowed:
        raise allowed_beside("a grammar for tool calls")
    if allowed and sampling.min_tokens and set(allowed) <= set(ends):
        raise ClientError(
            "allowed_token_ids are stop tokens only, which min_tokens forbids", param="allowed_token_ids"
        )
    return msgspec.structs.replace(
        sampling,
        max_tokens=max_tokens,
        seed=choice_seed(sampling.seed, choice_index),
        stop_token_ids=tuple(dict.fromkeys(ends)),
        ignore_eos=sampling.ignore_eos and not own,
        grammar=grammar,
    )


def choice_seed(seed: int, choice_index: int) -> int:
    """Return the client's own seed for the first choice, and seeds derived from it for the others."""
    if choice_index == 0:
        return seed
    digest = blake2b(b"%d/%d" % (seed, choice_index), digest_size=SEED_BITS // 8).digest()
    return int.from_bytes(digest, "little")


def allowed_beside(field: str) -> ClientError:
    """Return the error for `allowed_token_ids` beside a grammar. They may have no token in common, and then
    there would be none to choose."""
    return ClientError(f"allowed_token_ids and {field} exclude each other", param="allowed_token_ids")


def checked_sampling(body: Body, card: ModelCard, logprobs: int | None) -> SamplingParams:
    """Return the sampling of all choices. Raises ClientError that names the field."""
    # Beams are scored by the model alone, so that its usual sampling has no part in them.
    own = NO_DEFAULTS if body.use_beam_search else card.sampling
    top_p = between("top_p", body.top_p, 0.0, 1.0, default=_or(own.top_p, 1.0))
    top_k = max(0, between("top_k", body.top_k, -1, 2**31 - 1, default=_or(own.top_k, 0)))
    prompt_logprobs = body.prompt_logprobs
    if prompt_logprobs is not None:
        between("prompt_logprobs", prompt_logprobs, 0, LOGPROBS_MAX, default=0)
        if body.stream:
            raise ClientError("prompt_logprobs are not available with stream: true", param="prompt_logprobs")
    return SamplingParams(
        max_tokens=1,
        temperature=_check_temperature(body.temperature, _or(own.temperature, 1.0)),
        # A nucleus of nothing is the most likely token alone.
        top_p=top_p if top_p > 0 else 1.0,
        top_k=top_k if top_p > 0 else 1,
        seed=check_seed(body.seed),
        stop_token_ids=check_stop_tokens(body.stop_token_ids or [], card.vocab_size),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=between("min_tokens", body.min_tokens, 0, card.context_tokens, default=0),
        logit_bias=check_logit_bias(body.logit_bias, card.vocab_size),
        allowed_token_ids=check_allowed_ids(body.allowed_token_ids, card.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **_bounded_values(body, own),
    )


def _check_temperature(value: float | None, default: float) -> float:
    """Return the temperature, or 0 (greedy) below a value at which all but ties and rounding is greedy
    already."""
    checked = between("temperature", value, 0.0, 2.0, default=default)
    return checked if checked >= TEMPERATURE_MIN else 0.0
