"""A plan as Helm values."""

import json
from collections.abc import Iterator, Mapping

from baton.core.messages import Role
from simulator.hardware import Node
from simulator.plan.clusters import ClusterPlan, PlannedPool
from simulator.plan.shapes import GPUS_PER_NODE

Value = Mapping[str, "Value"] | str | int | float | bool


def helm_values(
    plan: ClusterPlan, *, model: str, slo: Mapping[str, float], comments: tuple[str, ...] = ()
) -> str:
    """Return YAML. `slo` gives objectives by field of a class; `comments` go to its head, one line each."""
    values: dict[str, Value] = {
        "model": {"path": model},
        "config": {"slo": {"default": "default", "classes": {"default": dict(slo)}}},
        "pools": {role.value: _pool(role, plan.pools.get(role)) for role in Role},
    }
    head = "".join(f"# {line}\n" for line in comments)
    return head + "\n".join(_lines(values, 0)) + "\n"


def _pool(role: Role, pool: PlannedPool | None) -> Value:
    if pool is None:
        return {"replicas": 0}
    node = pool.shape.node
    return {
        "replicas": pool.count,
        "gpu": node.gpu.name,
        "tensorParallelSize": node.tensor,
        "pipelineParallelSize": node.pipeline,
        "podsPerWorker": _pods(node),
    }


def _pods(node: Node) -> int:
    """Return the fewest pods for the stages of one worker, each on one node and with as many stages."""
    fitting = (
        pods
        for pods in range(1, node.pipeline)
        if node.pipeline % pods == 0 and node.gpu_count <= pods * GPUS_PER_NODE
    )
    return next(fitting, node.pipeline)


def _lines(values: Mapping[str, Value], depth: int) -> Iterator[str]:
    for name, value in values.items():
        indent = "  " * depth
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _lines(value, depth + 1)
        else:
            yield f"{indent}{name}: {json.dumps(value)}"  # JSON's scalars are YAML's
