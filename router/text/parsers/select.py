"""The choice of the parsers that read a model's text, by configuration or by what its chat template writes.
Pure."""

from collections.abc import Callable, Collection

import msgspec

from baton.core.errors import ClientError, SetupError
from router.text.conversation import ToolMode, ToolUse
from router.text.parsers.base import ToolParser
from router.text.parsers.deltas import CallStart, Content, Delta, MessageParser, Reasoning
from router.text.parsers.families import (
    DeepSeek,
    ForcedCall,
    ForcedCalls,
    Generic,
    Hermes,
    Llama3Json,
    Mistral,
    Phi4Mini,
    Pythonic,
    Qwen3Coder,
)
from router.text.parsers.reasoning import Harmony, Think
from router.text.parsers.repeats import RepeatGuard

TOOL_PARSERS: dict[str, Callable[[Collection[str]], ToolParser]] = {
    "hermes": Hermes,
    "qwen3_coder": Qwen3Coder,
    "llama3_json": Llama3Json,
    "pythonic": Pythonic,
    "mistral": Mistral,
    "deepseek_v3": DeepSeek,
    "phi4_mini_json": Phi4Mini,
    "harmony": Harmony,
    "generic": Generic,
}
GENERIC = "generic"
"""Parser of models whose template shows no form of its own. Tools are then text of the conversation."""
TOOL_ALIASES = {
    "qwen": "hermes",
    "qwen3": "hermes",
    "llama4_pythonic": "pythonic",
    "deepseek_v31": "deepseek_v3",
    "deepseek_r1": "deepseek_v3",
    "openai": "harmony",
    "gpt_oss": "harmony",
}
REASONING_PARSERS = ("qwen3", "deepseek_r1", "harmony")
REASONING_ALIASES = {"deepseek_v3": "qwen3", "openai_gptoss": "harmony", "gpt_oss": "harmony"}
NONE = "none"


