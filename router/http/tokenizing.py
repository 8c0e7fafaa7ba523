"""/tokenize, /detokenize and /tokenizer_info, with vLLM's fields and shapes."""

from functools import partial
from typing import Any

import msgspec

from baton.core.errors import ClientError
from router.http.client import AuthenticatedClient
from router.http.quick import tokens_of
from router.http.service import Service
from router.openai.bodies import ChatBody, parse_body
from router.openai.call import Call, RequestLimits
from router.openai.checks import check_ids
from router.openai.requests import chat_call
from router.openai.unsupported import Harmless

UNSUPPORTED: dict[str, Harmless] = {"chat_template": (), "mm_processor_kwargs": ()}


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Any = None
    add_special_tokens: bool | None = None
    """True: with the tokens that the model wants before a text. Default: prompts true, messages false."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


async def tokenize(service: Service, client: AuthenticatedClient, body: bytes) -> object:
    """Return the tokens of a prompt or a conversation. Raises BatonError."""
    parsed = parse_body(body, TokenizeBody, UNSUPPORTED)
    if (parsed.prompt is None) == (parsed.messages is None):
        raise ClientError("give either prompt or messages", param="prompt")
    if parsed.prompt is not None:
        tokens = await service.tokenizer.encode(
            parsed.prompt, with_special=parsed.add_special_tokens is not False, may_be_cut=True
        )
    else:
        tokens = await tokens_of(service, client, body, partial(_chat, parsed, service))
    names = service.tokenizer.names_of(tokens) if parsed.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": service.limits.card.context_tokens,
        "tokens": tokens,
        "token_strs": names,
    }


def _chat(parsed: TokenizeBody, service: Service, _: bytes, limits: RequestLimits) -> Call:
    chat = ChatBody(
        model=parsed.model or service.model,
        messages=parsed.messages or [],
        tools=parsed.tools,
        add_special_tokens=parsed.add_special_tokens,
        add_generation_prompt=parsed.add_generation_prompt,
        continue_final_message=parsed.continue_final_message,
        chat_template_kwargs=parsed.chat_template_kwargs,
    )
    return chat_call(chat, limits)


async def detokenize(service: Service, client: AuthenticatedClient, body: bytes) -> object:
    """Return the text of tokens, special ones included. Raises BatonError."""
    parsed = parse_body(body, DetokenizeBody, {})
    ids = list(check_ids(parsed.tokens, "tokens", service.limits.card.vocab_size))
    return {"prompt": await service.tokenizer.in_thread(lambda: service.tokenizer.decode(ids))}
