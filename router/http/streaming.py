"""From tokens to the client: one `ResponseStream` per HTTP request, one `ChoiceStream` per sequence of it.

Tokens are turned into text the moment they arrive, so that a stop string ends the work at once. The
text then waits for the client: while a slow one takes its time, what arrives meanwhile becomes one
larger delta, and a client that lets too much wait is dropped. The engine never waits for anybody.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from baton.core.errors import BatonError, ClientError, DeadlineOver
from baton.core.steps import TokenLogprobs
from router.decisions.events import LatencyBreakdown, Served, Submit
from router.live.driver import Driver
from router.openai.choice_stream import ChoiceOptions, ChoiceStream
from router.openai.logprobs import LogprobFormat, joined
from router.openai.responses import DONE, AnswerFormat, Usage, error_event
from router.openai.timings import EdgeTimes, timings_body
from router.text.detokenizer import Detokenizer

Write = Callable[[bytes], Awaitable[None]]
WriteNow = Callable[[bytes], bool]
"""False: nothing was written."""

UNREAD = "the request's time is over, and the client has not read its answer"
DEADLINE_GRACE_S = 5.0
"""The core ends what is over its deadline; this much later the edge stops waiting for anything."""


def _never_now(_: bytes) -> bool:
    return False


class ResponseStream:
    """All choices of one request, and the one place that ends them: `close` gives back whatever is
    still running, however the request ended."""

    def __init__(
        self, driver: Driver, answer: AnswerFormat, *, deadline_s: float, unsent_tokens_max: int
    ) -> None:
        self._driver, self._answer = driver, answer
        self._deadline_s = deadline_s
        self.prompt_format: LogprobFormat | None = None
        """Set if the client wants the prompt's logprobs."""
        self.edge = EdgeTimes()
        self.with_timings = False
        """The client wants them."""
        self._unsent_tokens_max = unsent_tokens_max
        self._wake = asyncio.Event()
        self.choices: list[ChoiceStream] = []
        self.error: BatonError | None = None
        self.is_gone = False
        """The client went away, or was dropped."""
        self.dropped_reason = ""
        """It was dropped, since it does not read."""
        self._choices_per_prompt = self._answers_per_prompt = 1
        self._is_streaming = False
        self._write_now: WriteNow = _never_now
        self._is_writing = True
        """The task that streams is at work, and looks again when it is done."""
        self._is_flush_due = False
        self._unwritten = b""
        """Said, and not to be written without waiting."""
        self._on_drop: Callable[[BatonError], None] = lambda _: None

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
        """`answers_per_prompt`: how many of the choices of each prompt, the best ones, are the answer.

        Raises NoCapacity while the router drains.
        """
        self._choices_per_prompt = choices_per_prompt
        self._answers_per_prompt = answers_per_prompt or choices_per_prompt
        self.choices = [ChoiceStream(self, i, *part) for i, part in enumerate(parts)]
        for choice in self.choices:
            if self.error is None:  # the first refusal ends the request
                self._driver.submit(choice.submit, choice)

    def cancel(self, choice: ChoiceStream) -> None:
        self._driver.client_gone(choice.seq_id)

    def progress_of(self, choice: ChoiceStream) -> tuple[LatencyBreakdown | None, Served | None]:
        return self._driver.progress_of(choice.seq_id)

    def on_progress(self, choice: ChoiceStream) -> None:
        if self._is_writing:
            self._wake.set()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._driver.flusher.add(self._flush)
        if self._is_streaming and choice.unsent_tokens > self._unsent_tokens_max:
            tokens = choice.unsent_tokens
            error = ClientError(f"the client does not read: {tokens} tokens wait", code="client_too_slow")
            self._dropped(error)
            self._on_drop(error)

    def fail(self, error: BatonError) -> None:
        """The first error is the request's; its other choices end with it."""
        self.error = self.error or error
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
        for choice in self.choices:
            self._driver.client_gone(choice.seq_id)

    def release(self) -> None:
        """Nothing more is wanted of it. It and its choices know each other: letting go of them saves the
        garbage collector from finding out, which takes all streams' time at once."""
        self.choices = []

    # --- what the client gets ---------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    @property
    def first_token_s(self) -> float:
        """When the first one of any choice came, on the driver's clock; 0: none has."""
        return min((c.first_token_s for c in self.choices if c.first_token_s), default=0.0)

    def usage(self) -> Usage:
        """A prompt counts once, however many choices it has."""
        firsts = self.choices[:: self._choices_per_prompt]
        return Usage(
            prompt_tokens=sum(len(choice.submit.prompt) for choice in firsts),
            completion_tokens=sum(c.token_count for c in self.choices if not c.options.prompt_only),
            cached_tokens=sum(choice.cached_token_count for choice in firsts),
        )

    async def begin(self) -> None:
        """Until there is something to say: a first token, or the end. Raises the request's error, so
        that it can still be an HTTP status. Returns early if the client is gone."""
        await self._until(lambda: any(choice.token_count or choice.finish for choice in self.choices))

    async def whole(self) -> bytes:
        """The complete answer, empty if the client is gone. Raises the request's error."""
        await self._until(lambda: self.is_complete)
        if self.is_gone:
            return b""
        answered = self._answered()
        if any(choice.prompt_logprobs for choice in self.choices):  # as much work as the prompt is long
            return await asyncio.to_thread(self._whole, answered)
        return self._whole(answered)

    def _answered(self) -> list[ChoiceStream]:
        """The choices that are the answer: all, or of each prompt's the most likely ones, best first."""
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
        bodies = [self._choice_body(index, choice) for index, choice in enumerate(answered)]
        extra: dict[str, Any] = {}
        if self._answer.is_chat and (found := self._prompt_logprobs(answered[0])) is not None:
            extra = {"prompt_logprobs": found}
        if self._answer.is_chat and (ids := answered[0].prompt_ids) is not None:
            extra["prompt_token_ids"] = ids
        if self.with_timings:
            extra["baton"] = timings_body(self.edge, self.choices)
        return self._answer.whole(bodies, self.usage(), extra)

    def _of_prompt(self, choice: ChoiceStream) -> tuple[TokenLogprobs, ...] | None:
        """The prompt's logprobs are computed for the first choice of each."""
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
        logprobs = joined([choice.echo_logprobs(self._of_prompt(choice)), choice.take_logprobs()])
        return self._answer.choice(index, said, choice.finish_reason, logprobs, ids)

    async def stream(
        self,
        write: Write,
        *,
        include_usage: bool,
        on_drop: Callable[[BatonError], None],
        write_now: WriteNow = _never_now,
    ) -> bytes:
        """Server-sent events until the end. Returns the last of them, with [DONE], or with an `error` event
        and without it; nothing if the client is gone.

        `on_drop` is called when the client is too slow, and should end its connection, with that error if it
        can: `write` may be waiting for it. What `write_now` takes needs no task to be woken.
        """
        self._is_streaming, self._on_drop, self._write_now = True, on_drop, write_now
        try:
            async with asyncio.timeout_at(self._deadline_s + DEADLINE_GRACE_S):
                while not self.is_gone:
                    self._wake.clear()
                    self._is_writing = True
                    events = self._unwritten + self._take_events()
                    self._unwritten = b""
                    if self.error is not None:
                        return events + error_event(self.error)
                    if self.is_complete:
                        return events + self._end_chunk(include_usage) + DONE
                    if events:
                        await write(events)
                    self._is_writing = False
                    await self._wake.wait()
        except TimeoutError:
            error = DeadlineOver(UNREAD)
            self._dropped(error)
            on_drop(error)
        return b""

    def _flush(self) -> None:
        """After whatever else came at the same time."""
        self._is_flush_due = False
        if self._is_writing or self.is_gone or self.error is not None or self.is_complete:
            self._wake.set()
            return
        events = self._take_events()
        if events and not self._write_now(events):
            self._unwritten += events
            self._is_writing = True
            self._wake.set()

    async def write_end(self, writing: Awaitable[None], *, on_drop: Callable[[], None]) -> None:
        """Await it, like every other write no longer than the request may take."""
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

    def _take_events(self) -> bytes:
        """Everything there is to say now, in one piece."""
        answer, events = self._answer, list[bytes]()
        for choice in self.choices:
            if choice.is_closed or not (choice.token_count or choice.finish):
                continue
            if not choice.is_opened:
                choice.is_opened = True
                events.append(answer.first_chunk(choice.index, choice.prompt_ids))
                if choice.options.echo is not None:
                    events.append(self._echo_chunk(choice))
            if choice.is_plain:
                text, ids = choice.take()
                if text or ids:
                    events.append(answer.chunk(choice.index, text, ids))
            else:
                events += self._rich_chunks(choice)
            if choice.finish is not None:
                choice.is_closed = True
                events.append(answer.last_chunk(choice.index, choice.finish_reason))
        return b"".join(events)

    def _end_chunk(self, include_usage: bool) -> bytes:
        """After all choices; empty if nothing of it was asked for."""
        if not (include_usage or self.with_timings):
            return b""
        usage = self.usage() if include_usage else None
        timings = timings_body(self.edge, self.choices) if self.with_timings else None
        return self._answer.end_chunk(usage, timings)

    def _echo_chunk(self, choice: ChoiceStream) -> bytes:
        echo = choice.options.echo
        assert echo is not None
        logprobs = choice.echo_logprobs(choice.prompt_logprobs)
        return self._answer.rich_chunk(choice.index, {"text": echo.text}, logprobs, None)

    def _rich_chunks(self, choice: ChoiceStream) -> list[bytes]:
        """Logprobs and token ids go with the first piece of what they were generated with."""
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
        chunks: list[bytes] = []
        for body in said:
            chunks.append(self._answer.rich_chunk(choice.index, body, logprobs, ids))
            logprobs, ids = None, None if ids is None else []
        return chunks
