"""An event loop whose time passes only when nothing else is left to do, and then at once."""

import asyncio
import selectors


class _Selector(selectors.DefaultSelector):
    """Instead of waiting for the timeout, it moves the loop's clock."""

    waited_s = 0.0

    def select(self, timeout=None):
        self.waited_s += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self):
        return self._virtual.waited_s

    def hold_up(self, seconds):
        """The process does not run for so long, as if its machine was suspended."""
        self._virtual.waited_s += seconds


def run_virtual(make_coroutine):
    """Run `make_coroutine(loop)` to its end in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(asyncio.wait_for(make_coroutine(loop), 3600))
    finally:
        loop.close()
