"""The way from tokens to the client: one `ResponseStream` per HTTP request, one `ChoiceStream` per sequence
of it.

Tokens are turned into text the moment they arrive, so that a stop string ends the work at once. The text then
waits for the client. While a slow client takes its time, further text becomes one larger delta, and a client
that lets too much wait is dropped. The engine never waits for anybody.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from orjson import Fragment

from baton.core.errors import BatonError, ClientError, DeadlineOver
from baton.core.steps import TokenLogprobs
from router.decisions.events import LatencyBreakdown, Served, Submit
from router.live.defects import INTERNAL, NOT_DEFECTS, report
from router.live.driver import Driver
from router.openai.choice_stream import ChoiceOptions, ChoiceStream
from router.openai.logprobs import LogprobFormat, UnwrittenLogprobs, joined
from router.openai.responses import DONE, AnswerFormat, Usage, encoded, error_event
from router.openai.timings import EdgeTimes, timings_body
from router.text.detokenizer import Detokenizer

log = logging.getLogger(__name__)

Write = Callable[[bytes], Awaitable[None]]
WriteNow = Callable[[bytes], bool]
"""A function that writes without waiting. It returns False if nothing was written."""

UNREAD = "the request's time is over, and the client has not read its answer"
DEADLINE_GRACE_S = 5.0
"""Time after a deadline until the HTTP layer stops waiting. The core ends expired requests before that."""


LOGPROBS_ON_LOOP = 64
"""Most tokens whose logprobs are written on the event loop at once. These take 12 ms at most."""


class Events(NamedTuple):
    """Server-sent events that are taken and not yet written."""

    token_count: int
    """Number of tokens that come with logprobs."""
    write: Callable[[], bytes]


def _never_now(_: bytes) -> bool:
    return False


def _drop_nothing(_: BatonError) -> None:
    """Do nothing, since there is no connection to end."""


def _are_many(events: Iterable[Events]) -> bool:
    return sum(some.token_count for some in events) > LOGPROBS_ON_LOOP


def _written(events: Iterable[Events]) -> bytes:
    return b"".join(some.write() for some in events)


class ResponseStream:
    """All choices of one request, and the one place that ends them. `close` cancels whatever is still
    running, however the request ended."""

    def __init__(
        self, driver: Driver, answer: AnswerFormat, *, deadline_s: float, unsent_tokens_max: int
    ) -> None:
        self._driver, self._answer = driver, answer
        self._deadline_s = deadline_s
        self.prompt_format: LogprobFormat | None = None
        """Format of the prompt's logprobs, if the client wants them."""
        self.edge = EdgeTimes()
        self.with_timings = False
        """True if the client wants timings."""
        self._unsent_tokens_max = unsent_tokens_max
        self._wake = asyncio.Event()
        self.choices: list[ChoiceStream] = []
        self.error: BatonError | None = None
        self.is_gone = False
        """True if the client went away, or was dropped."""
        self.dropped_reason = ""
        """Reason for which the client was dropped, since it does not read."""
        self._choices_per_prompt = self._answers_per_prompt = 1
        self._is_streaming = False
        self._write_now: WriteNow = _never_now
        self._is_writing = True
        """True if the streaming task is at work. It looks for more events when it is done."""
        self._is_flush_due = False
        self._unwritten = b""
        """Events that could not be written without waiting."""
        self._is_in_thread = False
        """True while events are written in a thread, for which tokens wait and not for the client."""
        self._is_broken = False
        """True after a defect. Something is missing, so nothing may follow but the error."""
        self._on_drop: Callable[[BatonError], None] = _drop_nothing

    done = DONE
    """End of a stream that was answered in full."""

    def error_event(self, error: BatonError) -> bytes:
        """Return the last event of a stream that broke."""
        return error_event(error)

    def now_s(self) -> float:
        return self._driver.now_s()

    @property
    def prompt_field(self) -> str:
        return self._answer.prompt_field

    # --- what the driver and the connection say ---------------------------------------------------

    def submit(
        self,
        parts: Sequence[tuple[Submit, Detokenizer, ChoiceOptions]],
        *,
        choices_per_prompt: int = 1,
        answers_per_prompt: int | None = None,
    ) -> None:
        """Submit the sequences. `answers_per_prompt` is the number of best choices of each prompt that are
        the answer.

        Raises NoCapacity while the router drains.
        """
        self._choices_per_prompt = choices_per_prompt
        self._answers_per_prompt = answers_per_prompt or choices_per_prompt
        self.choices = [ChoiceStream(self, i, *part) for i, part in enumerate(parts)]
        for choice in self.choices:
            if self.error is None:  # The first refusal ends the request.
                self._driver.submit(choice.submit, choice)

    def answered(self, choice: ChoiceStream) -> None:
        self._driver.answered(choice.seq_id)

    def progress_of(self, choice: ChoiceStream) -> tuple[LatencyBreakdown | None, Served | None]:
        return self._driver.progress_of(choice.seq_id)

    def on_progress(self, choice: ChoiceStream) -> None:
        if self._is_writing:
            self._wake.set()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._driver.flusher.add(self._flush)
        is_awaited = self._is_streaming and not self._is_in_thread
        if is_awaited and choice.unsent_tokens > self._unsent_tokens_max:
            tokens = choice.unsent_tokens
            error = ClientError(
                f"the client does not read the stream: {tokens} tokens wait to be sent; read it faster",
                code="client_too_slow",
            )
            self._dropped(error)
            self._on_drop(error)

    def fail(self, error: BatonError, *, is_defect: bool = False) -> None:
        """End the request with an error. The first error is the request's; its other choices end with it.

        `is_defect`: something may be missing of the answer so far, so nothing but the error is written.
        """
        self.error = self.error or error
        self._is_broken = self._is_broken or is_defect
        self.close()
        self._wake.set()

    def client_gone(self) -> None:
        self.is_gone = True
        self.close()
        self._wake.set()

    def _dropped(self, error: BatonError) -> None:
        self.dropped_reason = str(error)
        self.client_gone()

    def close(self) -> None:
        """Cancel whatever still runs. Idempotent."""
        is_cut_off = self.is_gone or isinstance(self.error, DeadlineOver)
        for choice in self.choices:
            choice.is_cut_off |= self._driver.client_gone(choice.seq_id) and is_cut_off

    def release(self) -> None:
        """Drop what refers back to the stream once nothing more is wanted of it: its choices, an error, whose
        traceback does, and the connection's ways to write and to hang up. Otherwise it would be left to the
        garbage collector, whose search stops all streams."""
        self.choices, self.error = [], None
        self._write_now, self._on_drop = _never_now, _drop_nothing

    # --- what the client gets ---------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        return None not in [choice.finish for choice in self.choices]

    @property
    def first_token_s(self) -> float:
        """Time of the first token of any choice, on the driver's clock; 0: there was none."""
        return min((c.first_token_s for c in self.choices if c.first_token_s), default=0.0)

    def usage(self) -> Usage:
        """Return the usage. A prompt counts once, however many choices it has."""
        firsts = self.choices[:: self._choices_per_prompt]
        return Usage(
            prompt_tokens=sum(len(choice.submit.prompt) for choice in firsts),
            completion_tokens=sum(c.token_count for c in self.choices if not c.options.prompt_only),
            cached_tokens=sum(choice.cached_token_count for choice in firsts),
        )

    def computed_tokens(self) -> int:
        """Return the tokens that workers computed for the answer, as far as is known: a prompt once, if a
        choice of it has a token or was cut off."""
        size, prompts = self._choices_per_prompt, 0
        for at in range(0, len(self.choices), size):
            group = self.choices[at : at + size]
            if any(c.token_count or c.finish is not None or c.is_cut_off for c in group):
                prompts += len(group[0].submit.prompt)
        return prompts + self.usage().completion_tokens

    async def begin(self) -> None:
        """Wait for a first token or the end. Raises the request's error, so that it can still be an HTTP
        status. Returns early if the client is gone."""
        await self._until(lambda: any(choice.token_count or choice.finish for choice in self.choices))

    async def whole(self) -> bytes:
        """Return the complete answer, empty if the client is gone. Raises the request's error."""
        await self._until(lambda: self.is_complete)
        if self.is_gone:
            return b""
        answered = self._answered()
        logprob_count = sum(choice.logprob_count for choice in answered)
        if logprob_count > LOGPROBS_ON_LOOP or any(choice.prompt_logprobs for choice in self.choices):
            return await asyncio.to_thread(self._whole, answered)
        return self._whole(answered)

    def _answered(self) -> list[ChoiceStream]:
        """Return the choices that are the answer: all of them, or the most likely ones of each prompt, best
        first."""
        size, wanted = self._choices_per_prompt, self._answers_per_prompt
        if wanted == size:
            return self.choices
        groups = [self.choices[at : at + size] for at in range(0, len(self.choices), size)]
        return [
            choice
            for group in groups
            for choice in sorted(group, key=lambda c: (-c.mean_logprob, c.index))[:wanted]
        ]

    def _whole(self, answered: Sequence[ChoiceStream]) -> bytes:
        # Every choice is encoded by itself: encoding or freeing all at once would hold up the loop, even from
        # a thread, by the interpreter's lock.
        bodies = [Fragment(encoded(self._choice_body(index, one))) for index, one in enumerate(answered)]
        extra: dict[str, Any] = {}
        if self._answer.is_chat and (found := self._prompt_logprobs(answered[0])) is not None:
            extra = {"prompt_logprobs": found}
        if self._answer.is_chat and (ids := answered[0].prompt_ids) is not None:
            extra["prompt_token_ids"] = ids
        if self.with_timings:
            extra["baton"] = timings_body(self.edge, self.choices)
        return self._answer.whole(bodies, self.usage(), extra)

    def _of_prompt(self, choice: ChoiceStream) -> tuple[TokenLogprobs, ...] | None:
        """Return the prompt's logprobs. They are computed for the first choice of each prompt."""
        first = self.choices[choice.index - choice.index % self._choices_per_prompt]
        return choice.prompt_logprobs or first.prompt_logprobs

    def _prompt_logprobs(self, choice: ChoiceStream) -> list[Any] | None:
        form, entries = self.prompt_format, self._of_prompt(choice)
        return None if form is None or entries is None else form.of_prompt(choice.submit.prompt, entries)

    def _choice_body(self, index: int, choice: ChoiceStream) -> dict[str, Any]:
        if self._answer.is_chat:
            said: dict[str, Any] = {"message": choice.message_body()}
            _, ids = choice.take()
        else:
            text, ids = choice.take()
            said = {"text": (choice.options.echo.text if choice.options.echo is not None else "") + text}
            if (found := self._prompt_logprobs(choice)) is not None:
                said["prompt_logprobs"] = found
            if (prompt_ids := choice.prompt_ids) is not None:
                said["prompt_token_ids"] = prompt_ids
        taken = (choice.echo_logprobs(self._of_prompt(choice)), choice.take_logprobs())
        logprobs = joined([some.write() for some in taken if some is not None])
        if logprobs is None and choice.options.logprobs is not None:
            logprobs = choice.options.logprobs.of(())  # asked for, and no token has any
        return self._answer.choice(index, said, choice.finish_reason, logprobs, ids)

    async def stream(
        self,
        write: Write,
        *,
        include_usage: bool,
        on_drop: Callable[[BatonError], None],
        write_now: WriteNow = _never_now,
    ) -> bytes:
        """Write server-sent events until the end. Returns the last events, with [DONE], or with an `error`
        event and without [DONE]. Returns nothing if the client is gone.

        `on_drop` is called when the client is too slow. It should end the connection, with that error if it
        can, since `write` may be waiting for it. `write_now` saves waking the task for what it takes.
        """
        self._is_streaming, self._on_drop, self._write_now = True, on_drop, write_now
        try:
            async with asyncio.timeout_at(self._deadline_s + DEADLINE_GRACE_S):
                while not self.is_gone:
                    self._wake.clear()
                    self._is_writing = True
                    # More may come while events are written in a thread. It is taken in the next round.
                    has_failed, is_last = self.error is not None, self.is_complete
                    events = self._unwritten + await self._due_events()
                    self._unwritten = b""
                    if self.error is None and is_last:
                        events += self._made(lambda: self._end_chunk(include_usage))
                    if self.error is not None and (has_failed or is_last or self._is_broken):
                        return events + self.error_event(self.error)
                    if is_last:
                        return events + self.done
                    if events and not self.is_gone:
                        await write(events)
                    self._is_writing = False
                    await self._wake.wait()
        except TimeoutError:
            error = DeadlineOver(UNREAD)
            self._dropped(error)
            on_drop(error)
        return b""

    def _flush(self) -> None:
        """Write the events that wait. The flusher calls it after all else that came at the same time."""
        self._is_flush_due = False
        is_over = self.is_gone or self.error is not None or self.is_complete
        if self._is_writing or is_over or self._has_many_logprobs():
            self._wake.set()
        elif events := self._made(self._flush_events):
            self._unwritten += events
            self._is_writing = True
            self._wake.set()

    def _has_many_logprobs(self) -> bool:
        """Whether the streaming task has to write the events, since it may wait for a thread."""
        counts = [choice.logprob_count for choice in self.choices if not choice.is_plain]
        return sum(counts) > LOGPROBS_ON_LOOP

    def _flush_events(self) -> bytes:
        """Write the events that are due, and return those that could not be written without waiting."""
        plain = self._plain_choice()
        events = _written(self._take_events()) if plain is None else self._text_chunk(plain)
        return b"" if events and self._write_now(events) else events

    def _plain_choice(self) -> ChoiceStream | None:
        """Return the choice of an answer that has begun, has not ended and is plain text, as nearly all are
        at nearly all times; None: it is another."""
        choice = self.choices[0]
        is_under_way = choice.is_plain and choice.is_opened and choice.finish is None
        return choice if is_under_way and len(self.choices) == 1 else None

    def _text_chunk(self, choice: ChoiceStream) -> bytes:
        text, ids = choice.take()
        return self._answer.chunk(choice.index, text, ids) if text or ids else b""

    async def _due_events(self) -> bytes:
        """Return all events that are due now, in one piece. A defect has the effect that `_made` tells of."""
        if self._is_broken:
            return b""
        try:
            events = self._take_events()
            if not _are_many(events):
                return _written(events)
            self._is_in_thread = True
            try:
                return await asyncio.to_thread(_written, events)
            finally:
                self._is_in_thread = False
        except NOT_DEFECTS:
            raise
        except BaseException as defect:
            return self._broken_by(defect)

    def _made(self, make: Callable[[], bytes]) -> bytes:
        """Return the events that `make` makes. A defect in it ends the request with an error, and from then
        on there are no events: what was taken and not made would be missing before them."""
        if self._is_broken:
            return b""
        try:
            return make()
        except NOT_DEFECTS:
            raise
        except BaseException as defect:
            return self._broken_by(defect)

    def _broken_by(self, defect: BaseException) -> bytes:
        """End the request because of a defect. Returns the events that are left, which are none."""
        log.error("defect in the answer of %s: %s", self._answer.request_id, report(defect))
        self.fail(BatonError(INTERNAL), is_defect=True)
        return b""

    async def write_end(self, writing: Awaitable[None], *, on_drop: Callable[[], None]) -> None:
        """Await the last write, no longer than the request may take, as every other write."""
        try:
            async with asyncio.timeout_at(self._deadline_s + DEADLINE_GRACE_S):
                await writing
        except TimeoutError:
            self._dropped(DeadlineOver(UNREAD))
            on_drop()

    async def _until(self, is_reached: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout_at(self._deadline_s + DEADLINE_GRACE_S):
                while not (is_reached() or self.is_gone or self.error is not None):
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            self.error = DeadlineOver("the request's time is over")
        if self.error is not None and not self.is_gone:
            raise self.error

    def _take_events(self) -> list[Events]:
        """Take all events that are due now."""
        answer, events = self._answer, list[Events]()

        def add(written: bytes) -> None:
            events.append(Events(0, lambda: written))

        for choice in self.choices:
            if choice.is_closed or not (choice.token_count or choice.finish):
                continue
            if not choice.is_opened:
                choice.is_opened = True
                add(answer.first_chunk(choice.index, choice.prompt_ids))
                if choice.options.echo is not None:
                    text = choice.options.echo.text
                    echoed = choice.echo_logprobs(choice.prompt_logprobs)
                    events.append(self._rich_chunk(choice, {"text": text}, echoed, None))
            if choice.is_plain:
                add(self._text_chunk(choice))
            else:
                events += self._rich_chunks(choice)
            if choice.finish is not None:
                choice.is_closed = True
                add(answer.last_chunk(choice.index, choice.finish_reason))
        return events

    def _end_chunk(self, include_usage: bool) -> bytes:
        """Return the chunk after all choices. It is empty if the client asked for none of its content."""
        if not (include_usage or self.with_timings):
            return b""
        usage = self.usage() if include_usage else None
        timings = timings_body(self.edge, self.choices) if self.with_timings else None
        return self._answer.end_chunk(usage, timings)

    def _rich_chunk(
        self,
        choice: ChoiceStream,
        said: dict[str, Any],
        logprobs: UnwrittenLogprobs | None,
        ids: list[int] | None,
    ) -> Events:
        chunk = partial(self._answer.rich_chunk, choice.index, said)
        if logprobs is None:
            return Events(0, lambda: chunk(None, ids))
        return Events(logprobs.token_count, lambda: chunk(logprobs.write(), ids))

    def _rich_chunks(self, choice: ChoiceStream) -> list[Events]:
        """Return chunks with logprobs and token ids. They go with the first piece of the text that they
        belong to."""
        text, ids = choice.take()
        if not self._answer.is_chat:
            said = [{"text": text}] if text else []
        elif choice.options.parser is None:
            said = [{"delta": {"content": text}}] if text else []
        else:
            said = [{"delta": body} for body in choice.delta_bodies()]
        logprobs = choice.take_logprobs()
        if not said and (ids or logprobs):
            said = [{"delta": {}} if self._answer.is_chat else {"text": ""}]
        chunks: list[Events] = []
        for body in said:
            chunks.append(self._rich_chunk(choice, body, logprobs, ids))
            logprobs, ids = None, None if ids is None else []
        return chunks
