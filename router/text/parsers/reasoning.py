"""Parsers that separate reasoning from the answer, and gpt-oss's channels, which contain calls too."""

from collections.abc import Collection

from router.text.parsers.base import ToolParser
from router.text.parsers.deltas import Content, Delta, Reasoning, merged
from router.text.parsers.reader import SPACE, Emit, Parse, TextReader


class Think:
    """<think>…</think> before the answer: Qwen3, DeepSeek R1, and models trained in the same way.

    `is_open` says that the prompt ended within the segment, or that the family always begins with one.
    Otherwise there is a segment only if the text begins with its tag.
    """

    markers = ("<think>", "</think>")

    def __init__(self, *, is_open: bool, opening: str = "<think>", closing: str = "</think>") -> None:
        self._is_open, self._opening, self._closing = is_open, opening, closing
        self._reader = TextReader()
        self._out: list[Delta] = []
        self._space = ""
        self._is_fresh = True
        """True while only white space came of the segment."""
        self._is_over = False
        self._run = self._main()

    def feed(self, text: str) -> list[Delta]:
        if self._is_over:
            return [Content(text)] if text else []
        self._reader.add(text)
        return self._go_on()

    def finish(self) -> list[Delta]:
        self._reader.end()
        return self._go_on()

    def _go_on(self) -> list[Delta]:
        if not self._is_over:
            try:
                next(self._run)
            except StopIteration:
                self._is_over = True
        deltas, self._out = self._out, []
        return merged(deltas)

    def _main(self) -> Parse[None]:
        reader = self._reader
        reader.mark()
        yield from reader.space()
        has_tag = (yield from reader.take_if((self._opening,))) is not None
        before = reader.since_mark()
        if has_tag or self._is_open:
            yield from reader.until((self._closing,), self._reasoning)
            self._space = ""
            yield from reader.space()
        elif before:
            self._out.append(Content(before))
        # All further text is content.
        self._out += [Content(rest)] if (rest := reader.rest()) else []

    def _reasoning(self, text: str) -> None:
        """Emit reasoning without the white space around it."""
        if self._is_fresh:
            text = text.lstrip(SPACE)
            self._is_fresh = not text
        text = self._space + text
        stripped = text.rstrip(SPACE)
        self._space = text[len(stripped) :]
        if stripped:
            self._out.append(Reasoning(stripped))


class Harmony(ToolParser):
    """gpt-oss: <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…

    The analysis channel is reasoning, a message to=functions.NAME is a call, everything else is content.
    Without tools a call's message is content too.
    """

    _MESSAGE, _END, _CALL, _RETURN = "<|message|>", "<|end|>", "<|call|>", "<|return|>"
    _START, _CHANNEL, _CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
    markers = (_MESSAGE, _END, _CALL, _RETURN, _START, _CHANNEL, _CONSTRAIN)

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__(names)

    def _main(self) -> Parse[None]:
        reader = self._reader
        ends = (self._END, self._CALL, self._RETURN, self._START)
        while True:
            if (yield from reader.peek()) == "":
                return
            reader.mark()
            has_header = (yield from reader.take_if((self._CHANNEL, self._START, " to="))) is not None
            emit = self._content
            if has_header:
                more = yield from reader.until((self._MESSAGE, self._END, self._RETURN), self._drop)
                header = reader.since_mark()
                if more is None:
                    self._content(header)
                    return
                if more != self._MESSAGE:
                    continue
                emit = self._begin(header)
            else:
                reader.since_mark()
            yield from reader.until(ends, emit)

    def _begin(self, header: str) -> Emit:
        """Return the function that receives the text of a message with this header."""
        _, _, recipient = header.partition("to=")
        name = recipient.split("<")[0].split()[0] if recipient.split("<")[0].split() else ""
        name = name.removeprefix("functions.")
        if name in self._names:
            self._start(name)
            return self._arguments
        if header.partition(self._CHANNEL)[2].lstrip().startswith("analysis"):
            return self._reason
        return self._content

    def _reason(self, text: str) -> None:
        self._out.append(Reasoning(text))
