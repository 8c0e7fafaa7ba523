"""A request in the words of OpenTelemetry's semantic conventions for generative AI. Pure.

Source: opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans. No prompt and no answer is among them.
"""

from collections.abc import Sequence
from typing import Any

from router.openai.call import Call, Endpoint
from router.openai.responses import Usage

PROVIDER = "baton"
OPERATIONS = {
    Endpoint.CHAT: "chat",
    Endpoint.COMPLETION: "text_completion",
    Endpoint.EMBEDDING: "embeddings",
}


def operation_of(call: Call) -> str:
    return OPERATIONS[call.endpoint]


def request_attributes(call: Call) -> dict[str, Any]:
    """Return the attributes of a checked request, those that it has no value for left out."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation_of(call),
        "gen_ai.provider.name": PROVIDER,
        # The name of the provider in the conventions' versions before 1.37, which many tools read.
        "gen_ai.system": PROVIDER,
        "gen_ai.request.model": call.model,
    }
    if call.endpoint is Endpoint.EMBEDDING:
        return found
    sampling = call.sampling
    found |= {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.output.type": "text" if call.structured is None else "json",
    }
    if call.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = call.max_tokens
    if sampling.top_k:
        found["gen_ai.request.top_k"] = sampling.top_k
    for name in ("frequency_penalty", "presence_penalty"):
        if value := getattr(sampling, name):
            found[f"gen_ai.request.{name}"] = value
    if call.n > 1:
        found["gen_ai.request.choice.count"] = call.n
    if call.stops:
        found["gen_ai.request.stop_sequences"] = list(call.stops)
    return found


def answer_attributes(usage: Usage, *, answer_id: str, reasons: Sequence[str]) -> dict[str, Any]:
    """Return the attributes of a request that was answered in full."""
    found: dict[str, Any] = {
        "gen_ai.response.id": answer_id,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
    }
    return found | ({"gen_ai.response.finish_reasons": list(reasons)} if reasons else {})
