"""The fields of a request of the Responses API, and those that this server refuses. Pure."""

from typing import Any

import msgspec

from baton.core.errors import ClientError
from router.openai.bodies import BatonOptions
from router.openai.unsupported import Harmless

METADATA_MAX = 16
METADATA_KEY_MAX, METADATA_VALUE_MAX = 64, 512
"""OpenAI's bounds of `metadata`."""

INCLUDES = frozenset(
    {
        "message.output_text.logprobs",
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
"""Values of `include`. Those after the first name what this server's answers never have."""

UNSUPPORTED: dict[str, Harmless] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}


class TextOptions(msgspec.Struct, frozen=True):
    format: Any = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    include_obfuscation: bool | None = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the request. Names that OpenAI lacks are those of /v1/chat/completions."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: str | None = None
    include: list[str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    # --- as /v1/chat/completions has them ---
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    baton: BatonOptions | None = None


SAME_IN_CHAT = (
    *("model", "temperature", "top_p", "stream", "user", "safety_identifier", "service_tier"),
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "skip_special_tokens"),
    *("structured_outputs", "chat_template_kwargs", "priority", "baton", "parallel_tool_calls"),
)
"""Fields that a chat has under the same name and with the same meaning."""


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raise ClientError if there is more metadata than OpenAI allows."""
    metadata = metadata or {}
    if len(metadata) > METADATA_MAX:
        raise ClientError(
            f"metadata may have at most {METADATA_MAX} entries, not {len(metadata)}", param="metadata"
        )
    for key, value in metadata.items():
        if len(key) > METADATA_KEY_MAX or len(value) > METADATA_VALUE_MAX:
            raise ClientError(
                f"metadata: keys have at most {METADATA_KEY_MAX} characters, and values {METADATA_VALUE_MAX}",
                param="metadata",
            )


def check_options(body: ResponsesBody) -> None:
    """Raise ClientError for a value that a chat has no check for."""
    check_metadata(body.metadata)
    for at, one in enumerate(body.include or ()):
        if one not in INCLUDES:
            raise ClientError(
                f"include[{at}] is {one!r:.80}, which is not known; known are {', '.join(sorted(INCLUDES))}",
                param=f"include[{at}]",
            )
    if body.truncation not in (None, "auto", "disabled"):
        raise ClientError("truncation must be auto or disabled", param="truncation")
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise ClientError("max_tool_calls must be at least 1", param="max_tool_calls")
    if body.text is not None and body.text.verbosity not in (None, "low", "medium", "high"):
        raise ClientError("text.verbosity must be low, medium or high", param="text.verbosity")


def wants_logprobs(body: ResponsesBody) -> bool:
    return "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)
