"""The messages and tools of a chat request, checked and put into the shape that chat templates read. Pure."""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum, auto
from typing import Any

import msgspec

from baton.core.errors import ClientError
from router.text.json_bounds import JsonBudget
from router.text.surrogates import with_replaced_escapes

MESSAGES_MAX = 8192
"""Most messages of one request. Rendering more in a template would block other requests. As many parts of
contents are allowed, and as many tool calls."""
TOOLS_MAX = 128
"""OpenAI's bound."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")


class Template(msgspec.Struct, frozen=True):
    """The options with which a conversation becomes a prompt."""

    documents: tuple[dict[str, str], ...] = ()
    kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ToolMode(StrEnum):
    NONE = auto()
    AUTO = auto()
    REQUIRED = auto()
    NAMED = auto()


class Tool(msgspec.Struct, frozen=True):
    name: str
    parameters: dict[str, Any]
    """JSON schema of the tool's arguments."""
    is_strict: bool
    declared: dict[str, Any]
    """The declaration as the client wrote it. Templates get it in this form."""


class ToolUse(msgspec.Struct, frozen=True):
    tools: tuple[Tool, ...] = ()
    mode: ToolMode = ToolMode.NONE
    name: str = ""
    """Name of the tool to call, in the mode NAMED only."""
    is_parallel: bool = True

    @property
    def allowed(self) -> tuple[Tool, ...]:
        """Tools that may be called."""
        if self.mode is ToolMode.NAMED:
            return tuple(tool for tool in self.tools if tool.name == self.name)
        return () if self.mode is ToolMode.NONE else self.tools


# --- messages -------------------------------------------------------------------------------------


