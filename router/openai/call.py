"""What a checked request asks for. Plain values."""

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
    """What this server and its model allow."""

    card: ModelCard
    choices_max: int
    default_max_tokens: int


class Beam(msgspec.Struct, frozen=True):
    width: int
    length_penalty: float


class SloOptions(msgspec.Struct, frozen=True):
    """Which objectives a request asks for."""

    slo_class: str | None = None
    service_tier: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


class Call(msgspec.Struct, frozen=True):
    """A checked request: everything is within bounds except what only the tokens can tell."""

    endpoint: Endpoint
    model: str
    prompts: tuple[Prompt, ...] = ()
    """Not chat; each has `n` choices."""
    messages: tuple[dict[str, Any], ...] = ()
    """Chat only, with `content` as text."""
    n: int = 1
    best_of: int = 1
    """Sequences generated per prompt, of which the `n` best are the answer."""
    beam: Beam | None = None
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    sampling: SamplingParams = SamplingParams(max_tokens=1)
    """Of every choice, except `max_tokens`, the model's end-of-sequence ids and the seed of all but the
    first."""
    stops: tuple[str, ...] = ()
    with_stop: bool = False
    skip_special: bool = True
    echo: bool = False
    prompt_only: bool = False
    """max_tokens 0 with echo: nothing of what is generated is wanted."""
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
    """None: a longer prompt is refused; -1: as long as fits."""
    priority: int | None = None
    """None: that of its class."""
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
