"""The history of metrics for all time windows: fine steps for minutes, coarse ones for hours. Pure and
bounded."""

from collections import deque
from collections.abc import Sequence

import msgspec

from control_plane.dashboard.samples import MetricsFrame, merged, summed


class TimeWindow(msgspec.Struct, frozen=True):
    """A time window that a page can choose."""

    key: str
    text: str
    step_s: float
    """Seconds of one point."""
    count: int

    @property
    def length_s(self) -> float:
        return self.step_s * self.count


WINDOWS = (
    TimeWindow("5m", "5 min", 4.0, 75),
    TimeWindow("15m", "15 min", 5.0, 180),
    TimeWindow("1h", "1 h", 20.0, 180),
    TimeWindow("6h", "6 h", 120.0, 180),
)
DEFAULT_WINDOW = WINDOWS[1]


class Ring:
    """The latest steps of one window."""

    def __init__(self, window: TimeWindow) -> None:
        self.window = window
        self._steps: deque[tuple[int, MetricsFrame]] = deque(maxlen=window.count + 1)

    def add(self, frame: MetricsFrame) -> None:
        """Add a frame, which must not be older than those before."""
        index = int(frame.at_s // self.window.step_s)
        if self._steps and self._steps[-1][0] == index:
            frame = merged(self._steps.pop()[1], frame)
        self._steps.append((index, frame))

    def points(self, now_s: float) -> list[MetricsFrame | None]:
        """Return the points of the window, oldest first, up to the last whole step; None for steps without
        data."""
        last = int(now_s // self.window.step_s) - 1
        found = dict(self._steps)
        return [found.get(index) for index in range(last - self.window.count + 1, last + 1)]

    def times(self, now_s: float) -> list[float]:
        """Return the Unix time at the end of each point."""
        last = int(now_s // self.window.step_s) - 1
        step_s = self.window.step_s
        return [(index + 1) * step_s for index in range(last - self.window.count + 1, last + 1)]

    def begins_s(self, now_s: float) -> float | None:
        """Return the Unix time of the first data, if that is within the window. None: data covers all of
        it."""
        if (
            not self._steps
            or (first_s := self._steps[0][0] * self.window.step_s) <= now_s - self.window.length_s
        ):
            return None
        return first_s

    def since(self, after_s: float) -> MetricsFrame | None:
        """Sum all frames that ended after this instant, the current step included; levels are the latest."""
        return summed(frame for _, frame in self._steps if frame.at_s > after_s)


class History:
    def __init__(self, windows: Sequence[TimeWindow] = WINDOWS) -> None:
        self.rings = {window.key: Ring(window) for window in windows}
        self.latest: MetricsFrame | None = None

    def add(self, frame: MetricsFrame) -> None:
        if self.latest is not None and frame.at_s < self.latest.at_s:
            return  # the clock was set back; nothing is drawn until it has caught up
        self.latest = frame
        for ring in self.rings.values():
            ring.add(frame)
