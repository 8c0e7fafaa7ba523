"""Placement groups of Ray for workers whose stages may be on several hosts: all places of a worker, or none.

A group outlives this process, as its worker does. It has the worker's name, so that whoever sees the end of
the worker can give the places back.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.ids import WorkerId
from control_plane.ray_cluster import RayCluster, first_line

log = logging.getLogger(__name__)

LEADER_BUNDLE = 0
_SEPARATOR = " stages of "


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """What one stage needs of one host."""

    cpus: float
    gpus: float
    resources: Mapping[str, float]
    labels: Mapping[str, str]

    @property
    def bundle(self) -> dict[str, float]:
        found = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: count for name, count in found.items() if count}


class StageGroups:
    """The groups of one control plane's workers."""

    def __init__(self, home: RayCluster) -> None:
        self._home = home

    def reserve(self, namespace: str, worker_id: WorkerId, stages: Sequence[StageNeeds]) -> dict[str, Any]:
        """Ask for a place for each stage, on one host if one has room for all, and return the options of an
        actor in the first. Nothing is waited for: the actor starts when there is room."""
        util = self._home.ray.util
        labels = [dict(stage.labels) for stage in stages]
        group = util.placement_group(
            [stage.bundle for stage in stages],
            strategy="PACK",
            name=_name(namespace, worker_id),
            lifetime="detached",
            **({"bundle_label_selector": labels} if any(labels) else {}),
        )
        strategy = util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=LEADER_BUNDLE
        )
        first = stages[LEADER_BUNDLE]
        return {
            "num_cpus": first.cpus,
            "num_gpus": first.gpus,
            "resources": dict(first.resources),
            "scheduling_strategy": strategy,
        }

    def release(self, namespace: str, worker_id: WorkerId) -> None:
        """Give the places of a worker back, whose processes in them Ray ends. It need not have any."""
        self._remove(_name(namespace, worker_id))

    def release_others(self, namespace: str, workers: Sequence[WorkerId]) -> None:
        """Give the places of all workers back that are not named: they ended while nobody looked."""
        kept = {_name(namespace, worker_id) for worker_id in workers}
        try:
            table: dict[str, Any] = self._home.ray.util.placement_group_table()
        except Exception as error:
            log.warning("Ray does not list its placement groups: %s", first_line(error))
            return
        for group in table.values():
            name = str(group.get("name", ""))
            is_ours = name.endswith(_SEPARATOR + namespace) and group.get("state") != "REMOVED"
            if is_ours and name not in kept:
                self._remove(name)

    def _remove(self, name: str) -> None:
        if self._home.is_lost:
            return
        util = self._home.ray.util
        try:
            util.remove_placement_group(util.get_placement_group(name))
        except ValueError:
            return  # there is none of this name
        except Exception as error:  # an error of Ray must not prevent the restart of a worker
            log.warning("Ray does not remove the placement group %s: %s", name, first_line(error))


def _name(namespace: str, worker_id: WorkerId) -> str:
    return f"{worker_id}{_SEPARATOR}{namespace}"
