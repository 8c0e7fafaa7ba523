"""A request of the Responses API as a chat. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from baton.core.errors import ClientError
from router.openai.bodies import ChatBody
from router.openai.turns import ChatTurns, FieldNames, SourcePlace
from router.responses.body import SAME_IN_CHAT, ResponsesBody, check_options, wants_logprobs

ROLES = frozenset({"user", "assistant", "system", "developer"})
TEXT_PARTS = frozenset({"input_text", "output_text", "text"})

NAMES = FieldNames(
    {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema.schema": "text.format.schema",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "truncate_prompt_tokens": "truncation",
    },
    {r"\btools\[(\d+)\]\.function\b": r"tools[\1]", r"\.tool_call_id\b": ".call_id"},
)


class ResponsesChat(msgspec.Struct, frozen=True):
    """The chat that a request became."""

    body: ChatBody
    places: list[SourcePlace]


def chat_of(
    body: ResponsesBody, before: Sequence[dict[str, Any]] = (), *, can_be_strict: bool
) -> ResponsesChat:
    """Return the request as a chat. `before` are the items of the conversation so far. `can_be_strict` says
    that strict functions are enforced in this model's format also where the model is free to call them; they
    are this API's default, and elsewhere the model is asked and not forced.

    Raises ClientError that names the field.
    """
    check_options(body)
    items = items_of(body.input)
    turns = ChatTurns()
    if body.instructions:
        turns.say("system", body.instructions, "instructions")
    for item in before:
        _add(turns, item, "previous_response_id")
    for at, item in enumerate(items):
        _add(turns, item, f"input[{at}]")
    chat = ChatBody(
        messages=turns.messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=wants_logprobs(body) or None,
        top_logprobs=body.top_logprobs,
        tools=None if body.tools is None else _tools(body.tools, can_be_strict=can_be_strict),
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_format(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
        **{name: getattr(body, name) for name in SAME_IN_CHAT},
    )
    return ResponsesChat(chat, turns.places)


def items_of(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the input as a list of items."""
    if not given:
        raise ClientError("input must not be empty", param="input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return given


# --- items ----------------------------------------------------------------------------------------


def _add(turns: ChatTurns, item: dict[str, Any], path: str) -> None:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ROLES if isinstance(role, str) else True:
                raise ClientError(
                    f"{path}.role must be one of {', '.join(sorted(ROLES))}, not {role!r:.60}",
                    param=f"{path}.role",
                )
            assert isinstance(role, str)
            turns.say(role, _text(item.get("content"), f"{path}.content"), path)
        case "function_call":
            call_id, name = _string(item, "call_id", path), _string(item, "name", path)
            turns.call(call_id, name, _string(item, "arguments", path), f"{path}")
        case "function_call_output":
            output = _text(item.get("output"), f"{path}.output")
            turns.result(_string(item, "call_id", path), output, path)
        case "reasoning":
            if text := _reasoning(item, path):
                turns.think(text, path)
        case "item_reference":
            raise ClientError(
                f"{path} is an item_reference: items are not kept by themselves; send the item, or use "
                "previous_response_id",
                param=path,
                code="unsupported_parameter",
            )
        case kind:
            raise ClientError(
                f"{path}.type is {kind!r:.60}: this server understands message, function_call, "
                "function_call_output and reasoning",
                param=f"{path}.type",
            )


def _string(item: dict[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ClientError(f"{path}.{name} must be a string", param=f"{path}.{name}", code="invalid_type")
    return value


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ClientError(f"{path} must be a string or a list of text parts", param=path, code="invalid_type")
    return "\n".join(_part(part, f"{path}[{at}]") for at, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    name = "refusal" if kind == "refusal" else "text"
    if (
        isinstance(part, dict)
        and (kind == "refusal" or kind in TEXT_PARTS)
        and isinstance(part.get(name), str)
    ):
        return part[name]
    raise ClientError(f"{path} is {kind!r:.60}: only text parts are supported", param=path)


def _reasoning(item: dict[str, Any], path: str) -> str:
    """Return the text of a reasoning item. A summary stands for a text that is not there."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
        ):
            raise ClientError(f"{path}.{name} must be a list of texts", param=f"{path}.{name}")
        if parts:
            return "\n".join(part["text"] for part in parts)
    return ""


# --- options --------------------------------------------------------------------------------------


def _tools(tools: list[dict[str, Any]], *, can_be_strict: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for at, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise ClientError(
                f"tools[{at}].type is {tool.get('type')!r:.60}: this server has no tools of its own, and "
                "takes 'function' only",
                param=f"tools[{at}].type",
            )
        function = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
        strict = tool.get("strict")
        if strict is not None and not isinstance(strict, bool):
            function["strict"] = strict  # The check of a chat's tools says what is wrong with it.
        elif strict and can_be_strict:
            function["strict"] = True
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice.get("type") == "allowed_tools" and choice.get("mode") in ("auto", "required"):
        raise ClientError(
            "tool_choice of type allowed_tools is not supported: send only the tools that are allowed",
            param="tool_choice",
            code="unsupported_parameter",
        )
    raise ClientError(
        "tool_choice must be none, auto, required, or an object of type 'function' with a name",
        param="tool_choice",
    )


def _format(body: ResponsesBody) -> Any:
    form = None if body.text is None else body.text.format
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    match kind:
        case "text" | "json_object":
            return {"type": kind}
        case "json_schema":
            return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
        case _:
            raise ClientError(
                f"text.format.type must be text, json_object or json_schema, not {kind!r:.60}",
                param="text.format.type",
            )
