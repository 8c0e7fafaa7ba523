"""The base of all family parsers: running the generator, content around calls, JSON calls."""

import json
from collections.abc import Collection

from router.text.parsers.deltas import CallArguments, CallStart, Content, Delta, merged
from router.text.parsers.reader import SPACE, Parse, TextReader
from router.text.surrogates import escaped


class ToolParser:
    """The base class of a family's parser. The family defines `_main`, and `markers`: the special tokens that
    it must see as text."""

    markers: tuple[str, ...] = ()

    def __init__(self, names: Collection[str]) -> None:
        """`names` has the functions that may be called. A call of another one is content."""
        self._names = names
        self._reader = TextReader()
        self._out: list[Delta] = []
        self._call_count = 0
        self._space = ""
        """White space at the end of the content so far: dropped if a call follows."""
        self._gap = ""
        """White space to restore if content goes on after the call."""
        self._has_content = self._is_after_call = self._is_broken = False
        self._is_over = False
        self._run = self._main()

    def feed(self, text: str) -> list[Delta]:
        self._reader.add(text)
        return self._go_on()

    def finish(self) -> list[Delta]:
        self._reader.end()
        deltas = self._go_on()
        if self._space and not self._call_count:
            deltas = merged([*deltas, Content(self._space)])
        return deltas

    def _go_on(self) -> list[Delta]:
        if not self._is_over:
            try:
                next(self._run)
            except StopIteration:
                self._is_over = True
        deltas, self._out = self._out, []
        return merged(deltas)

    def _main(self) -> Parse[None]:
        """Read to the end of the text."""
        raise NotImplementedError

    # --- what it says -----------------------------------------------------------------------------

    def _content(self, text: str) -> None:
        """Emit content, without the white space between calls and between content and a call."""
        if self._is_after_call:
            text = text.lstrip(SPACE)
            if not text:
                return
            self._is_after_call = False
            self._space, self._gap = self._gap, ""
        text = self._space + text
        stripped = text.rstrip(SPACE)
        self._space = text[len(stripped) :]
        if stripped:
            self._has_content = True
            self._out.append(Content(stripped))

    def _drop(self, text: str) -> None:
        pass

    def _rest(self, text: str) -> None:
        """Read what is between a call's JSON and the end of the call, where broken arguments continue."""
        if self._is_broken:
            self._arguments(text)

    def _start(self, name: str) -> None:
        if self._has_content:
            self._gap += self._space
        self._space, self._is_after_call, self._is_broken = "", True, False
        self._out.append(CallStart(self._call_count, name))
        self._call_count += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._out.append(CallArguments(self._call_count - 1, text))

    # --- calls written as JSON --------------------------------------------------------------------

    def _call_object(self, argument_keys: tuple[str, ...] = ("arguments", "parameters")) -> Parse[bool]:
        """Read {"name": …, "arguments": …}, in any order. Returns False if it is not a call; nothing was
        emitted then."""
        reader = self._reader
        if (yield from reader.take_if(("{",))) is None:
            return False
        name = ""
        early: list[str] = []
        has_arguments = False
        while True:
            key = yield from self._key()
            if key is None:
                break
            if key == "name" and not name:
                name = (yield from self._name()) or ""
                if not name:
                    return False
                if early:
                    self._start(name)
                    self._arguments(unquoted("".join(early)))
            elif key in argument_keys and not has_arguments:
                has_arguments = True
                if not name:
                    yield from reader.value(early.append)
                else:
                    self._start(name)
                    if not (yield from self._argument_value()):
                        self._is_broken = True
                        return True
            elif not (yield from reader.value(self._drop)):
                return bool(name and has_arguments)
            if (yield from self._comma_or_end()) != ",":
                break
        if name and not has_arguments:
            self._start(name)
            self._arguments("{}")
        return bool(name)

    def _key(self) -> Parse[str | None]:
        reader = self._reader
        yield from reader.space()
        if (yield from reader.peek()) != '"':
            return None
        text, _ = yield from reader.string()
        yield from reader.space()
        if (yield from reader.take_if((":",))) is None:
            return None
        yield from reader.space()
        return text[1:-1]

    def _name(self) -> Parse[str | None]:
        """Read a string that names a function."""
        if (yield from self._reader.peek()) != '"':
            return None
        text, _ = yield from self._reader.string()
        name = unquoted(text)
        return name if name in self._names else None

    def _argument_value(self) -> Parse[bool]:
        """Read an object, or an object in a string. Returns False if it was broken off; its beginning was
        emitted."""
        reader = self._reader
        if (yield from reader.peek()) != '"':
            return (yield from reader.value(self._arguments))
        parts: list[str] = []
        is_whole = yield from reader.value(parts.append)
        self._arguments(unquoted("".join(parts)))
        return is_whole

    def _comma_or_end(self) -> Parse[str | None]:
        yield from self._reader.space()
        return (yield from self._reader.take_if((",", "}")))

    def _call_array(self, argument_keys: tuple[str, ...] = ("arguments", "parameters")) -> Parse[bool]:
        """Read a JSON list of calls. Returns False if its first element is not a call; nothing was emitted
        then."""
        reader = self._reader
        if (yield from reader.take_if(("[",))) is None:
            return False
        count = 0
        while True:
            yield from reader.space()
            if count:
                reader.mark()
            if not (yield from self._call_object(argument_keys)):
                if count:
                    self._content(reader.since_mark())
                return count > 0
            count += 1
            yield from reader.space()
            if (yield from reader.take_if((",", "]"))) != ",":
                return True


def unquoted(text: str) -> str:
    """Return the value of a JSON string that has JSON text in it, or any other text unchanged."""
    if text.startswith('"'):
        try:
            found = json.loads(text)
        except ValueError:
            return text
        return escaped(found) if isinstance(found, str) else text
    return text
