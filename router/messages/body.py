"""The fields of a request of the Messages API. Pure."""

from typing import Any

import msgspec

from router.openai.bodies import BatonOptions
from router.openai.unsupported import Harmless

UNSUPPORTED: dict[str, Harmless] = {"container": (), "mcp_servers": ([],)}


class MessagesMetadata(msgspec.Struct, frozen=True):
    user_id: str | None = None


class ThinkingOptions(msgspec.Struct, frozen=True):
    type: str
    budget_tokens: int | None = None


class MessagesOutput(msgspec.Struct, frozen=True):
    format: Any = None
    effort: str | None = None


class CountedBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that decide which tokens the model gets."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingOptions | None = None
    output_config: MessagesOutput | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountedBody, frozen=True, kw_only=True):
    """Fields of a request for an answer. Names that Anthropic lacks are those of /v1/chat/completions."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: MessagesMetadata | None = None
    service_tier: str | None = None
    # Fields that /v1/chat/completions has under the same names.
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: Any = None
    priority: int | None = None
    baton: BatonOptions | None = None


SAME_IN_CHAT = (
    *("max_tokens", "stream", "temperature", "top_p", "top_k", "service_tier", "min_p", "seed"),
    *("stop_token_ids", "ignore_eos", "min_tokens", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "skip_special_tokens", "structured_outputs", "priority", "baton"),
)
"""Fields that a chat has under the same name and with the same meaning."""
