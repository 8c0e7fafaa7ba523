"""KV on its way from one worker to another: links that all transfers under way have in common."""

from collections.abc import Callable

from simulator.clock import VirtualClock

SETTLED_BYTES = 1.0
"""Less than that is rounding."""


class NetworkPort:
    """One direction of one worker's network, divided equally among the flows that have something to move."""

    __slots__ = ("bytes_s", "flows", "moved_bytes")

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self.flows: dict[KVFlow, None] = {}
        self.moved_bytes = 0.0


class KVFlow:
    """The KV of one sequence on its way. Bytes become available as chunks are committed; `drained` is called
    when all that was offered has arrived and no more will be offered."""

    __slots__ = (
        "_clock",
        "_drained",
        "_rate",
        "_since_s",
        "_version",
        "backlog_bytes",
        "busy_s",
        "is_last",
        "moved_bytes",
        "receiver",
        "sender",
    )

    def __init__(
        self, clock: VirtualClock, sender: NetworkPort, receiver: NetworkPort, drained: Callable[[], None]
    ) -> None:
        self._clock, self._drained = clock, drained
        self.sender, self.receiver = sender, receiver
        self.backlog_bytes = 0.0
        self.moved_bytes = 0.0
        self.busy_s = 0.0
        """Time with something to move."""
        self.is_last = False
        self._rate, self._since_s, self._version = 0.0, 0.0, 0

    def offer(self, size_bytes: float, *, is_last: bool) -> None:
        """Make so many bytes more available."""
        was_active = self in self.sender.flows
        if was_active:
            self._settle()
        self.is_last = self.is_last or is_last
        self.backlog_bytes += size_bytes
        if self.backlog_bytes <= SETTLED_BYTES and not was_active:
            if self.is_last:
                self._clock.after(0.0, self._run_dry, self._version)
            return
        if was_active:
            self._plan()
        else:
            self._since_s = self._clock.now_s
            self._join()

    def stop(self) -> None:
        """Give the flow up: nothing more moves, and `drained` is not called."""
        self._version += 1
        if self in self.sender.flows:
            self._settle()
            self._leave()

    def _run_dry(self, version: int) -> None:
        if version == self._version:
            self._drained()

    def _join(self) -> None:
        self.sender.flows[self] = None
        self.receiver.flows[self] = None
        self._divide_anew()

    def _leave(self) -> None:
        del self.sender.flows[self]
        del self.receiver.flows[self]
        self._rate = 0.0
        self._divide_anew()

    def _divide_anew(self) -> None:
        for flow in {**self.sender.flows, **self.receiver.flows}:
            flow._settle()
            flow._plan()

    def _settle(self) -> None:
        """Count what moved since the rate last changed."""
        now_s = self._clock.now_s
        moved = min(self.backlog_bytes, self._rate * (now_s - self._since_s))
        self.backlog_bytes -= moved
        self.moved_bytes += moved
        self.sender.moved_bytes += moved
        self.receiver.moved_bytes += moved
        self.busy_s += now_s - self._since_s
        self._since_s = now_s

    def _plan(self) -> None:
        self._rate = min(
            self.sender.bytes_s / len(self.sender.flows), self.receiver.bytes_s / len(self.receiver.flows)
        )
        self._version += 1
        self._clock.after(self.backlog_bytes / self._rate, self._arrived, self._version)

    def _arrived(self, version: int) -> None:
        if version != self._version:
            return
        self._settle()
        self.backlog_bytes = 0.0
        self._leave()
        self._version += 1
        if self.is_last:
            self._drained()
