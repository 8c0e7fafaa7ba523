"""A cluster whose pools divide the experts of their model over their GPUs, and may lose nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.config import Config
from baton.core.errors import SetupError
from baton.core.messages import Role
from simulator.experts.layout import NODE_GPUS, layout_of
from simulator.experts.loss import FILE_BYTES_S, lose_node
from simulator.experts.pool import ExpertPool
from simulator.experts.popularity import ExpertPopularity
from simulator.fleet.fleet import Fleet
from simulator.fleet.node_loss import NodeLosses, PlannedNodeLoss
from simulator.fleet.setup import Machine, PoolSizes, expert_machine
from simulator.hardware import find_gpu
from simulator.models import find_model

MAP_S = 0.1
"""Time in which a map without a lost rank reaches all workers."""
NODE_BACK_S = 120.0


@dataclass(frozen=True, slots=True)
class ExpertClusterSpec:
    model: str
    gpu: str
    weight_bytes: float
    pools: PoolSizes
    load: str
    """How tokens use experts, see `ExpertPopularity.parse`."""
    node_gpus: int = NODE_GPUS
    once_per_node: bool = False
    lose_node: Sequence[str] = ()
    """Losses as "ROLE@SECONDS"."""
    node_back_s: float = NODE_BACK_S
    file_bytes_s: float = FILE_BYTES_S


class ExpertCluster:
    """The pools of such a cluster."""

    def __init__(self, spec: ExpertClusterSpec, config: Config) -> None:
        """Raises SetupError."""
        self._spec, self._config = spec, config
        model = find_model(spec.model)
        if not model.experts:
            raise SetupError(f"{model.name} has no experts to divide: leave experts.parallel out")
        popularity = ExpertPopularity.parse(spec.load, model)
        self.pools: dict[Role, ExpertPool] = {}
        for role in Role:
            if not (workers := spec.pools.of(role)):
                continue
            layout = layout_of(
                config.experts,
                model,
                workers=workers,
                node_gpus=spec.node_gpus,
                once_per_node=spec.once_per_node and role is not Role.DECODE,
            )
            self.pools[role] = ExpertPool(model, find_gpu(spec.gpu), layout, popularity, spec.weight_bytes)
        self.losses = [self._loss(text) for text in spec.lose_node]

    def machines(self, *, kv_bytes: float | None) -> dict[Role, Machine]:
        """Raises SetupError."""
        engine = self._config.engine
        return {
            role: expert_machine(pool, engine=engine, kv_bytes=kv_bytes) for role, pool in self.pools.items()
        }

    def options(self) -> dict[str, str | float | bool | None]:
        """Return what a report says of the experts."""
        experts, spec = self._config.experts, self._spec
        slots = ", ".join(f"{pool.layout.slots} ({role})" for role, pool in self.pools.items())
        return {
            "experts": experts.parallel,
            "expert_replicas": experts.replicas,
            "expert_slots": slots,
            "expert_rows": experts.rows,
            "expert_load": spec.load,
            "lose_node": ", ".join(spec.lose_node),
        }

    def lose_nodes(self, fleet: Fleet) -> None:
        for planned in self.losses:
            NodeLosses(fleet, planned)

    def _loss(self, text: str) -> PlannedNodeLoss:
        role, at_s = _parse(text)
        pool, spec = self.pools.get(role), self._spec
        if pool is None:
            raise SetupError(f"--lose-node {text}: the cluster has no {role} pool")
        if pool.layout.nodes < 2:
            raise SetupError(f"--lose-node {text}: the {role} pool's experts are on one node alone")
        loss = lose_node(pool, file_bytes_s=spec.file_bytes_s)
        engine = self._config.engine
        costs = None
        if loss.smaller is not None:
            costs = loss.smaller.costs(chunk_tokens=engine.step_tokens_max, batch=engine.batch_sequences_max)
        return PlannedNodeLoss(
            *(role, at_s, loss, spec.node_gpus, costs),
            noticed_s=self._config.experts.answer_timeout_s + MAP_S,
            back_s=spec.node_back_s,
            keeps_workers=pool.layout.is_apart,
        )


def _parse(text: str) -> tuple[Role, float]:
    name, _, seconds = text.partition("@")
    try:
        return Role(name), float(seconds)
    except ValueError:
        raise SetupError(f"--lose-node {text}: write a role and a time, such as decode@60") from None
