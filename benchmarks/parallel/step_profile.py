"""Where the leader's time in a step goes."""

import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from benchmarks.engine import MODEL_CALLS
from engine.execution.executor import Executor

SUMS, GATHER, SEND_PLAN, SAMPLE, SHARE, MODEL, REST = (
    *("sums", "logits gather", "send plan", "sample", "share tokens", "model", "rest"),
)
"""What a step's time is divided into. A sum or a gather includes the wait for the other ranks."""


def profiled(executor: Executor, run: Callable[[], float], steps: int) -> dict[str, float]:
    """Seconds of one of the `steps` steps that `run` executes, by part."""
    spent: dict[str, float] = defaultdict(float)
    with _timed(executor, spent):
        run()
    return {part: seconds / steps for part, seconds in spent.items()}


def _calls(executor: Executor) -> list[tuple[Any, str, str]]:
    """(object, method, part of the time) of each call that is timed."""
    inside: Any = executor  # a profile looks at what is nobody else's business
    calls: list[tuple[Any, str, str]] = [(executor, "begin", REST), (inside._sampler, "sample", SAMPLE)]
    calls += [(executor.kernels, name, MODEL) for name in MODEL_CALLS if hasattr(executor.kernels, name)]
    ranks, team = inside._ranks, inside._team
    if team is not None:
        calls.append((team, "send", SEND_PLAN))
        for group in {id(g): g for g in (ranks.tensor, ranks.context) if g is not None}.values():
            calls += [(group, "all_reduce_", SUMS), (group, "gather", GATHER), (group, "all_gather", GATHER)]
        calls.append((ranks.results, "send", SHARE))
    return calls


@contextmanager
def _timed(executor: Executor, spent: dict[str, float]) -> Generator[None]:
    """Add up the seconds of each part, without those of parts within it."""
    inner_s = [0.0]
    """Seconds of the timed calls within each call that is under way."""

    def wrap(call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            inner_s.append(0.0)
            started_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                whole_s = time.perf_counter() - started_s
                spent[part] += whole_s - inner_s.pop()
                inner_s[-1] += whole_s

        return timed

    calls = _calls(executor)
    for owner, name, part in calls:
        setattr(owner, name, wrap(getattr(owner, name), part))
    try:
        yield
    finally:
        for owner, name, _ in calls:
            delattr(owner, name)
