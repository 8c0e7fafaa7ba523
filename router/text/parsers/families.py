"""Tool calls as the families of models write them. Each format's source is the family's chat template."""

import ast
import json
from typing import Any

from router.text.parsers.base import ToolParser
from router.text.parsers.reader import Parse
from router.text.surrogates import escaped

HELD_CHARACTERS_MAX = 64 * 1024
"""Most characters of a list of Python calls, which is read as a whole."""


class Hermes(ToolParser):
    """<tool_call>{"name": …, "arguments": …}</tool_call>, any number: Hermes 2 Pro, Qwen 2.5 and 3."""

    markers = ("<tool_call>", "</tool_call>")

    def _main(self) -> Parse[None]:
        reader = self._reader
        while (marker := (yield from reader.until(("<tool_call>",), self._content))) is not None:
            reader.mark()
            yield from reader.space()
            if (yield from self._call_object()):
                reader.since_mark()
                yield from reader.until(("</tool_call>",), self._rest)
            else:
                self._content(marker + reader.since_mark())


class Generic(ToolParser):
    """The form of `router.text.generic_tools`, for models that were not trained on one.

    Models that know another form fall back to it now and then. So a list of calls between the tags, and a
    message that begins with a call without tags or in a fence of code, are calls as well.
    """

    markers = Hermes.markers

    def _main(self) -> Parse[None]:
        reader = self._reader
        reader.mark()
        yield from reader.space()
        if (yield from reader.peek()) == "`":
            yield from self._fence()
            yield from reader.space()
        if (yield from reader.peek()) in ("{", "["):
            if (yield from self._call_or_calls()):
                reader.since_mark()
                yield from reader.space()
                yield from reader.take_if(("```",))
            else:
                self._content(reader.since_mark())
        else:
            self._content(reader.since_mark())
        while (marker := (yield from reader.until(("<tool_call>",), self._content))) is not None:
            reader.mark()
            yield from reader.space()
            if (yield from self._call_or_calls()):
                reader.since_mark()
                yield from reader.until(("</tool_call>",), self._rest)
            elif not (self._call_count and reader.is_over):  # else the last of several calls was cut off
                self._content(marker + reader.since_mark())

    def _call_or_calls(self) -> Parse[bool]:
        if (yield from self._reader.peek()) == "[":
            return (yield from self._call_array())
        return (yield from self._call_object())

    def _fence(self) -> Parse[None]:
        """Read the beginning of a fence."""
        if (yield from self._reader.take_if(("```",))) is not None:
            yield from self._reader.take_if(("json",))


class Llama3Json(ToolParser):
    """The whole message is {"name": …, "parameters": …}, several with ';' between: Llama 3.1 and 3.2."""

    markers = ("<|python_tag|>",)

    def _main(self) -> Parse[None]:
        reader = self._reader
        reader.mark()
        yield from reader.space()
        yield from reader.take_if(self.markers)
        while True:
            yield from reader.space()
            if not (yield from self._call_object(("parameters", "arguments"))):
                break
            reader.mark()
            yield from reader.space()
            if (yield from reader.take_if((";",))) is None:
                break
        self._content(reader.since_mark())
        yield from reader.until((), self._content)


class Pythonic(ToolParser):
    """The whole message is a list of Python calls with keyword arguments: Llama 3.2 and 4, ToolACE."""

    markers = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")

    def _main(self) -> Parse[None]:
        reader = self._reader
        reader.mark()
        yield from reader.space()
        yield from reader.take_if(self.markers[:2])
        yield from reader.space()
        found: list[tuple[str, dict[str, Any]]] | None = None
        if (yield from reader.peek()) == "[":
            parts: list[str] = []
            if (yield from reader.python_list(parts.append, HELD_CHARACTERS_MAX)):
                found = _python_calls("".join(parts))
        text = reader.since_mark()
        if found is not None and all(name in self._names for name, _ in found):
            for name, arguments in found:
                self._start(name)
                self._arguments(escaped(json.dumps(arguments, ensure_ascii=False)))
            yield from reader.space()
            yield from reader.take_if(self.markers[2:])
        else:
            self._content(text)
        yield from reader.until((), self._content)


def _python_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        calls: list[tuple[str, dict[str, Any]]] = []
        for node in tree.elts:
            if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
                return None
            arguments = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
            json.dumps(arguments, allow_nan=False)
            calls.append((ast.unparse(node.func), arguments))
        return calls
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class Mistral(ToolParser):
    """[TOOL_CALLS] and a JSON list; later tokenizers write [TOOL_CALLS]name[ARGS]{…} per call."""

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def _main(self) -> Parse[None]:
        reader = self._reader
        while (marker := (yield from reader.until(("[TOOL_CALLS]",), self._content))) is not None:
            reader.mark()
            yield from reader.space()
            if (yield from reader.peek()) == "[":
                is_call = yield from self._call_array()
            else:
                is_call = yield from self._named_call()
            text = reader.since_mark()
            if not is_call:
                self._content(marker + text)

    def _named_call(self) -> Parse[bool]:
        reader = self._reader
        while (yield from reader.peek()) not in ("", "{", "["):
            if not (yield from self._function_name()):
                return False
            if (yield from reader.take_if(("[CALL_ID]",))):
                yield from reader.word(self._drop)
            yield from reader.take_if(("[ARGS]",))
            self._start(self._name_read)
            yield from reader.space()
            if not (yield from reader.value(self._arguments)):
                self._is_broken = True
            return True
        return False

    def _function_name(self) -> Parse[bool]:
        parts: list[str] = []
        yield from self._reader.word(parts.append)
        yield from self._reader.space()
        self._name_read = "".join(parts)
        return self._name_read in self._names and (yield from self._reader.peek()) in ("[", "{")


