"""The cores that the measured processes run on."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from baton.core.errors import SetupError

CORES = 2
"""A rank or a thread has one each."""


def cores_to_use() -> tuple[int, ...]:
    """The first cores that this process may use. Raises SetupError if there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < CORES:
        raise SetupError(f"two ranks are measured on {CORES} cores, and this process may use {len(cores)}")
    return tuple(cores[:CORES])


@contextmanager
def on_cores(cores: Sequence[int]) -> Generator[None]:
    """Run this thread on these cores only. A process that it starts meanwhile stays on them."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
