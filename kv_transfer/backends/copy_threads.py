"""A few threads that carry out reads step by step, each read in turn: a long one holds up no other."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

log = logging.getLogger(__name__)

JOBS_MAX = 1024
"""Reads under way or waiting; one more is refused."""


class StepFailed(Exception):
    """The read cannot go on; nothing of this step lands any more."""


class Steps(Protocol):
    """One read. The calls come from several threads; `copy` of different indices at the same time."""

    def plan(self) -> int:
        """First and once: how many steps there are."""
        ...

    def copy(self, index: int) -> None:
        """Raises StepFailed."""
        ...

    def finish(self) -> list[int]:
        """After all steps: the read's result. Raises StepFailed."""
        ...


@dataclass(slots=True, eq=False)
class CopyJob:
    """`on_end` is called once, on a copying thread, when nothing of the job can land any more. `error` is
    empty if it went well."""

    steps: Steps
    deadline_s: float
    """Monotonic; no step begins later."""
    on_end: "Callable[[CopyJob], None]"
    is_abandoned: bool = False
    """May be set from any thread: no further step begins."""
    result: list[int] = field(default_factory=list[int])
    error: str = ""
    step_count: int | None = None
    next_step: int = 0
    open_steps: int = 0

    @property
    def has_next(self) -> bool:
        return not self.error and (self.step_count is None or self.next_step < self.step_count)


class CopyThreads:
    def __init__(self, count: int, *, name: str) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[CopyJob] = deque()
        """Jobs with a step that nobody has begun."""
        self._job_count = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name} {i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: CopyJob) -> bool:
        """False: closed, or JOBS_MAX jobs are there; `on_end` will not be called."""
        with self._changed:
            if self._is_closed or self._job_count >= JOBS_MAX:
                return False
            self._job_count += 1
            self._waiting.append(job)
            self._changed.notify()
        return True

    def close(self) -> None:
        """Jobs end with an error; returns when every thread has. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                job, index = self._take()
            self._step(job, index)

    def _take(self) -> tuple[CopyJob, int | None]:
        """The front job and its next step, None: to be planned. With the lock held."""
        job = self._waiting.popleft()
        if self._is_closed:
            job.error = job.error or "transfers are closed"
        elif job.is_abandoned:
            job.error = job.error or "given up"
        elif time.monotonic() >= job.deadline_s:
            job.error = job.error or "out of time"
        job.open_steps += 1
        if job.step_count is None:
            return job, None
        index = job.next_step
        job.next_step += 1
        if job.has_next:
            self._waiting.append(job)
            self._changed.notify()
        return job, index

    def _step(self, job: CopyJob, index: int | None) -> None:
        error, step_count = "", job.step_count
        if not job.error:
            try:
                if index is None:
                    step_count = job.steps.plan()
                else:
                    job.steps.copy(index)
            except StepFailed as failed:
                error = str(failed)
            except Exception as failed:  # ours: the read ends, but not every read after it
                log.exception("a step of a transfer failed")
                error = f"{type(failed).__name__}: {failed}"
        with self._changed:
            job.open_steps -= 1
            job.error = job.error or error
            if index is None:
                job.step_count = step_count or 0
                if job.has_next:
                    self._waiting.append(job)
                    self._changed.notify_all()
                    return
            if job.open_steps or job.has_next:
                return
            if job in self._waiting:  # it failed with steps left
                self._waiting.remove(job)
            self._job_count -= 1
        self._end(job)

    def _end(self, job: CopyJob) -> None:
        if not job.error:
            try:
                job.result = job.steps.finish()
            except StepFailed as failed:
                job.error = str(failed)
            except Exception as failed:
                log.exception("a transfer could not be finished")
                job.error = f"{type(failed).__name__}: {failed}"
        job.on_end(job)
