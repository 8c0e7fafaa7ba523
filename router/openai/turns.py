"""Conversations of other APIs as a chat's messages, and errors in a chat's fields under those APIs' names.
Pure.

The Responses and the Messages API write a conversation as items or blocks. Both become a chat's messages, so
that one path checks, tokenises and serves all of them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.core.errors import ClientError


class SourcePlace(msgspec.Struct):
    """The place in the client's body that a chat message was made from."""

    path: str
    calls: list[str] = []
    """Places of the tool calls in it."""


class ChatTurns:
    """The messages of a chat, in the making. What an assistant said in a row becomes one message, as chat
    templates want it: reasoning, text and tool calls."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[SourcePlace] = []

    def say(self, role: str, text: str, path: str) -> None:
        if role == "assistant":
            turn = self._assistant(path, beside=("content", "tool_calls"))
            turn["content"] = text
        else:
            self._begin({"role": role, "content": text}, path)

    def think(self, text: str, path: str) -> None:
        turn = self._assistant(path, beside=("content", "tool_calls"))
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: str, path: str) -> None:
        """Add a tool call. `arguments` is a JSON object, as a string."""
        function = {"name": name, "arguments": arguments}
        calls = self._assistant(path).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
        self.places[-1].calls.append(path)

    def result(self, call_id: str, text: str, path: str) -> None:
        message: dict[str, Any] = {"role": "tool", "tool_call_id": call_id, "content": text}
        name = self._called(call_id)
        self._begin(message if name is None else message | {"name": name}, path)

    def _called(self, call_id: str) -> str | None:
        """Return the name of the function of a call, which some templates want beside its result."""
        for message in reversed(self.messages):
            for call in message.get("tool_calls", ()):
                if call["id"] == call_id:
                    return call["function"]["name"]
        return None

    def _begin(self, message: dict[str, Any], path: str) -> dict[str, Any]:
        self.messages.append(message)
        self.places.append(SourcePlace(path))
        return message

    def _assistant(self, path: str, *, beside: Sequence[str] = ()) -> dict[str, Any]:
        """Return the assistant's turn, a new one if the last message is not his or has one of `beside`."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == "assistant":
            has = [name for name in beside if last.get(name)]
            if not has:
                return last
        return self._begin({"role": "assistant", "content": ""}, path)


_MESSAGE = re.compile(r"\bmessages\[(\d+)\](?:\.tool_calls\[(\d+)\]\.function|\.content)?")


class FieldNames:
    """The names of a chat's fields in another API."""

    def __init__(self, names: Mapping[str, str], patterns: Mapping[str, str] | None = None) -> None:
        """`names` has the API's names by the chat's. `patterns` are regular expressions and replacements, for
        paths below them."""
        self._names = names
        self._patterns = [(re.compile(one), by) for one, by in (patterns or {}).items()]
        longest_first = sorted(names, key=len, reverse=True)
        self._name = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")

    def renamed(self, error: ClientError, places: Sequence[SourcePlace] = ()) -> ClientError:
        """Return the error with the API's names in its message and its field."""
        if error.param is None:
            return error
        error.args = (self._text(str(error), places),)
        error.param = self._text(error.param, places)
        return error

    def _text(self, text: str, places: Sequence[SourcePlace]) -> str:
        def place(found: re.Match[str]) -> str:
            message, call = int(found[1]), found[2]
            if message >= len(places):
                return found[0]
            calls = places[message].calls
            return calls[int(call)] if call is not None and int(call) < len(calls) else places[message].path

        # Each is marked until all are done, so that no name is replaced twice.
        parts: list[str] = []
        end = 0
        for found in _MESSAGE.finditer(text):
            parts += [self._named(text[end : found.start()]), place(found)]
            end = found.end()
        return "".join([*parts, self._named(text[end:])])

    def _named(self, text: str) -> str:
        for pattern, by in self._patterns:
            text = pattern.sub(by, text)
        return self._name.sub(lambda found: self._names[found[0]], text)
