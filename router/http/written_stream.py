"""Answers of APIs that have events of another shape than chat completions: one choice, and a writer of its
answer."""

from collections.abc import Callable, Sequence
from typing import Any

from baton.core.errors import BatonError, ClientError
from router.http.streaming import Events, ResponseStream
from router.live.driver import Driver
from router.openai.answer_writer import AnswerEnd, AnswerWriter
from router.openai.choice_stream import ChoiceStream
from router.openai.logprobs import UnwrittenLogprobs
from router.openai.responses import AnswerFormat
from router.text.parsers.deltas import Content, Delta


class WrittenStream(ResponseStream):
    """A response stream whose answer a writer writes."""

    done = b""

    def __init__(
        self,
        driver: Driver,
        answer: AnswerFormat,
        *,
        deadline_s: float,
        unsent_tokens_max: int,
        writer: Callable[[Sequence[ChoiceStream]], AnswerWriter],
        renamed: Callable[[ClientError], BatonError],
    ) -> None:
        """`writer` is called once, with the choice as soon as it is known. The stream keeps `writer`, so
        `writer` must not refer to the stream. `renamed` gives an error the API's names of fields."""
        super().__init__(driver, answer, deadline_s=deadline_s, unsent_tokens_max=unsent_tokens_max)
        self._make_writer, self._renamed = writer, renamed
        self._writer: AnswerWriter | None = None

    @property
    def writer(self) -> AnswerWriter:
        if self._writer is None:
            self._writer = self._make_writer(self.choices)
        return self._writer

    def error_event(self, error: BatonError) -> bytes:
        return self.writer.failed(self._renamed(error) if isinstance(error, ClientError) else error)

    def _plain_choice(self) -> None:
        """Have all events written by the writer."""

    def _take_events(self) -> list[Events]:
        """Take all events that are due now. Those of the end come with the usage, after all others."""
        (choice,) = self.choices
        if choice.is_closed or not (choice.token_count or choice.finish):
            return []
        is_first = not choice.is_opened
        choice.is_opened, choice.is_closed = True, choice.finish is not None
        deltas, logprobs = _taken(choice)
        usage = self.usage()

        def write() -> bytes:
            begun = self.writer.begin(usage) if is_first else b""
            return begun + self.writer.add(deltas, _entries(logprobs))

        return [Events(0 if logprobs is None else logprobs.token_count, write)]

    def _end_chunk(self, include_usage: bool) -> bytes:
        return self.writer.end(self._end())

    def _whole(self, answered: Sequence[ChoiceStream]) -> bytes:
        (choice,) = answered
        deltas, logprobs = _taken(choice)
        self.writer.begin(self.usage())
        self.writer.add(deltas, _entries(logprobs))
        self.writer.end(self._end())
        return self.writer.whole()

    def _end(self) -> AnswerEnd:
        (choice,) = self.choices
        return AnswerEnd(choice.finish_reason, self.usage(), choice.reasoning_token_count, choice.stop_string)


def _taken(choice: ChoiceStream) -> tuple[list[Delta], UnwrittenLogprobs | None]:
    """Take what is unsent of a choice."""
    text, _ = choice.take()
    deltas = choice.take_deltas()
    return ([Content(text)] if text else []) + deltas, choice.take_logprobs()


def _entries(logprobs: UnwrittenLogprobs | None) -> list[dict[str, Any]]:
    return [] if logprobs is None else (logprobs.write() or {}).get("content", [])