class DeepSeek(ToolParser):
    """DeepSeek V3, R1: type, separator, name, a fenced JSON block, per call; V3.1: name, separator, JSON."""

    _BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    _CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    markers = (_BEGIN, _END, _CALL, _SEP, _CALL_END)

    def _main(self) -> Parse[None]:
        reader = self._reader
        while (marker := (yield from reader.until((self._BEGIN,), self._content))) is not None:
            reader.mark()
            is_first = True
            while (yield from self._one_call()):
                is_first = False
                reader.mark()
            text = reader.since_mark()
            if is_first:
                self._content(marker + text)
            elif text.strip().removesuffix(self._END):
                self._content(text)

    def _one_call(self) -> Parse[bool]:
        reader = self._reader
        yield from reader.space()
        if (yield from reader.take_if((self._CALL, self._END))) != self._CALL:
            return False
        head: list[str] = []
        if (yield from reader.until((self._SEP, self._CALL_END), head.append)) != self._SEP:
            return False
        yield from reader.space()
        name = "".join(head).strip()
        if (yield from reader.peek()) != "{":
            parts: list[str] = []
            yield from reader.word(parts.append)
            name = "".join(parts)
            yield from reader.space()
            yield from reader.take_if(("```",))
            yield from reader.word(self._drop)
            yield from reader.space()
        if name not in self._names:
            return False
        self._start(name)
        self._is_broken = not (yield from reader.value(self._arguments))
        yield from reader.until((self._CALL_END,), self._rest)
        return True


class Phi4Mini(ToolParser):
    """functools[{"name": …, "arguments": …}], or the same list behind <|tool_call|>."""

    markers = ("<|tool_call|>", "<|/tool_call|>")

    def _main(self) -> Parse[None]:
        reader = self._reader
        starts = ("functools", "<|tool_call|>")
        while (marker := (yield from reader.until(starts, self._content))) is not None:
            reader.mark()
            yield from reader.space()
            if (yield from self._call_array()):
                reader.since_mark()
                yield from reader.take_if(("<|/tool_call|>",))
            else:
                self._content(marker + reader.since_mark())


class Qwen3Coder(ToolParser):
    """<tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>: Qwen3-Coder.

    A value is text. It is read as JSON if it is valid JSON, unless the schema wants a string.
    """

    markers = ("<tool_call>", "</tool_call>")

    def _main(self) -> Parse[None]:
        reader = self._reader
        while (marker := (yield from reader.until(("<tool_call>",), self._content))) is not None:
            reader.mark()
            yield from reader.space()
            if (yield from self._function()):
                reader.since_mark()
                yield from reader.until(("</tool_call>",), self._drop)
            else:
                self._content(marker + reader.since_mark())

    def _function(self) -> Parse[bool]:
        reader = self._reader
        if (yield from reader.take_if(("<function=",))) is None:
            return False
        parts: list[str] = []
        yield from reader.until((">",), parts.append)
        name = "".join(parts).strip()
        if name not in self._names:
            return False
        self._start(name)
        opening = "{"
        while True:
            yield from reader.space()
            if (yield from reader.take_if(("<parameter=",))) is None:
                break
            key: list[str] = []
            value: list[str] = []
            yield from reader.until((">",), key.append)
            yield from reader.until(("</parameter>",), value.append)
            text = "".join(value).removeprefix("\n").removesuffix("\n")
            self._arguments(f"{opening}{json.dumps(''.join(key))}: {_json_of(text)}")
            opening = ", "
        self._arguments("{}" if opening == "{" else "}")
        return True


def _json_of(text: str) -> str:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text if not isinstance(value, str) else json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    """Refuse NaN and the infinities, which Python reads and JSON lacks."""
    raise ValueError(f"{name} is not JSON")


class ForcedCall(ToolParser):
    """The whole text is the arguments of one function, as its grammar demands."""

    def __init__(self, name: str) -> None:
        super().__init__((name,))
        self._name_forced = name

    def _main(self) -> Parse[None]:
        yield from self._reader.space()
        self._start(self._name_forced)
        yield from self._reader.until((), self._arguments)


class ForcedCalls(ToolParser):
    """The whole text is a JSON list of calls, as its grammar demands."""

    def _main(self) -> Parse[None]:
        self._reader.mark()
        yield from self._reader.space()
        if not (yield from self._call_array()):
            self._content(self._reader.since_mark())
        yield from self._reader.until((), self._content)
