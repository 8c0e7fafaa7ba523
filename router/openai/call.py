"""The values of a checked request."""

from enum import StrEnum
from typing import Any

import msgspec

from baton.core.sampling import SamplingParams
from router.openai.checks import Prompt
from router.openai.response_format import Structured
from router.text.conversation import Template, ToolUse
from router.text.model_card import ModelCard


class Endpoint(StrEnum):
    CHAT = "chat.completion"
    COMPLETION = "text_completion"
    EMBEDDING = "embedding"


class RequestLimits(msgspec.Struct, frozen=True):
    """Bounds that this server and its model set for requests."""

    card: ModelCard
    choices_max: int
    default_max_tokens: int


class Beam(msgspec.Struct, frozen=True):
    width: int
    length_penalty: float


class SloOptions(msgspec.Struct, frozen=True):
    """Objectives that a request asks for."""

    slo_class: str | None = None
    service_tier: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


class Call(msgspec.Struct, frozen=True):
    """A checked request. Everything is within bounds except what depends on the tokens."""

    endpoint: Endpoint
    model: str
    prompts: tuple[Prompt, ...] = ()
    """Prompts of a completion or embedding; each has `n` choices."""
    messages: tuple[dict[str, Any], ...] = ()
    """Messages of a chat, with `content` as text."""
    n: int = 1
    best_of: int = 1
    """Number of sequences generated per prompt; the `n` best are the answer."""
    beam: Beam | None = None
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    sampling: SamplingParams = SamplingParams(max_tokens=1)
    """Sampling of every choice, except `max_tokens`, the model's end-of-sequence ids and the seed of all but
    the first."""
    stops: tuple[str, ...] = ()
    with_stop: bool = False
    skip_special: bool = True
    echo: bool = False
    prompt_only: bool = False
    """The answer is the prompt alone (max_tokens 0 with echo); nothing that is generated is wanted."""
    with_logprobs: bool = False
    with_prompt_logprobs: bool = False
    with_token_ids: bool = False
    tokens_as_ids: bool = False
    tools: ToolUse = ToolUse()
    template: Template = Template()
    structured: Structured | None = None
    include_reasoning: bool = True
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Most tokens of a prompt that is cut. None: a longer prompt is refused; -1: as many as fit."""
    priority: int | None = None
    """Priority of the request. None: its class's."""
    slo: SloOptions = SloOptions()
    with_timings: bool = False
    fairness_key: str = ""
    encoding_format: str = "float"
    dimensions: int | None = None

    @property
    def prompt_field(self) -> str:
        match self.endpoint:
            case Endpoint.CHAT:
                return "messages"
            case Endpoint.COMPLETION:
                return "prompt"
            case Endpoint.EMBEDDING:
                return "input"

    @property
    def sequences_per_prompt(self) -> int:
        return max(self.n, self.best_of)
