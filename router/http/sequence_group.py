"""Sequences awaited as a whole, for answers that are not streamed: embeddings and the steps of a beam
search."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from baton.core.errors import BatonError, DeadlineOver, PeerFailure
from baton.core.ids import SequenceId
from baton.core.steps import TokenLogprobs
from router.decisions.events import Failed, FailureKind, Finished, SequencePart, Submit
from router.live.driver import Driver
from router.openai.choice_stream import error_for


class OutputCollector:
    """A sink of the driver that collects one sequence's whole output."""

    def __init__(self, prompt_field: str, on_output: Callable[[], None]) -> None:
        """`on_output` is called when tokens or the end came."""
        self._prompt_field, self._on_output = prompt_field, on_output
        self.is_cut_off = False
        """True if workers were computing it when its time was over."""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.cached_token_count = 0
        self.ended: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()

    def on_logprobs(
        self, logprobs: tuple[TokenLogprobs, ...], prompt_logprobs: tuple[TokenLogprobs, ...] | None
    ) -> None:
        self.logprobs += logprobs

    def on_tokens(self, tokens: tuple[int, ...], *, cached_token_count: int) -> None:
        self.tokens += tokens
        self.cached_token_count = cached_token_count
        self._on_output()

    def on_finished(self, finished: Finished) -> None:
        self._on_output()
        self.cached_token_count = finished.cached_token_count
        if not self.ended.done():
            self.ended.set_result(finished)

    @property
    def has_output(self) -> bool:
        return bool(self.tokens) or (
            self.ended.done() and not self.ended.cancelled() and self.ended.exception() is None
        )

    def on_failed(self, failed: Failed) -> None:
        self.is_cut_off = failed.was_computing and failed.kind is FailureKind.DEADLINE
        if not self.ended.done():
            self.ended.set_exception(error_for(failed, self._prompt_field))


class GroupCancelled(PeerFailure):
    """The client is gone, so nobody wants the answer."""


class SequenceGroup:
    """The sequences of one request. A sequence is cancelled when the wait for it ends early."""

    def __init__(self, driver: Driver, prompt_field: str) -> None:
        self._driver, self._prompt_field = driver, prompt_field
        self._running: dict[SequenceId, OutputCollector] = {}
        self._is_stopped = False
        self.first_token_s = 0.0
        """Time of the first token or embedding of any sequence, on the driver's clock; 0: there was none."""

        self.computed_tokens = 0
        """Tokens that workers computed for sequences that are over, as far as is known: prompts that have
        output or were cut off because the client left or the time was over, and generated tokens. The steps
        of a beam search share a prompt, which counts once."""
        self._has_failed = False

    def _on_output(self) -> None:
        self.first_token_s = self.first_token_s or self._driver.now_s()

    async def run(self, submit: Submit) -> tuple[OutputCollector, Finished]:
        """Run one sequence to its end. Raises BatonError if it failed, and GroupCancelled after `stop`."""
        if self._is_stopped:
            raise GroupCancelled("the client is gone")
        collector = OutputCollector(self._prompt_field, self._on_output)
        self._running[submit.seq_id] = collector
        try:
            self._driver.submit(submit, collector)
            return collector, await collector.ended
        except BatonError as error:
            self._has_failed |= not isinstance(error, GroupCancelled | DeadlineOver)
            raise
        finally:
            del self._running[submit.seq_id]
            was_computing = self._driver.client_gone(submit.seq_id)
            collector.is_cut_off |= was_computing and not self._has_failed
            if submit.part is not SequencePart.STEP and (collector.has_output or collector.is_cut_off):
                self.computed_tokens += len(submit.prompt)
            self.computed_tokens += len(collector.tokens)
            # It holds the error, and its traceback this frame: only the garbage collector would free them.
            del collector

    def stop(self) -> None:
        """Cancel the group because its client is gone. Everybody who waits gets GroupCancelled."""
        self._is_stopped = True
        for collector in self._running.values():
            if not collector.ended.done():
                collector.ended.set_exception(GroupCancelled("the client is gone"))

    async def all(
        self, submits: Iterable[Submit], *, in_flight_max: int
    ) -> list[tuple[OutputCollector, Finished]]:
        """Run the sequences and return their outputs in order. A sequence is taken when it is its turn, since
        making thousands at once would hold up the loop. The first error ends the others."""
        waiting = enumerate(submits)
        ended: dict[int, tuple[OutputCollector, Finished]] = {}

        async def run_some() -> None:
            for at, submit in waiting:
                ended[at] = await self.run(submit)

        tasks = [asyncio.create_task(run_some()) for _ in range(in_flight_max)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _ended(tasks)
            tasks.clear()  # They hold the error, as above.
        return [ended[at] for at in range(len(ended))]


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
