"""From tokens to the client: one `Exchange` per HTTP request, one `Choice` per sequence of it.

Tokens are turned into text the moment they arrive, so that a stop string ends the work at once. The
text then waits for the client: while a slow one takes its time, what arrives meanwhile becomes one
larger delta, and a client that lets too much wait is dropped. The engine never waits for anybody.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from baton.core.errors import BatonError, DeadlineOver, NoCapacity, PeerFailure, PromptTooLong, QueueFull
from baton.core.ids import SequenceId
from baton.core.sampling import FinishReason
from router.detokenizer import Detokenizer
from router.driver import Driver
from router.events import Failed, FailureKind, Finished, Submit
from router.openai_response import DONE, AnswerFormat, Usage, error_event

Write = Callable[[bytes], Awaitable[None]]

DEADLINE_GRACE_S = 5.0
"""The core ends what is over its deadline; this much later the edge stops waiting for anything."""


def error_for(failed: Failed, prompt_field: str) -> BatonError:
    """`prompt_field`: of the request, to be named if that is too long."""
    match failed.kind:
        case FailureKind.QUEUE_FULL:
            return QueueFull(failed.message, retry_after_s=failed.retry_after_s)
        case FailureKind.NO_CAPACITY:
            return NoCapacity(failed.message, retry_after_s=failed.retry_after_s)
        case FailureKind.TOO_LONG:
            return PromptTooLong(failed.message, param=prompt_field)
        case FailureKind.DEADLINE:
            return DeadlineOver(failed.message)
        case FailureKind.ATTEMPTS:
            return PeerFailure(failed.message)
        case FailureKind.INTERNAL:
            return BatonError(failed.message)


class Choice:
    """One generated text. The driver's sink."""

    def __init__(self, exchange: "Exchange", index: int, submit: Submit, detokenizer: Detokenizer) -> None:
        self._exchange, self._detokenizer = exchange, detokenizer
        self.index = index
        self.submit = submit
        self.deltas: list[str] = []
        """Text that is not sent yet."""
        self.unsent_ids: list[int] | None = None
        """Token ids that are not sent yet; None: the client does not want any."""
        self.unsent_tokens = 0
        self.is_opened = False
        """The client was told that this choice begins."""
        self.is_closed = False
        """The client was told how it ended."""
        self.finish: FinishReason | None = None
        self.token_count = 0
        self.cached_token_count = 0
        self.first_token_s = 0.0
        self.last_token_s = 0.0

    @property
    def seq_id(self) -> SequenceId:
        return self.submit.seq_id

    def on_tokens(self, tokens: tuple[int, ...], *, cached_token_count: int = 0) -> None:
        if self.finish is not None:
            return
        self.cached_token_count = cached_token_count
        now_s = self._exchange.now_s()
        self.first_token_s = self.first_token_s or now_s
        self.last_token_s = now_s
        self.token_count += len(tokens)
        self.unsent_tokens += len(tokens)
        if self.unsent_ids is not None:
            self.unsent_ids += tokens
        if text := self._detokenizer.push(tokens):
            self.deltas.append(text)
        if self._detokenizer.found_stop_string:
            self.token_count = self._detokenizer.token_count
            self.finish = FinishReason.STOP
            self._exchange.cancel(self)
        self._exchange.on_progress(self)

    def on_finished(self, finished: Finished) -> None:
        self.token_count = finished.generated_count
        self.cached_token_count = finished.cached_token_count
        self.finish = finished.reason
        if text := self._detokenizer.finish():
            self.deltas.append(text)
        if self._detokenizer.found_stop_string:
            self.finish = FinishReason.STOP
        self._exchange.on_progress(self)

    def on_failed(self, failed: Failed) -> None:
        self._exchange.fail(error_for(failed, self._exchange.prompt_field))

    def take(self) -> tuple[str, list[int] | None]:
        """Text and, if wanted, token ids that are not sent yet; they count as sent."""
        text, ids = "".join(self.deltas), self.unsent_ids
        self.deltas.clear()
        self.unsent_tokens = 0
        if ids is not None:
            self.unsent_ids = []
        return text, ids


