"""The requests of a drill: a trace says when they come and how long they are, the seed says what they ask
for. Pure.

Every kind has one right answer: greedy decoding, beam search and embeddings in float32, and samples from a
seed.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from loadgen.lengths import PlannedRequest, ReplayPlan
from loadgen.prompts import PromptMaker

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
KINDS = {
    "greedy": 40,
    "chat": 14,
    "stop": 6,
    "logprobs": 8,
    "sampled": 10,
    "choices": 6,
    "beams": 4,
    "embeddings": 4,
    "tool": 4,
    "schema": 4,
}
"""How often each kind is drawn, in percent."""

CHAT_KINDS, TOOL_KINDS = ("chat", "schema"), ("tool",)
"""Kinds that need a chat template, and one that knows tools."""

TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {"to": {"enum": ["left", "right"]}, "steps": {"enum": [1, 2, 3]}},
            "required": ["to", "steps"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "light",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "amber", "green"]}, "is_on": {"type": "boolean"}},
            "required": ["colour", "is_on"],
            "additionalProperties": False,
        },
    },
}
GRAMMAR_TOKENS = 64
"""Room for the objects of TOOL and SCHEMA."""
BEAM_TOKENS_MAX = 16
_WORDS = 48
"""Longest chat message and embedding input, in words of two or three tokens."""


class DrillRequest(msgspec.Struct, frozen=True):
    """One request, ready to be sent."""

    index: int
    at_s: float
    kind: str
    path: str
    body: dict[str, Any]

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


def asks(
    plan: ReplayPlan, prompts: PromptMaker, kinds: Mapping[str, int], *, model: str, seed: int
) -> Iterator[DrillRequest]:
    """The requests in the order of the plan. `kinds` has the weight of each kind."""
    rng = random.Random(f"chaos requests {seed}")
    for request in plan.requests:
        (kind,) = rng.choices(list(kinds), list(kinds.values()))
        path, body = _body(kind, request, prompts, rng.randrange(1 << 30))
        yield DrillRequest(request.index, request.at_s, kind, path, {"model": model, **body})


def _body(kind: str, request: PlannedRequest, prompts: PromptMaker, seed: int) -> tuple[str, dict[str, Any]]:
    tokens, count = prompts.tokens(request), request.output_tokens or 1
    words = prompts.words(tokens[:_WORDS])
    ids = {"prompt": tokens.tolist(), "max_tokens": count, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": words}], "max_tokens": count, "temperature": 0}
    stream = {"stream": True, "return_token_ids": True, "ignore_eos": True, "baton": {"timings": True}}
    match kind:
        case "chat":
            return CHAT, {**chat, **stream}
        case "stop":
            return COMPLETIONS, {**ids, **stream, "stop": ["e", "a1"]}
        case "logprobs":
            return COMPLETIONS, {**ids, **stream, "logprobs": 2}
        case "sampled":
            return COMPLETIONS, {**ids, **stream, "temperature": 1, "seed": seed}
        case "choices":
            return COMPLETIONS, {**ids, **stream, "temperature": 0.8, "seed": seed, "n": 3}
        case "beams":
            short = {**ids, "max_tokens": min(count, BEAM_TOKENS_MAX)}
            return COMPLETIONS, {**short, "use_beam_search": True, "n": 3}
        case "embeddings":
            return EMBEDDINGS, {"input": [words, words[: len(words) // 2] or "a", words[::-1]]}
        case "tool":
            choice = {"type": "function", "function": {"name": "move"}}
            return CHAT, {
                **chat,
                "max_tokens": GRAMMAR_TOKENS,
                "stream": True,
                "tools": [TOOL],
                "tool_choice": choice,
            }
        case "schema":
            return CHAT, {**chat, "max_tokens": GRAMMAR_TOKENS, "stream": True, "response_format": SCHEMA}
        case _:
            return COMPLETIONS, {**ids, **stream}
