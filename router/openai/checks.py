"""Checks of single request fields. Each raises ClientError naming the field. Pure."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from random import Random, SystemRandom
from typing import Any, TypeVar

from baton.core.errors import ClientError
from router.text.model_card import ModelCard, prompt_too_long

STOPS_MAX = 16
STOP_CHARACTERS_MAX = 1024
SEED_BITS = 64
LOGPROBS_MAX = 20
"""Most logprobs per token: OpenAI's bound for chat and vLLM's default for both endpoints."""
LOGIT_BIASES_MAX = 1024

_seeds = Random(SystemRandom().getrandbits(256))

Prompt = str | tuple[int, ...]

N = TypeVar("N", int, float)


def between(name: str, value: N | None, low: N, high: N, *, default: N) -> N:
    if value is None:
        return default
    if not low <= value <= high:
        raise ClientError(f"{name} must be from {low} to {high}, not {value}", param=name)
    return value


def check_max_tokens(value: int | None, field: str, context_tokens: int) -> int | None:
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


def check_seed(seed: int | None) -> int:
    if seed is None:
        return _seeds.getrandbits(SEED_BITS)  # Seeds are no secret, and asking the kernel each time is slow.
    if not -(2**63) <= seed < 2**63:
        raise ClientError(f"seed must fit into 64 bits, not {seed}", param="seed")
    return seed % 2**SEED_BITS  # Seeds are unsigned on the wire; no two of them become one.


def check_stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if len(stops) > STOPS_MAX:
        raise ClientError(f"at most {STOPS_MAX} stop strings are allowed, not {len(stops)}", param="stop")
    for one in stops:
        if not 1 <= len(one) <= STOP_CHARACTERS_MAX:
            raise ClientError(
                f"a stop string has from 1 to {STOP_CHARACTERS_MAX} characters, not {len(one)}", param="stop"
            )
    return tuple(dict.fromkeys(stops))


def check_stop_tokens(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > STOPS_MAX:
        raise ClientError(f"at most {STOPS_MAX} stop tokens are allowed", param="stop_token_ids")
    return check_ids(ids, "stop_token_ids", vocab_size)


def check_ids(ids: Sequence[Any], param: str, vocab_size: int) -> tuple[int, ...]:
    for at, token in enumerate(ids):
        if type(token) is not int:
            raise ClientError(f"{param}[{at}] must be a token id", param=param, code="invalid_type")
        if not 0 <= token < vocab_size:
            raise ClientError(
                f"{param}[{at}] is {token}, but this model's token ids are from 0 to {vocab_size - 1}",
                param=param,
            )
    return tuple(ids)


def check_allowed_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not ids:
        raise ClientError("allowed_token_ids must not be empty: no token is left", param="allowed_token_ids")
    if len(ids) > vocab_size:
        raise ClientError(
            f"allowed_token_ids has {len(ids)} ids, this model has {vocab_size}", param="allowed_token_ids"
        )
    return tuple(sorted(set(check_ids(ids, "allowed_token_ids", vocab_size))))


def check_logit_bias(biases: Mapping[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not biases:
        return ()
    if len(biases) > LOGIT_BIASES_MAX:
        raise ClientError(
            f"logit_bias may have at most {LOGIT_BIASES_MAX} entries, not {len(biases)}", param="logit_bias"
        )
    found: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            raise ClientError(
                f"logit_bias: {key!r:.40} is no token id of this model, which are from 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        found[int(key)] = between("logit_bias", float(bias), -100.0, 100.0, default=0.0)
    return tuple(sorted(found.items()))


def check_user(name: str | None) -> str:
    """Return the name that the request counts to in fair scheduling. Its size is bounded."""
    if name is None or len(name) <= 64:
        return name or ""
    return blake2b(name.encode(), digest_size=16).hexdigest()


def _check_prompt_ids(ids: list[Any], param: str, card: ModelCard, *, may_be_cut: bool) -> tuple[int, ...]:
    """Check token ids, the length first: looking at millions of ids that cannot be used anyway would block
    other requests."""
    if len(ids) >= card.context_tokens and not may_be_cut:
        raise prompt_too_long(len(ids), card.context_tokens, param.partition("[")[0])
    return check_ids(ids, param, card.vocab_size)


def check_prompts(
    prompt: str | list[Any], card: ModelCard, *, prompts_max: int, param: str = "prompt", may_be_cut: bool
) -> tuple[Prompt, ...]:
    """Return the prompts. The field may be a text, a list of texts, a list of token ids, or a list of such
    lists."""
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise ClientError(f"{param} must not be empty", param=param)
    first = prompt[0]
    if type(first) is int:
        return (_check_prompt_ids(prompt, param, card, may_be_cut=may_be_cut),)
    if len(prompt) > prompts_max:
        raise ClientError(f"{len(prompt)} {param}s, at most {prompts_max} are allowed", param=param)
    if isinstance(first, str | list) and all(type(one) is type(first) for one in prompt):
        if isinstance(first, str):
            return tuple(prompt)
        if not all(prompt):
            raise ClientError(f"{param} must not be empty", param=param)
        return tuple(
            _check_prompt_ids(one, f"{param}[{at}]", card, may_be_cut=may_be_cut)
            for at, one in enumerate(prompt)
        )
    raise ClientError(
        f"{param} must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
        param=param,
        code="invalid_type",
    )