class Exchange:
    """All choices of one request, and the one place that ends them: `close` gives back whatever is
    still running, however the request ended."""

    def __init__(
        self, driver: Driver, answer: AnswerFormat, *, deadline_s: float, unsent_tokens_max: int
    ) -> None:
        self._driver, self._answer = driver, answer
        self._deadline_s = deadline_s
        self._unsent_tokens_max = unsent_tokens_max
        self._wake = asyncio.Event()
        self.choices: list[Choice] = []
        self.error: BatonError | None = None
        self.is_gone = False
        """The client went away, or was dropped."""
        self.is_too_slow = False
        self._choices_per_prompt = 1
        self._is_streaming = False
        self._on_drop: Callable[[], None] = lambda: None

    def now_s(self) -> float:
        return self._driver.now_s()

    @property
    def prompt_field(self) -> str:
        return self._answer.prompt_field

    # --- what the driver and the connection say ---------------------------------------------------

    def submit(
        self,
        parts: Sequence[tuple[Submit, Detokenizer]],
        *,
        choices_per_prompt: int = 1,
        with_token_ids: bool = False,
    ) -> None:
        """Raises NoCapacity while the router drains."""
        self._choices_per_prompt = choices_per_prompt
        self.choices = [Choice(self, i, submit, detok) for i, (submit, detok) in enumerate(parts)]
        for choice in self.choices:
            choice.unsent_ids = [] if with_token_ids else None
        for choice in self.choices:
            if self.error is None:  # the first refusal ends the request
                self._driver.submit(choice.submit, choice)

    def cancel(self, choice: Choice) -> None:
        self._driver.client_gone(choice.seq_id)

    def on_progress(self, choice: Choice) -> None:
        self._wake.set()
        if self._is_streaming and choice.unsent_tokens > self._unsent_tokens_max:
            self.is_too_slow = True
            self.client_gone()
            self._on_drop()

    def fail(self, error: BatonError) -> None:
        """The first error is the request's; its other choices end with it."""
        self.error = self.error or error
        self.close()
        self._wake.set()

    def client_gone(self) -> None:
        self.is_gone = True
        self.close()
        self._wake.set()

    def close(self) -> None:
        """Cancel whatever still runs. Idempotent."""
        for choice in self.choices:
            self._driver.client_gone(choice.seq_id)

    # --- what the client gets ---------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    def usage(self) -> Usage:
        """A prompt counts once, however many choices it has."""
        firsts = self.choices[:: self._choices_per_prompt]
        return Usage(
            prompt_tokens=sum(len(choice.submit.prompt) for choice in firsts),
            completion_tokens=sum(choice.token_count for choice in self.choices),
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
        parts = [(text, str(c.finish), ids) for c in self.choices for text, ids in (c.take(),)]
        return self._answer.whole(parts, self.usage())

    async def stream(self, write: Write, *, include_usage: bool, on_drop: Callable[[], None]) -> None:
        """Server-sent events until the end, which is [DONE], or an `error` event without it.

        `on_drop` is called when the client is too slow, and should break its connection: `write` may
        be waiting for it.
        """
        self._is_streaming, self._on_drop = True, on_drop
        try:
            async with asyncio.timeout_at(self._deadline_s + DEADLINE_GRACE_S):
                while not self.is_gone:
                    self._wake.clear()
                    events = self._take_events()
                    if self.error is not None:
                        await write(events + error_event(self.error))
                        return
                    if self.is_complete:
                        usage = self._answer.usage_chunk(self.usage()) if include_usage else b""
                        await write(events + usage + DONE)
                        return
                    if events:
                        await write(events)
                    await self._wake.wait()
        except TimeoutError:
            self.is_gone = self.is_too_slow = True
            on_drop()

    async def last_words(self, writing: Awaitable[None], *, on_drop: Callable[[], None]) -> None:
        """Await it, like every other write no longer than the request may take."""
        try:
            async with asyncio.timeout_at(self._deadline_s + DEADLINE_GRACE_S):
                await writing
        except TimeoutError:
            self.is_gone = self.is_too_slow = True
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
                events.append(answer.first_chunk(choice.index))
            text, ids = choice.take()
            if text or ids:
                events.append(answer.chunk(choice.index, text, ids))
            if choice.finish is not None:
                choice.is_closed = True
                events.append(answer.last_chunk(choice.index, choice.finish))
        return b"".join(events)