class Parsers(msgspec.Struct, frozen=True):
    """The parsers of one model, by name. "": it has none."""

    tool: str = ""
    reasoning: str = ""

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that the parsers must see as text."""
        found: set[str] = set()
        if self.tool:
            found.update(TOOL_PARSERS[self.tool](()).markers)
        if self.reasoning:
            found.update(Harmony.markers if self.reasoning == "harmony" else Think.markers)
        return frozenset(found)


def choose_parsers(*, tool: str, reasoning: str, template: str, model_type: str) -> Parsers:
    """Return the parsers of a model. `tool` and `reasoning` are as configured; if they are empty, the model
    decides. Raises SetupError for an unknown name."""
    return Parsers(
        _named("model.tool_parser", tool, TOOL_ALIASES, TOOL_PARSERS)
        if tool
        else _tool_parser_of(template, model_type),
        _named("model.reasoning_parser", reasoning, REASONING_ALIASES, REASONING_PARSERS)
        if reasoning
        else _reasoning_parser_of(template, model_type),
    )


def _named(setting: str, name: str, aliases: dict[str, str], known: Collection[str]) -> str:
    name = aliases.get(name, name)
    if name == NONE:
        return ""
    if name not in known:
        raise SetupError(f"{setting}: {name!r} is not one of {', '.join([*known, NONE])}")
    return name


def _tool_parser_of(template: str, model_type: str) -> str:
    signs = [
        ("harmony", "<|channel|>"),
        ("qwen3_coder", "<function="),
        ("hermes", "<tool_call>"),
        ("mistral", "[TOOL_CALLS]"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>"),
        ("phi4_mini_json", "<|tool_call|>"),
        ("phi4_mini_json", "functools"),
        ("pythonic", "[func_name1("),
        ("llama3_json", "<|python_tag|>"),
        ("llama3_json", '"parameters": '),
    ]
    if "tools" not in template:
        return GENERIC
    found = next((name for name, sign in signs if sign in template), GENERIC)
    if found == "llama3_json" and not model_type.startswith(("llama", "mllama")):
        return GENERIC
    return found


def _reasoning_parser_of(template: str, model_type: str) -> str:
    if "<|channel|>" in template:
        return "harmony"
    if "<think>" in template:
        return "qwen3"
    return "deepseek_r1" if "</think>" in template else ""


class ReasoningStart(msgspec.Struct, frozen=True):
    """The state of reasoning at the end of a rendered prompt."""

    is_open: bool
    """True if the text begins within the reasoning segment."""
    is_closed: bool
    """True if there is no reasoning: the prompt closed it, or the family has none."""


def reasoning_start(parser: str, prompt_end: str) -> ReasoningStart:
    """Return the state of reasoning. `prompt_end` has the last characters of the rendered prompt."""
    if not parser:
        return ReasoningStart(is_open=False, is_closed=True)
    if parser == "harmony":
        return ReasoningStart(is_open=False, is_closed=False)
    end = prompt_end.rstrip()
    if end.endswith("</think>"):
        return ReasoningStart(is_open=False, is_closed=True)
    return ReasoningStart(is_open=parser == "deepseek_r1" or end.endswith("<think>"), is_closed=False)


def make_parser(
    parsers: Parsers, tools: ToolUse, start: ReasoningStart, *, is_constrained: bool, with_reasoning: bool
) -> "ParserChain | None":
    """Make the parser of one choice. None: its text is its content. `is_constrained` says that a grammar
    begins after reasoning."""
    names = [tool.name for tool in tools.allowed]
    stages: list[MessageParser] = []
    if parsers.reasoning == "harmony":
        forced = tools.mode in (ToolMode.REQUIRED, ToolMode.NAMED)
        stages.append(Harmony(() if forced else names))
    elif not start.is_closed:
        # The grammar constrains only what follows the closing tag, so all text before it is reasoning.
        stages.append(Think(is_open=start.is_open or is_constrained))
    if (calls := _call_parser(parsers, tools, names)) is not None:
        stages.append(calls)
    if not stages:
        return None
    only_one = not tools.is_parallel
    guard = RepeatGuard() if parsers.tool == GENERIC else None
    return ParserChain(stages, with_reasoning=with_reasoning, calls_max=1 if only_one else None, guard=guard)


def _call_parser(parsers: Parsers, tools: ToolUse, names: list[str]) -> MessageParser | None:
    match tools.mode:
        case ToolMode.NONE:
            return None
        case ToolMode.NAMED | ToolMode.REQUIRED if parsers.tool == GENERIC:
            return Generic(names)
        case ToolMode.NAMED:
            return ForcedCall(tools.name)
        case ToolMode.REQUIRED:
            return ForcedCalls(names)
        case ToolMode.AUTO:
            if not parsers.tool:
                raise ClientError(
                    "tool calls are not read from this model's text (model.tool_parser is none); use "
                    "tool_choice 'required' or name a function",
                    param="tool_choice",
                    code="unsupported_parameter",
                )
            both = parsers.tool == parsers.reasoning == "harmony"
            return None if both else TOOL_PARSERS[parsers.tool](names)


def _fed(stage: MessageParser, deltas: list[Delta]) -> list[Delta]:
    passed: list[Delta] = []
    for delta in deltas:
        passed += stage.feed(delta.text) if isinstance(delta, Content) else [delta]
    return passed


class ParserChain:
    """A chain of parsers. Each reads what the one before it calls content."""

    def __init__(
        self,
        stages: list[MessageParser],
        *,
        with_reasoning: bool,
        calls_max: int | None,
        guard: RepeatGuard | None = None,
    ) -> None:
        self._stages, self._guard = stages, guard
        self._with_reasoning, self._calls_max = with_reasoning, calls_max
        self.has_calls = False
        self.is_done = False
        """True once as many calls as are allowed were read, or one came twice. Further text is not wanted."""

    def feed(self, text: str) -> list[Delta]:
        return self._kept(self._through([Content(text)]))

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        for stage in self._stages:
            deltas = _fed(stage, deltas) + stage.finish()
        return self._kept(deltas) + (self._guard.finish() if self._guard is not None else [])

    def _through(self, deltas: list[Delta]) -> list[Delta]:
        for stage in self._stages:
            deltas = _fed(stage, deltas)
        return deltas

    def _kept(self, deltas: list[Delta]) -> list[Delta]:
        kept: list[Delta] = []
        for delta in deltas if self._guard is None else self._guard.kept(deltas):
            if isinstance(delta, CallStart):
                self.is_done = self._calls_max is not None and delta.call >= self._calls_max
                self.has_calls = True
            is_unwanted = isinstance(delta, Reasoning) and not self._with_reasoning
            if not self.is_done and not is_unwanted:
                kept.append(delta)
        self.is_done |= self._guard is not None and self._guard.is_repeated
        return kept
