"""Checks whether the load generator itself was the bottleneck, by watching its event loop and CPU while it
sends.

Any delay of a slow client is part of every latency. Records contain the lateness of sending. This module adds
how late the event loop notices incoming data, which shifts the instants of tokens, and how busy the process
is.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from loadgen.records import RequestRecord

LOOK_EVERY_S = 0.05
CPU_WINDOW_S = 1.0
LATENESS_P99_MAX_S = 0.010
LAG_P99_MAX_S = 0.010
CPU_SHARE_MAX = 0.9
_SAMPLES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """The health of one sender process, or the worst of several."""

    clients: int
    lateness_p99_s: float
    """Seconds from the planned instant to the begin of connecting."""
    loop_lag_p99_s: float
    """Delay of a timer of the event loop; tokens may have been noticed that late."""
    loop_lag_max_s: float
    cpu_share_max: float
    """CPU use in the busiest second, as a share of one core."""
    cpu_share: float
    """CPU use over the whole run, as a share of one core."""

    def warnings(self) -> list[str]:
        """One line per problem; empty if the client kept up."""
        found: list[str] = []
        if self.lateness_p99_s > LATENESS_P99_MAX_S:
            found.append(f"requests left up to {self.lateness_p99_s * 1e3:.0f} ms late (p99)")
        if self.loop_lag_p99_s > LAG_P99_MAX_S:
            found.append(f"tokens were noticed up to {self.loop_lag_p99_s * 1e3:.0f} ms late (p99)")
        if self.cpu_share_max > CPU_SHARE_MAX:
            found.append(f"a sending process used {self.cpu_share_max:.0%} of a core in its busiest second")
        return found


class LoopWatch:
    """Watches the event loop during an `async with` block around a run."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self.cpu_shares: list[float] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._began = self._window = (0.0, 0.0)

    async def __aenter__(self) -> "LoopWatch":
        self._began = self._window = (time.monotonic(), time.process_time())
        self._ring()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        now_s = time.monotonic()
        if self._due_s and len(self.lags_s) < _SAMPLES_MAX:
            self.lags_s.append(max(0.0, now_s - self._due_s))
        if now_s - self._window[0] >= CPU_WINDOW_S:
            self.cpu_shares.append(_share_since(self._window))
            self._window = (now_s, time.process_time())
        self._due_s = now_s + LOOK_EVERY_S
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._ring)

    def health(self) -> ClientHealth:
        """The health of this process so far, without lateness."""
        lags_s = np.array(self.lags_s or [0.0])
        whole = _share_since(self._began)
        return ClientHealth(
            1,
            0.0,
            float(np.percentile(lags_s, 99)),
            float(lags_s.max()),
            max(self.cpu_shares, default=whole),
            whole,
        )


def _share_since(began: tuple[float, float]) -> float:
    wall_s = time.monotonic() - began[0]
    return (time.process_time() - began[1]) / wall_s if wall_s > 0 else 0.0


def worst_of(healths: Iterable[ClientHealth], records: Sequence[RequestRecord]) -> ClientHealth:
    """The worst health of all sender processes, with the lateness of their records."""
    several = list(healths)
    lateness_s = [r.lateness_s for r in records if r.lateness_s is not None]
    return ClientHealth(
        clients=len(several),
        lateness_p99_s=float(np.percentile(lateness_s, 99)) if lateness_s else 0.0,
        loop_lag_p99_s=max((h.loop_lag_p99_s for h in several), default=0.0),
        loop_lag_max_s=max((h.loop_lag_max_s for h in several), default=0.0),
        cpu_share_max=max((h.cpu_share_max for h in several), default=0.0),
        cpu_share=max((h.cpu_share for h in several), default=0.0),
    )
