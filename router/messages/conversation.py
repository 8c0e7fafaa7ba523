"""A request of the Messages API as a chat. Pure."""

from typing import Any

import msgspec
import orjson

from baton.core.errors import ClientError
from router.messages.body import SAME_IN_CHAT, CountedBody, MessagesBody
from router.openai.bodies import ChatBody
from router.openai.turns import ChatTurns, FieldNames, SourcePlace

NAMES = FieldNames(
    {
        "stop": "stop_sequences",
        "response_format.json_schema.schema": "output_config.format.schema",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "user": "metadata.user_id",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    },
    {
        r"\btools\[(\d+)\]\.function\.parameters\b": r"tools[\1].input_schema",
        r"\btools\[(\d+)\]\.function\b": r"tools[\1]",
        r"\.tool_call_id\b": ".tool_use_id",
    },
)

THINKING = {"enabled": True, "adaptive": True, "disabled": False}


class MessagesChat(msgspec.Struct, frozen=True):
    """The chat that a request became."""

    body: ChatBody
    places: list[SourcePlace]


def chat_of(body: CountedBody, *, reads_effort: bool) -> MessagesChat:
    """Return the request as a chat. `reads_effort` says that the chat template has a use for a reasoning
    effort; elsewhere it is a wish that changes nothing. Raises ClientError that names the field."""
    turns = ChatTurns()
    if body.system:
        turns.say("system", _system(body.system), "system")
    for at, message in enumerate(body.messages):
        _add(turns, message, f"messages[{at}]")
    if not body.messages:
        raise ClientError("messages must not be empty", param="messages")
    last = turns.messages[-1]
    continues = last["role"] == "assistant" and not last.get("tool_calls")
    choice, is_parallel = _tool_choice(body.tool_choice)
    options: dict[str, Any] = {}
    if isinstance(body, MessagesBody):
        options = {name: getattr(body, name) for name in SAME_IN_CHAT}
        options |= {"stop": body.stop_sequences, "user": body.metadata and body.metadata.user_id}
    effort = None if body.output_config is None else body.output_config.effort
    chat = ChatBody(
        model=body.model,
        messages=turns.messages,
        tools=None if body.tools is None else _tools(body.tools),
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        response_format=_format(body),
        reasoning_effort=effort if reads_effort else None,
        chat_template_kwargs=_thinking(body) | (body.chat_template_kwargs or {}),
        include_reasoning=wants_thinking(body),
        continue_final_message=continues or None,
        **options,
    )
    return MessagesChat(chat, turns.places)


def wants_thinking(body: CountedBody) -> bool:
    """Return whether the answer may have thinking blocks. Clients that did not ask do not expect them."""
    return body.thinking is not None and THINKING.get(body.thinking.type, False)


def _thinking(body: CountedBody) -> dict[str, Any]:
    """Return the template's switch for thinking. Templates without one ignore it."""
    thinking = body.thinking
    if thinking is None:
        return {}
    if thinking.type not in THINKING:
        raise ClientError(
            f"thinking.type must be enabled, adaptive or disabled, not {thinking.type!r:.60}",
            param="thinking.type",
        )
    if thinking.budget_tokens is not None and thinking.budget_tokens < 1:
        raise ClientError("thinking.budget_tokens must be at least 1", param="thinking.budget_tokens")
    return {"enable_thinking": THINKING[thinking.type]}


# --- messages -------------------------------------------------------------------------------------


def _system(system: str | list[dict[str, Any]]) -> str:
    if isinstance(system, str):
        return system
    return "\n".join(_block_text(block, f"system[{at}]") for at, block in enumerate(system))


