"""The one thread that talks to a NIXL agent: posts requests, watches them, runs control calls.

NIXL has no completion event, so requests in flight are looked at again and again, at growing
intervals; with none in flight the thread sleeps until it is given work. Reads within one host complete
inside `post`, so their first look is the last. An agent without a thread of its own is also woken for every
PROGRESS_S, so that peers can read from it.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from kv_transfer.backends.nixl_agent import NixlAgent, NixlPeerLost, Request

WATCH_MIN_S = 50e-6
WATCH_MAX_S = 1e-3
WATCH_ABANDONED_S = 20e-3
"""Nobody waits for the result, only for the end of it."""
PROGRESS_S = 2e-3
"""How long a peer's message waits at most, where NIXL has no thread of its own."""
COMMANDS_MAX = 4096

CLOSE_S = 5.0
"""Time for a call into NIXL that is under way to return."""

log = logging.getLogger(__name__)

Steps = Generator[Request, None, list[int]]
"""Yields requests to be posted, one at a time; each is resumed when it is complete, and told by
NixlPeerLost when it failed. The return value is the job's result."""


@dataclass(slots=True, eq=False)
class Job:
    """A sequence of requests. `on_end` is called once, on the transfer thread, when no request of the
    job is in flight any more and none will be posted."""

    steps: Steps
    on_end: "Callable[[Job], None]"
    is_abandoned: bool = False
    """Set by the event loop: finish the request in flight, post no further one."""
    result: list[int] = field(default_factory=list[int])
    error: str = ""
    request: Request | None = None


class Refused(Exception):
    """The thread takes no more work."""


class TransferThread:
    def __init__(
        self,
        agent: NixlAgent,
        *,
        name: str,
        within: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        progresses_agent: bool = False,
    ) -> None:
        """`within`: what all calls of the agent are made in, a device's context for one. `progresses_agent`:
        the agent has no thread of its own."""
        self._agent, self._within = agent, within
        self._idle_s = PROGRESS_S if progresses_agent else None
        self._commands: queue.Queue[Job | Callable[[], None] | None] = queue.Queue(COMMANDS_MAX)
        self._running: list[Job] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Job | Callable[[], None]) -> None:
        """A job, or a control call. Raises Refused."""
        if not self._thread.is_alive():  # a bug ended it: say so rather than let reads time out
            raise Refused("the transfer thread has ended")
        try:
            self._commands.put_nowait(work)
        except queue.Full:
            raise Refused(f"{COMMANDS_MAX} transfer commands are waiting") from None

    def close(self, *, timeout_s: float = CLOSE_S) -> bool:
        """Waits for the thread's end. Jobs in flight are ended: the agent must be closed next. False: a
        call into NIXL hangs, and neither the agent nor its memory may be touched or freed any more."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._commands.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with self._within():
            self._serve()

    def _serve(self) -> None:
        wait_s = WATCH_MIN_S
        while True:
            try:
                command = self._commands.get(timeout=wait_s if self._running else self._idle_s)
            except queue.Empty:
                command = _NOTHING
                if self._idle_s is not None:
                    self._agent.progress()
            if command is None:
                break
            if isinstance(command, Job):
                self._advance(command)
                wait_s = WATCH_MIN_S
            else:
                self._control(command)
            progressed = self._watch()
            wait_s = WATCH_MIN_S if progressed else min(wait_s * 1.5, self._watch_max_s())
        for job in self._running:
            self._release(job)
            self._end(job, error="transfers are closed")

    def _control(self, call: Callable[[], None]) -> None:
        """The thread outlives what a call raises: all reads of this process depend on it."""
        try:
            call()
        except Exception:
            log.exception("a control call of the transfer thread failed")

    def _watch_max_s(self) -> float:
        is_waited_for = any(not job.is_abandoned for job in self._running)
        if is_waited_for or self._idle_s is not None:
            return WATCH_MAX_S
        return WATCH_ABANDONED_S

    def _watch(self) -> bool:
        """Whether any request in flight ended."""
        looked_at, self._running = self._running, []
        progressed = False
        for job in looked_at:
            assert job.request is not None
            try:
                is_done = self._agent.is_done(job.request)
            except NixlPeerLost as error:
                self._fail(job, error)
                progressed = True
                continue
            if is_done:
                self._advance(job)
                progressed = True
            else:
                self._running.append(job)
        return progressed

    def _advance(self, job: Job) -> None:
        """Post the job's requests until one stays in flight or the job is over."""
        while True:
            self._release(job)
            if job.is_abandoned:
                return self._end(job, error="abandoned")
            try:
                job.request = next(job.steps)
                is_done = self._agent.post(job.request)
            except StopIteration as stop:
                job.result = stop.value
                return self._end(job)
            except NixlPeerLost as error:
                return self._fail(job, error)
            except Exception as error:  # ours: the job ends, but not every read after it
                log.exception("a transfer job failed")
                return self._end(job, error=f"{type(error).__name__}: {error}")
            if not is_done:
                self._running.append(job)
                return None

    def _fail(self, job: Job, error: NixlPeerLost) -> None:
        self._release(job)
        self._end(job, error=str(error) or "peer lost")

    def _release(self, job: Job) -> None:
        if job.request is not None:
            request, job.request = job.request, None
            self._agent.release(request)

    def _end(self, job: Job, *, error: str = "") -> None:
        job.error = error
        job.steps.close()  # gives back what the job holds, scratch memory for one
        job.on_end(job)


def _nothing() -> None:
    pass


_NOTHING: Callable[[], Any] = _nothing
