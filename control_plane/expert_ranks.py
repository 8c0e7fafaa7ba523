"""Starts the processes of expert ranks: beside their workers, or on cores and nodes of their own."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from baton.core.experts import group_name
from baton.core.ids import ExpertRankId, WorkerId, replica_name
from baton.core.messages import Role
from control_plane.experts.group_values import StartExpertRank
from control_plane.ray_experts import ExpertRankSpec, RayExpertRanks
from control_plane.workers import RayWorkers

BESIDE_S = 3600.0
"""The longest time that a rank waits until the worker that it shall stand beside has a node. Its group gives
up sooner, after `cluster.start_timeout_s`."""


class StartedExpertRanks:
    """The implementation of `expert_groups.ExpertRankProcesses` with Ray."""

    def __init__(
        self,
        ranks: RayExpertRanks,
        workers: RayWorkers,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        is_local: bool,
    ) -> None:
        self._ranks, self._workers, self._spawn, self._is_local = ranks, workers, spawn, is_local
        self._starting: dict[ExpertRankId, asyncio.Task[None]] = {}
        """Starts that wait for a node."""
        self.on_exit: Callable[[ExpertRankId, BaseException | str], None] = lambda rank_id, reason: None

    def start(self, start: StartExpertRank, model: str, role: Role) -> None:
        name = replica_name(WorkerId(start.rank_id))
        number = int(name.rpartition("-")[2])
        place = self._workers.expert_rank(start.rank_id, number, model, role)
        spec = ExpertRankSpec(
            rank_id=start.rank_id,
            group=group_name(model, role),
            model=model,
            role=role,
            control_address=self._workers.control_address,
            config=place.config.model_dump(),
            ranks=start.ranks,
            threads=place.threads,
            cores=place.cores,
        )
        worker_id = place.beside
        if worker_id is None or self._is_local:
            self._ranks.start(spec, place, avoid=start.avoid)
            return

        async def start_beside() -> None:
            try:
                node = await self._workers.node_of(worker_id, timeout_s=BESIDE_S)
            finally:
                self._starting.pop(start.rank_id, None)
            if node:
                self._ranks.start(spec, place, node=node, avoid=start.avoid)
            else:  # elsewhere it would take memory and cores that nobody gave it
                self.on_exit(start.rank_id, f"{worker_id}, which it shall stand beside, has ended")

        self._starting[start.rank_id] = self._spawn(start_beside())

    async def kill(self, rank_id: ExpertRankId) -> None:
        waiting = self._starting.pop(rank_id, None)
        if waiting is not None:
            waiting.cancel()
            self.on_exit(rank_id, "it was not wanted any more before it had started")
            return
        await self._ranks.kill(rank_id)

    def worker_count(self, model: str, role: Role) -> int:
        return len(self._workers.beside(model, role))