def _add(turns: ChatTurns, message: dict[str, Any], path: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ClientError(f"{path}.role must be user or assistant, not {role!r:.60}", param=f"{path}.role")
    if isinstance(content, str):
        turns.say(role, content, path)
        return
    if not isinstance(content, list):
        raise ClientError(
            f"{path}.content must be a string or a list of blocks",
            param=f"{path}.content",
            code="invalid_type",
        )
    if role == "assistant":
        _add_assistant(turns, content, f"{path}.content")
    else:
        _add_user(turns, role, content, f"{path}.content")


def _kind(block: Any, path: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise ClientError(f"{path} must be an object with a type", param=path, code="invalid_type")
    return kind


def _add_user(turns: ChatTurns, role: str, blocks: list[Any], path: str) -> None:
    """Add a user's blocks. Results of tools come before the text, as chat templates want them."""
    texts: list[str] = []
    for at, block in enumerate(blocks):
        where = f"{path}[{at}]"
        if _kind(block, where) == "tool_result" and role == "user":
            call_id = _string(block, "tool_use_id", where)
            turns.result(call_id, _result_text(block.get("content"), f"{where}.content"), where)
        else:
            texts.append(_block_text(block, where))
    if texts or not blocks:
        turns.say(role, "\n".join(texts), path)


def _add_assistant(turns: ChatTurns, blocks: list[Any], path: str) -> None:
    for at, block in enumerate(blocks):
        where = f"{path}[{at}]"
        match _kind(block, where):
            case "thinking":
                turns.think(_string(block, "thinking", where), where)
            case "redacted_thinking":
                pass
            case "tool_use":
                given = block.get("input", {})
                if not isinstance(given, dict):
                    raise ClientError(
                        f"{where}.input must be an object", param=f"{where}.input", code="invalid_type"
                    )
                call_id, name = _string(block, "id", where), _string(block, "name", where)
                turns.call(call_id, name, orjson.dumps(given).decode(), where)
            case _:
                turns.say("assistant", _block_text(block, where), where)


def _string(block: dict[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ClientError(f"{path}.{name} must be a string", param=f"{path}.{name}", code="invalid_type")
    return value


def _block_text(block: Any, path: str) -> str:
    kind = _kind(block, path)
    if kind != "text":
        raise ClientError(f"{path} is {kind!r:.60}, which is not supported here: send text", param=path)
    return _string(block, "text", path)


def _result_text(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ClientError(
            f"{path} must be a string or a list of text blocks", param=path, code="invalid_type"
        )
    return "\n".join(_block_text(block, f"{path}[{at}]") for at, block in enumerate(content))


# --- options --------------------------------------------------------------------------------------


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for at, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            raise ClientError(
                f"tools[{at}].type is {tool['type']!r:.60}: this server has no tools of its own, and takes "
                "'custom' only",
                param=f"tools[{at}].type",
            )
        function = {"name": tool.get("name")}
        if "description" in tool:
            function["description"] = tool["description"]
        if "input_schema" in tool:
            function["parameters"] = tool["input_schema"]
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(choice: dict[str, Any] | None) -> tuple[Any, bool | None]:
    """Return a chat's tool_choice, and whether several calls are allowed."""
    if choice is None:
        return None, None
    is_single = choice.get("disable_parallel_tool_use")
    if is_single is not None and not isinstance(is_single, bool):
        where = "tool_choice.disable_parallel_tool_use"
        raise ClientError(f"{where} must be true or false", param=where, code="invalid_type")
    is_parallel = None if is_single is None else not is_single
    match choice.get("type"):
        case "auto" | "none" as kind:
            return kind, is_parallel
        case "any":
            return "required", is_parallel
        case "tool":
            name = _string(choice, "name", "tool_choice")
            return {"type": "function", "function": {"name": name}}, is_parallel
        case kind:
            raise ClientError(
                f"tool_choice.type must be auto, any, tool or none, not {kind!r:.60}",
                param="tool_choice.type",
            )


def _format(body: CountedBody) -> Any:
    form = None if body.output_config is None else body.output_config.format
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise ClientError(
            "output_config.format must be an object of type json_schema, with a schema",
            param="output_config.format",
        )
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
