"""Python's collector of circular garbage, kept from stopping a process in the middle of streams.

A full collection looks at every object there is: 0.2 s in a process that has imported torch (450,000 objects,
2 CPU cores AMD EPYC Zen 5), in which it does nothing else, since the collector holds the interpreter's lock.
What was made by imports and by loading a model stays anyway, and what requests leave behind is freed by
counting references, all but a little.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager

_only_imports = False
"""Whether what is kept out of collections was imported by `uncollected`, and nothing else is kept out."""

THRESHOLDS = (10_000, 20, 20)
"""Arguments of gc.set_threshold: net allocations before the youngest generation is collected, and collections
before the older ones' turn."""


@contextmanager
def uncollected() -> Generator[None]:
    """Import modules without looking through what was imported before, again and again, which takes a sixth
    of the time (worker, AMD EPYC Zen 3, 2026-11-29), and keep them out of later collections, until a block
    of `spared` ends. Inside of another such block it does nothing."""
    global _only_imports
    if not gc.isenabled():
        yield
        return
    _only_imports = _only_imports or gc.get_freeze_count() == 0
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def spare_what_stays() -> None:
    """Keep present objects out of all later collections, and collect younger ones less often. It is meant for
    a process that serves until its end."""
    global _only_imports
    _only_imports = False
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


@contextmanager
def spared(thresholds: tuple[int, int, int] = THRESHOLDS) -> Generator[None]:
    """Do the same as `spare_what_stays` while a block of code runs. What that kept out before stays out, and
    imports do not."""
    global _only_imports
    before = gc.get_threshold()
    # Python knows one set of objects that are kept out, and cannot let go of a part of it.
    had_only_imports = _only_imports
    was_spared = gc.get_freeze_count() > 0 and not had_only_imports
    _only_imports = False
    gc.collect()
    if not was_spared:
        gc.freeze()
    gc.set_threshold(*thresholds)
    try:
        yield
    finally:
        _only_imports = had_only_imports
        gc.set_threshold(*before)
        if not was_spared:
            gc.unfreeze()
