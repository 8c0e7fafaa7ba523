"""Answers as clients hear them, and whether two are the same. Pure."""

import math
from itertools import zip_longest
from typing import Any

import msgspec

TOLERANCE = 2e-3
"""Largest difference of two log probabilities, or parts of vectors, that are the same. Where a prompt was
computed in other chunks, the same numbers are added in another order."""


class HeardChoice(msgspec.Struct):
    """What was heard of one choice."""

    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list[int])
    calls: dict[int, list[str]] = msgspec.field(default_factory=dict[int, list[str]])
    """Name and arguments of each tool call."""
    log_probabilities: list[float] = msgspec.field(default_factory=list[float])
    finish_reason: str = ""


class HeardAnswer(msgspec.Struct):
    placements: int = 1
    """How often the server placed it: more than once after the loss or the drain of a worker."""
    choices: dict[int, HeardChoice] = msgspec.field(default_factory=dict[int, HeardChoice])
    vectors: list[list[float]] = msgspec.field(default_factory=list[list[float]])

    def hear(self, event: dict[str, Any]) -> bool:
        """Take in a chunk of a stream or a whole answer. Returns whether it carried any of the answer."""
        self.placements = (event.get("baton") or {}).get("attempts") or self.placements
        self.vectors += [item["embedding"] for item in event.get("data") or ()]
        heard = [self._hear_choice(choice) for choice in event.get("choices") or ()]
        return any(heard) or bool(event.get("data"))

    def _hear_choice(self, said: dict[str, Any]) -> bool:
        choice = self.choices.setdefault(said.get("index", 0), HeardChoice())
        delta = said.get("delta") or said.get("message") or {}
        text = said.get("text") or delta.get("content") or ""
        token_ids = said.get("token_ids") or []
        choice.text += text
        choice.token_ids += token_ids
        for number, call in enumerate(delta.get("tool_calls") or ()):
            parts, function = choice.calls.setdefault(call.get("index", number), ["", ""]), call["function"]
            parts[0] += function.get("name") or ""
            parts[1] += function.get("arguments") or ""
        logprobs = said.get("logprobs") or {}
        choice.log_probabilities += [p for p in logprobs.get("token_logprobs") or () if p is not None]
        choice.finish_reason = said.get("finish_reason") or choice.finish_reason
        return bool(text or token_ids or delta.get("tool_calls"))


def difference(expected: HeardAnswer, heard: HeardAnswer, *, is_whole: bool) -> str:
    """How what was heard differs from the expected answer; empty if it does not. An answer that broke off
    (`is_whole` False) must be the beginning of the expected one."""
    if is_whole and sorted(expected.choices) != sorted(heard.choices):
        return f"choices {sorted(heard.choices)} instead of {sorted(expected.choices)}"
    for index, choice in sorted(heard.choices.items()):
        wanted = expected.choices.get(index)
        if wanted is None:
            return f"choice {index} does not exist in the expected answer"
        if text := _choice_difference(wanted, choice, is_whole=is_whole):
            return f"choice {index}: {text}"
    return _vector_difference(expected.vectors, heard.vectors) if is_whole else ""


def _choice_difference(expected: HeardChoice, heard: HeardChoice, *, is_whole: bool) -> str:
    pairs: tuple[tuple[str, Any, Any], ...] = (
        ("text", expected.text, heard.text),
        ("tokens", expected.token_ids, heard.token_ids),
        *((f"call {i}", expected.calls.get(i, ["", ""])[1], parts[1]) for i, parts in heard.calls.items()),
    )
    for name, wanted, got in pairs:
        if not is_whole:
            wanted = wanted[: len(got)]
        if wanted != got:
            return _where(name, wanted, got)
    if is_whole and (expected.finish_reason, expected.calls) != (heard.finish_reason, heard.calls):
        ends = (f"{choice.finish_reason} {choice.calls}" for choice in (heard, expected))
        return "ended with {}, not {}".format(*ends)
    if is_whole and len(expected.log_probabilities) != len(heard.log_probabilities):
        return f"{len(heard.log_probabilities)} log probabilities, not {len(expected.log_probabilities)}"
    for number, (a, b) in enumerate(zip(expected.log_probabilities, heard.log_probabilities, strict=False)):
        if not math.isclose(a, b, abs_tol=TOLERANCE):
            return f"log probability {number} is {b:.6f}, not {a:.6f}"
    return ""


def _where(name: str, wanted: Any, got: Any) -> str:
    pairs = enumerate(zip_longest(wanted, got))
    place = next(number for number, (a, b) in pairs if a != b)
    some = slice(place, place + 8)
    return f"{name} differ at {place} of {len(wanted)}: {got[some]!r}, not {wanted[some]!r}"


def _vector_difference(expected: list[list[float]], heard: list[list[float]]) -> str:
    if len(expected) != len(heard):
        return f"{len(heard)} vectors, not {len(expected)}"
    for number, (a, b) in enumerate(zip(expected, heard, strict=True)):
        if len(a) != len(b) or any(
            not math.isclose(x, y, abs_tol=TOLERANCE) for x, y in zip(a, b, strict=True)
        ):
            return f"vector {number} differs"
    return ""
