"""Signals that end the process."""

import asyncio
import contextlib
import signal
from collections.abc import Generator


class Shutdown:
    """The state of a shutdown. The first SIGINT or SIGTERM asks for an orderly end, the second for an
    immediate one."""

    def __init__(self) -> None:
        self.asked, self.now = asyncio.Event(), asyncio.Event()

    def signal(self) -> None:
        if self.asked.is_set():
            self.now.set()
        self.asked.set()

    @contextlib.contextmanager
    def on_signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.signal)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
