"""What a block of code leaves to the collector of circular garbage, whose search stops everything else."""

import contextlib
import gc
import types
from collections import Counter
from collections.abc import Iterator


def _name(found: object, packages: tuple[str, ...]) -> str | None:
    """Return a name for an object of the packages; None: it is of no interest."""
    if isinstance(found, types.FunctionType):
        return found.__qualname__ if (found.__module__ or "").startswith(packages) else None
    kind = type(found)
    return kind.__qualname__ if kind.__module__.startswith(packages) else None


@contextlib.contextmanager
def nothing_left(*packages: str) -> Iterator[None]:
    """Check that the block leaves no circular garbage with functions of these packages or instances of their
    classes. A name ends with a full stop, as in `router.`."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        names = [_name(found, packages) for found in gc.garbage]
        left = Counter(name for name in names if name is not None)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        if was_enabled:
            gc.enable()
    assert not left, left
