"""The hosts of a worker's stages, as Ray has placed them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from baton.config import Config
from baton.core.errors import SetupError
from baton.core.ids import WorkerId
from baton.core.shape import Shape
from baton.wire.address import reachable_host
from control_plane.ray_ops import own_environment
from worker.stage_actor import StageActor

if TYPE_CHECKING:
    from engine.execution.spread import FollowerSetup, Spread
    from worker.part_thread import StageSetup
    from worker.remote_parts import RemoteParts

log = logging.getLogger(__name__)

PLACED_S = 60.0
"""The longest time for the actors of a worker's other places to start: the places are reserved by then."""
START_S = 30.0
ASK_S = 2.0
"""A moment more than a host is given for something."""


class RayStageHost:
    """See `engine.execution.spread.StageHost`. Made in the actor's loop, called from other threads."""

    def __init__(self, stage: int, actor: Any, setup: Callable[[FollowerSetup], StageSetup]) -> None:
        """`setup` says what the process of a follower is told."""
        self._stage, self._actor, self._setup = stage, actor, setup
        self._loop = asyncio.get_running_loop()
        self._end: Future[str] | None = None
        self._is_closed = False

    def start(self, setups: Sequence[FollowerSetup]) -> None:
        """Raises SetupError."""
        encoded = [msgspec.json.encode(self._setup(setup)) for setup in setups]
        try:
            self._call(self._actor.start.remote(encoded)).result(START_S)
        except Exception as error:
            raise SetupError(f"the host of stage {self._stage} does not start its ranks: {error}") from error
        self._end = self._call(self._actor.ended.remote())

    def ended(self) -> str:
        if self._end is None or not self._end.done():
            return ""
        error = self._end.exception()
        reason = self._end.result() if error is None else type(error).__name__
        return f"stage {self._stage} ended on its host: {reason}"

    def close(self, timeout_s: float) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._call(self._actor.close.remote(timeout_s)).result(timeout_s + ASK_S)
        except Exception as error:
            log.warning("the host of stage %d does not end its ranks: %s", self._stage, type(error).__name__)
        end_actor(self._actor)

    def _call(self, reference: Any) -> Future[Any]:
        async def answer() -> Any:
            return await reference

        return asyncio.run_coroutine_threadsafe(answer(), self._loop)


def end_actor(actor: Any) -> None:
    import ray

    try:
        ray.kill(actor, no_restart=True)
    except Exception as error:  # Ray ends it with this process
        log.warning("Ray does not end the actor of a stage: %s", error)


class PlacedStages(NamedTuple):
    """Where the ranks of a worker are, and KV that its leader does not map."""

    spread: Spread | None
    """None: all are on this host."""
    parts: RemoteParts


async def placed_stages(worker_id: WorkerId, config: Config, control_address: str) -> PlacedStages | None:
    """Find where the stages of this worker are, from within its actor; None: all ranks are on this host, and
    this process runs them. Raises SetupError."""
    import ray

    from engine.execution.spread import Reach, Spread
    from worker.remote_parts import RemoteParts, remote_ranks

    group: Any = ray.util.get_current_placement_group()
    shape = Shape.parse(config.engine.shape)
    if group is None or shape.pipeline == 1:
        return None
    here = ray.get_runtime_context().get_node_id()
    listen = config.cluster.worker_host
    reach = Reach(listen, reachable_host(listen, towards=control_address))
    with contextlib.ExitStack() as made:
        actors: list[Any] = []
        for stage in range(1, shape.pipeline):
            actors.append(_stage_actor(group, stage))
            made.callback(end_actor, actors[-1])
        try:
            async with asyncio.timeout(PLACED_S):
                nodes: list[str] = await asyncio.gather(*(actor.node.remote() for actor in actors))
        except Exception as error:
            raise SetupError(f"the stages of this worker do not start on their hosts: {error}") from error
        # GPUs of this host that Ray has reserved for another place are visible there only.
        is_apart = config.model.device != "cpu"
        far = {s: actors[s - 1] for s, node in enumerate(nodes, start=1) if node != here or is_apart}
        parts = None
        if far:
            parts = RemoteParts.create(worker_id, remote_ranks(config, far), reach, config.transfer)
        made.pop_all()
    for stage, actor in enumerate(actors, start=1):
        if stage not in far:
            end_actor(actor)  # this process runs these ranks itself, in the place that stays reserved
    if parts is None:
        return None
    hosts = [
        RayStageHost(stage, far[stage], parts.setup) if stage in far else None
        for stage in range(shape.pipeline)
    ]
    return PlacedStages(Spread(reach, tuple(hosts)), parts)


def _stage_actor(group: Any, stage: int) -> Any:
    """Ask for the actor of a stage, in its place of the group."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle: dict[str, float] = dict(group.bundle_specs[stage])
    options: dict[str, Any] = {
        "num_cpus": bundle.pop("CPU", 0),
        "num_gpus": bundle.pop("GPU", 0),
        "resources": bundle,
        "max_restarts": 0,
        "max_concurrency": 16,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=stage),
    }
    return ray.remote(StageActor).options(**options).remote(own_environment())
