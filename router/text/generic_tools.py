"""Tools for models whose chat template has no place for them, as text of the conversation. Pure.

The form is the one that most open models with tools were trained on, JSON between `<tool_call>` tags: Nous
Research's Hermes function calling standard, https://github.com/NousResearch/Hermes-Function-Calling. The
declarations stand in the system message, calls in the assistant's messages, and results in a user's message,
since templates know these three roles.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from router.text.surrogates import replaced_in

ChatMessage = dict[str, Any]

INSTRUCTIONS = """\
# Tools

You can call functions. Each line here declares one of them, as JSON:
<tools>
{declarations}
</tools>

To call a function, write its name and its arguments as one JSON object between tags, and a pair of tags for \
each call:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
The result of each call then comes between <tool_response> tags. Call a function where it helps to answer; \
otherwise answer in plain text."""
_RESULT_ROLES = ("tool", "function")


def has_calls(messages: Iterable[ChatMessage]) -> bool:
    """Return whether a conversation has calls of tools or their results."""
    return any(message["role"] in _RESULT_ROLES or message.get("tool_calls") for message in messages)


def with_tools_as_text(
    messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], *, has_system: bool = True
) -> list[ChatMessage]:
    """Return a conversation in which tools, their calls and their results are text.

    `tools` are declarations as clients write them. Without `has_system` the template drops or refuses system
    messages, and the declarations stand before the first user's message instead.
    """
    found: list[ChatMessage] = []
    is_after_results = False
    for message in messages:
        is_result = message["role"] in _RESULT_ROLES
        text = _response(message) if is_result else _spoken(message)
        # Templates that want user and assistant in turn refuse two messages of a user in a row.
        if found and (is_result or message["role"] == "user") and is_after_results:
            found[-1] = found[-1] | {"content": f"{found[-1]['content']}\n{text}"}
        elif is_result:
            found.append({"role": "user", "content": text})
        else:
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            found.append(kept | {"content": text})
        is_after_results = is_result or (is_after_results and message["role"] == "user")
    return _with_instructions(found, tools, has_system=has_system) if tools else found


def _with_instructions(
    messages: list[ChatMessage], tools: Sequence[dict[str, Any]], *, has_system: bool
) -> list[ChatMessage]:
    text = INSTRUCTIONS.format(declarations="\n".join(map(_json, tools)))
    roles = ("system", "developer") if has_system else ("user",)
    at = next((i for i, message in enumerate(messages) if message["role"] in roles), None)
    if at is None or (has_system and at > 0):
        return [{"role": roles[0], "content": text}, *messages]
    content = messages[at]["content"]
    joined = f"{content}\n\n{text}" if has_system else f"{text}\n\n{content}"
    return [*messages[:at], messages[at] | {"content": joined if content else text}, *messages[at + 1 :]]


def _spoken(message: ChatMessage) -> str:
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        body = _json({"name": function["name"], "arguments": function["arguments"]})
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(parts)


def _response(message: ChatMessage) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _json(value: Any) -> str:
    """Return JSON on one line. Lone surrogates, which UTF-8 lacks, become U+FFFD."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return orjson.dumps(replaced_in(value)).decode()
