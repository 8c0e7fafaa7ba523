"""Follows the engine's counts of its experts, for people and for the control plane."""

import asyncio
import time
from collections.abc import Callable

from engine.models.expert_counts import Counts, ExpertCounts
from worker.engine_thread import EngineThread
from worker.expert_load import ExpertLoad

EVERY_S = 1.0


class ExpertWatch:
    """Looks at the counts once a second, between two steps, until `run` is cancelled. Nobody waits for it."""

    def __init__(
        self, counts: ExpertCounts, engine: EngineThread, report: Callable[[Counts], None] | None = None
    ) -> None:
        """`report` gets the tokens of each expert as int64 [L, E], since the engine started."""
        self.load = ExpertLoad(counts.layers, counts.expert_count)
        self._counts, self._engine, self._report = counts, engine, report

    async def run(self) -> None:
        while True:
            counts = await self._engine.run(self._counts.read)
            if counts is not None:
                self.load.observe(counts, now_s=time.monotonic())
                if self._report is not None:
                    self._report(counts)
            await asyncio.sleep(EVERY_S)