def check_messages(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    if not messages:
        raise ClientError("messages must not be empty", param="messages")
    if len(messages) > MESSAGES_MAX:
        raise ClientError(
            f"at most {MESSAGES_MAX} messages are allowed, not {len(messages)}", param="messages"
        )
    counts = _Counts()
    checked = tuple(_check_message(message, f"messages[{at}]", counts) for at, message in enumerate(messages))
    _check_results(checked)
    return checked


def _check_results(messages: Sequence[dict[str, Any]]) -> None:
    """Check that every result of a tool answers a call that came before it. Raises ClientError."""
    called: set[str] | None = None
    for at, message in enumerate(messages):
        if message["role"] == "tool":
            call_id = message.get("tool_call_id")
            if called is None or (call_id is not None and call_id not in called):
                raise _bad(
                    f"messages[{at}].tool_call_id",
                    "answers no tool call: there must be an assistant's message before it whose tool_calls "
                    f"have {'one' if call_id is None else f'the id {call_id!r:.60}'}",
                )
        elif calls := message.get("tool_calls"):
            called = (called or set()) | {call["id"] for call in calls if "id" in call}


class _Counts:
    """Counts over all messages of a request."""

    def __init__(self) -> None:
        self.parts = self.calls = 0
        self.arguments = JsonBudget()

    def add_parts(self, count: int, where: str) -> None:
        self.parts += count
        self._check(self.parts, "content parts", where)

    def add_calls(self, count: int, where: str) -> None:
        self.calls += count
        self._check(self.calls, "tool calls", where)

    def _check(self, count: int, what: str, where: str) -> None:
        if count > MESSAGES_MAX:
            raise ClientError(
                f"{where}: the messages may have at most {MESSAGES_MAX} {what} together", param=where
            )


def _check_message(message: dict[str, Any], where: str, counts: _Counts) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES if isinstance(role, str) else True:
        raise ClientError(
            f"{where}.role must be one of {', '.join(sorted(ROLES))}, not {role!r:.60}", param=f"{where}.role"
        )
    checked = message | {"content": _content_of(message, role, where, counts)}
    calls = message.get("tool_calls")
    if calls is None:
        checked.pop("tool_calls", None)
    elif role != "assistant":
        raise _bad(f"{where}.tool_calls", "only an assistant's message has tool calls")
    else:
        checked["tool_calls"] = _check_calls(calls, f"{where}.tool_calls", counts)
    if role == "tool" and not isinstance(message.get("tool_call_id") or "", str):
        raise _bad(f"{where}.tool_call_id", "must be the id of the tool call that this answers")
    return checked


def _content_of(message: dict[str, Any], role: Any, where: str, counts: _Counts) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        counts.add_parts(len(content), f"{where}.content")
        return "\n".join(_part_text(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    if content is None and role == "assistant" and message.get("tool_calls"):
        return ""
    raise ClientError(
        f"{where}.content must be a string or a list of text parts",
        param=f"{where}.content",
        code="invalid_type",
    )


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ClientError(f"{where} is {kind!r:.60}: only text parts are supported", param=where)


def _check_calls(calls: Any, where: str, counts: _Counts) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not calls or len(calls) > TOOLS_MAX:
        raise _bad(where, f"must be a list of 1 to {TOOLS_MAX} tool calls")
    counts.add_calls(len(calls), where)
    return [_check_call(call, f"{where}[{at}]", counts) for at, call in enumerate(calls)]


def _check_call(call: Any, where: str, counts: _Counts) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise _bad(where, "must be an object with type 'function' and a function")
    name, arguments = function.get("name"), function.get("arguments", "{}")
    if not isinstance(name, str) or not name:
        raise _bad(f"{where}.function.name", "must be a string")
    if not isinstance(call.get("id", ""), str):
        raise _bad(f"{where}.id", "must be a string")
    if isinstance(arguments, str):
        # Templates write the arguments as JSON themselves, so they want the object.
        arguments = _decoded(arguments or "{}", f"{where}.function.arguments", counts.arguments)
    if not isinstance(arguments, dict):
        raise _bad(f"{where}.function.arguments", "must be a JSON object, as a string")
    return call | {"type": "function", "function": function | {"arguments": arguments}}


def _decoded(text: str, where: str, budget: JsonBudget) -> Any:
    try:
        budget.take(text.encode(), where)
        return msgspec.json.decode(with_replaced_escapes(text))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _bad(where, f"must be a JSON object, as a string: {error}") from error


def _bad(where: str, what: str) -> ClientError:
    return ClientError(f"{where} {what}", param=where, code="invalid_type")


# --- tools ----------------------------------------------------------------------------------------


def check_tool_use(tools: Any, choice: Any, *, is_parallel: bool | None) -> ToolUse:
    declared = _check_tools(tools)
    mode, name = _check_choice(choice, declared)
    return ToolUse(declared, mode, name, is_parallel is not False)


def _check_tools(tools: Any) -> tuple[Tool, ...]:
    if tools is None or tools == []:
        return ()
    if not isinstance(tools, list) or len(tools) > TOOLS_MAX:
        raise ClientError(f"tools must be a list of at most {TOOLS_MAX}", param="tools", code="invalid_type")
    checked = tuple(_check_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools))
    names = [tool.name for tool in checked]
    for name in names:
        if names.count(name) > 1:
            raise ClientError(f"tools has two functions named {name!r}", param="tools")
    return checked


def _check_tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, dict):
        raise _bad(where, "must be an object")
    if tool.get("type") != "function":
        raise ClientError(
            f"{where}.type must be 'function', not {tool.get('type')!r:.60}", param=f"{where}.type"
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _bad(f"{where}.function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise ClientError(
            f"{where}.function.name must have 1 to 128 letters, digits, '_', '-', '.' or ':'",
            param=f"{where}.function.name",
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise _bad(f"{where}.function.parameters", "must be a JSON schema")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise _bad(f"{where}.function.strict", "must be true or false")
    return Tool(name, parameters, bool(strict), tool)


def _check_choice(choice: Any, tools: tuple[Tool, ...]) -> tuple[ToolMode, str]:
    if choice is None or choice == "auto":
        return (ToolMode.AUTO if tools else ToolMode.NONE), ""
    if choice == "none":
        return ToolMode.NONE, ""
    if not tools:
        raise ClientError("tool_choice is only allowed with tools", param="tool_choice")
    if choice == "required":
        return ToolMode.REQUIRED, ""
    function: Any = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, dict) or choice.get("type") != "function":
        raise ClientError(
            "tool_choice must be none, auto, required, or an object that names a function",
            param="tool_choice",
        )
    name = function.get("name")
    if name not in [tool.name for tool in tools]:
        raise ClientError(f"tool_choice names {name!r:.128}, which tools does not have", param="tool_choice")
    return ToolMode.NAMED, name
