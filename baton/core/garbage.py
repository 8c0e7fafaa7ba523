"""Python's collector of circular garbage, kept from stopping a process in the middle of streams.

A full collection looks at every object there is: 0.2 s in a process that has imported torch (450,000 objects,
2 CPU cores AMD EPYC Zen 5), in which it does nothing else, since the collector holds the interpreter's lock.
What was made by imports and by loading a model stays anyway, and what requests leave behind is freed by
counting references, all but a little.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager

THRESHOLDS = (10_000, 20, 20)
"""Objects more than were freed since the last look at the youngest, and looks before the older ones' turn."""


def spare_what_stays() -> None:
    """For a process that will serve until its end: what is there now is never looked through again, and
    younger objects less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


@contextmanager
def spared(thresholds: tuple[int, int, int] = THRESHOLDS) -> Generator[None]:
    """The same, for as long as something runs."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
