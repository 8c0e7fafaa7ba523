"""The deltas that parsers emit, and the message that they add up to."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import msgspec


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallStart(NamedTuple):
    call: int
    """Number of the call, from 0."""
    name: str


class CallArguments(NamedTuple):
    call: int
    """Number of the call, from 0."""
    text: str
    """A piece of the JSON text of the arguments."""


Delta = Content | Reasoning | CallStart | CallArguments


class MessageParser(Protocol):
    def feed(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]:
        """Return the last deltas, once, when no more text comes."""
        ...


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Return equivalent deltas with neighbours of one kind merged."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        match last, delta:
            case (Content(a), Content(b)):
                found[-1] = Content(a + b)
            case (Reasoning(a), Reasoning(b)):
                found[-1] = Reasoning(a + b)
            case (CallArguments(i, a), CallArguments(j, b)) if i == j:
                found[-1] = CallArguments(i, a + b)
            case _:
                found.append(delta)
    return found


class ToolCall(msgspec.Struct):
    name: str
    arguments: str = ""


class Message(msgspec.Struct):
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            match delta:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(_, name):
                    self.calls.append(ToolCall(name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
