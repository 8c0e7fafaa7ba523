"""Follows the engine's counts of its experts."""

import asyncio
import time

from engine.models.expert_counts import ExpertCounts
from worker.engine_thread import EngineThread
from worker.expert_load import ExpertLoad

EVERY_S = 1.0


class ExpertWatch:
    """Looks at the counts once a second, between two steps, until `run` is cancelled. Nobody waits for it."""

    def __init__(self, counts: ExpertCounts, engine: EngineThread) -> None:
        self.load = ExpertLoad(counts.layers, counts.expert_count)
        self._counts, self._engine = counts, engine

    async def run(self) -> None:
        while True:
            counts = await self._engine.run(self._counts.read)
            if counts is not None:
                self.load.observe(counts, now_s=time.monotonic())
            await asyncio.sleep(EVERY_S)
