"""The loss of a node of a pool whose experts are divided, while a trace runs."""

from dataclasses import dataclass

from baton.core.costs import StepCosts
from baton.core.errors import SetupError
from baton.core.messages import Role
from simulator.experts.loss import NodeLoss
from simulator.fleet.fleet import Fleet
from simulator.fleet.spec import FleetWorkerSpec
from simulator.fleet.worker import MacroWorker


@dataclass(frozen=True, slots=True)
class PlannedNodeLoss:
    """A node that is lost at some time of a run."""

    role: Role
    at_s: float
    loss: NodeLoss
    node_gpus: int
    smaller_costs: StepCosts | None
    """Costs of the survivors' steps; None if they compute nothing."""
    noticed_s: float
    """Time until nobody waits for the lost ranks any more, and the next map is there."""
    back_s: float
    """Time from the loss until the node's successor serves."""
    keeps_workers: bool = False
    """Only expert ranks are lost: they are on nodes of their own."""

    @property
    def pause_s(self) -> float:
        """Time in which the survivors compute nothing."""
        if self.smaller_costs is None:
            return self.back_s
        return min(self.back_s, self.noticed_s + self.loss.load_s)

    def words(self) -> str:
        if self.loss.missing == 0:
            what = "every expert has another replica"
        elif self.smaller_costs is None:
            what = (
                f"{self.loss.missing} experts have no other replica, and the other nodes no memory for them"
            )
        else:
            what = f"{self.loss.missing} experts have no other replica and are loaded"
        return f"{self.at_s:g} s: the {self.role} pool loses a node; {what}; a pause of {self.pause_s:.1f} s"


class NodeLosses:
    """Carries out planned losses on a fleet. Make it before the fleet runs."""

    def __init__(self, fleet: Fleet, planned: PlannedNodeLoss) -> None:
        self._fleet, self._planned = fleet, planned
        found = [kind for kind, _ in fleet.spec.workers if kind.role is planned.role]
        if not found:
            raise SetupError(f"--lose-node {planned.role}: the cluster has no such pool")
        self._kind: FleetWorkerSpec = found[0]
        fleet.clock.at(planned.at_s, self._lose)

    def _lose(self) -> None:
        planned, fleet = self._planned, self._fleet
        workers = self._workers()
        lost = [] if planned.keeps_workers else workers[-planned.node_gpus :]
        for worker in workers[: len(workers) - len(lost)]:
            worker.engine.pause(fleet.clock.now_s + planned.pause_s)
            if planned.smaller_costs is not None:
                worker.set_costs(planned.smaller_costs)
        for worker in lost:
            fleet.lose(worker.worker_id, "its node is lost")
        fleet.clock.after(planned.back_s, self._return, len(lost))

    def _return(self, count: int) -> None:
        for worker in self._workers():
            worker.set_costs(self._kind.costs)
        for _ in range(count):
            self._fleet.add(self._kind)

    def _workers(self) -> list[MacroWorker]:
        """Return the pool's workers in the order in which they joined."""
        found = [worker for worker in self._fleet.workers if worker.spec.role is self._planned.role]
        return [worker for worker in found if isinstance(worker, MacroWorker)]
