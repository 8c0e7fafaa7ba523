"""A replica of the simulated cluster."""

from baton.core.messages import Role
from baton.core.shape import Shape
from simulator.faults.node import SimWorker


class Slot:
    """One replica: the worker that fills it now, and what only the simulator knows of it."""

    __slots__ = (
        "drain_since_s",
        "first_role",
        "frozen_since_s",
        "incarnation",
        "name",
        "switch_count",
        "worker",
    )

    def __init__(self, name: str, role: Role) -> None:
        self.name, self.first_role = name, role
        self.incarnation = 0
        self.worker: SimWorker | None = None
        self.frozen_since_s: float | None = None
        self.drain_since_s: float | None = None
        self.switch_count = 0
        """Count of the roles that the worker was told to take."""

    @property
    def role(self) -> Role:
        return self.first_role if self.worker is None else self.worker.core.status().role

    def next_shape(self, shapes: tuple[Shape, ...], index: int) -> Shape:
        """Return the shape of the worker that starts now. Every third life has that of the next replica, as
        after a rollout."""
        return shapes[(index + self.incarnation // 3) % len(shapes)]
