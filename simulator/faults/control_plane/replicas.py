"""Worker processes as the control plane sees them: they start, renew their leases, drain, fail and end."""

import random
from collections.abc import Callable
from typing import Protocol

from baton.core.ids import WorkerId, replica_name
from baton.core.messages import Member, Role
from control_plane.reconcile_events import StartReplica
from simulator.faults.control_plane.scenario import ControlScenario
from simulator.faults.run_context import RunContext

ROLE_LOOK_S = 0.2
"""Time that a worker needs to take a role once it is idle."""


class Surroundings(Protocol):
    """What a process reports to."""

    run: RunContext
    scenario: ControlScenario
    is_calm: bool

    def renew(self, member: Member, *, late_s: float) -> None: ...

    def exited(self, process: "SimReplica", reason: str) -> None: ...


class SimReplica:
    """One process life of a worker."""

    __slots__ = (
        "_deaf_to_drain",
        "_frozen_until_s",
        "_late_s",
        "_mute_until_s",
        "_number",
        "_rng",
        "_slow_end",
        "_world",
        "born_s",
        "disturbed_until_s",
        "is_alive",
        "is_draining",
        "is_ending",
        "is_serving",
        "model",
        "name",
        "node",
        "role",
        "serves_since_s",
        "starts_at_all",
        "version",
        "worker_id",
    )

    def __init__(self, world: Surroundings, start: StartReplica, *, node: str, rng: random.Random) -> None:
        self._world, self._rng = world, rng
        self.worker_id, self.name = start.worker_id, replica_name(start.worker_id)
        self.model, self.role, self.version = start.model, start.role, start.version.name
        self.node = node
        self.born_s = world.run.clock.now_s
        self.is_alive, self.is_serving, self.is_draining, self.is_ending = True, False, False, False
        self.starts_at_all = True
        self.serves_since_s = 0.0
        self.disturbed_until_s = 0.0
        """Something was wrong with it until then, by no fault of the control plane."""
        self._frozen_until_s = self._mute_until_s = 0.0
        self._late_s = 0.0
        self._deaf_to_drain = self._slow_end = False
        self._number = 0
        """Number of the newest drain or role switch; an older one is not finished any more."""
        self._begin()

    # --- start ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        world, rng = self._world, self._rng
        faults = world.scenario.faults if not world.is_calm else frozenset[str]()
        if "fails_to_start" in faults and rng.random() < 0.25:
            self.disturbed_until_s = float("inf")
            self.starts_at_all = False
            world.run.counts["replicas that failed to start"] += 1
            world.run.clock.after(rng.uniform(0.1, 3.0), lambda: self.die("it could not start"))
            return
        if "never_starts" in faults and rng.random() < 0.1:
            self.disturbed_until_s = float("inf")
            self.starts_at_all = False
            world.run.counts["replicas that never started"] += 1
            return
        self._slow_end = "slow_end" in faults and rng.random() < 0.4
        world.run.clock.after(rng.uniform(*world.scenario.start_s), self._serve)

    def _serve(self) -> None:
        if self.is_alive:
            self.is_serving = True
            self.serves_since_s = self._world.run.clock.now_s
            self._heartbeat()

    # --- heartbeats -----------------------------------------------------------------------------------

    @property
    def member(self) -> Member:
        return Member(
            worker_id=self.worker_id,
            role=self.role,
            address=f"sim:{self.worker_id}",
            model=self.model,
            fingerprint=self.version,
            is_draining=self.is_draining,
            node=self.node,
            version=self.version,
        )

    def _heartbeat(self) -> None:
        if not self.is_alive:
            return
        clock = self._world.run.clock
        if clock.now_s >= max(self._frozen_until_s, self._mute_until_s):
            self._world.renew(self.member, late_s=self._late_s)
        wait_s = self._world.scenario.heartbeat_s
        clock.after(max(wait_s, self._frozen_until_s - clock.now_s), self._heartbeat)

    def is_well(self, now_s: float) -> bool:
        """It serves, and nothing was wrong with it for a while."""
        patience_s = self._world.scenario.member_lease_s + 1.0
        return self.is_alive and self.is_serving and now_s > self.disturbed_until_s + patience_s

    @property
    def answers(self) -> bool:
        """It tells a new control plane who it is."""
        return self._world.run.clock.now_s >= self._frozen_until_s

    # --- what the control plane asks for --------------------------------------------------------------

    def switch_role(self, role: Role) -> None:
        self._number += 1
        number = self._number
        self.is_draining = True
        drain_s = min(self._drain_s(), self._world.scenario.policy.drain_timeout_s)
        self._when_it_runs(drain_s + ROLE_LOOK_S, lambda: self._take_role(role, number))

    def _take_role(self, role: Role, number: int) -> None:
        if self.is_alive and number == self._number and not self.is_ending:
            self.role, self.is_draining = role, False
            self._world.run.counts["replicas that switched roles"] += 1
            self._world.renew(self.member, late_s=self._late_s)

    def drain(self) -> None:
        self._number += 1
        self.is_draining = self.is_ending = True
        if not self._deaf_to_drain:
            self._when_it_runs(self._drain_s(), lambda: self.die("drained"))

    def _drain_s(self) -> float:
        return self._rng.choice((0.05, 1.0, 4.0)) * self._rng.uniform(0.5, 1.5)

    def _when_it_runs(self, wait_s: float, call: Callable[[], None]) -> None:
        now_s = self._world.run.clock.now_s
        self._world.run.clock.after(max(wait_s, self._frozen_until_s - now_s + 0.1), call)

    def kill(self) -> None:
        """SIGKILL. A slow machine needs a while for it, and the first signal may be lost."""
        if not self._slow_end:
            self._world.run.clock.after(0.05, lambda: self.die("killed"))
            return
        self._slow_end = False
        self._world.run.counts["kills that were not confirmed in time"] += 1
        if self._rng.random() < 0.5:
            self._world.run.clock.after(self._rng.uniform(2.5, 5.0), lambda: self.die("killed"))

    def die(self, reason: str) -> None:
        if self.is_alive:
            self.is_alive = False
            self._world.exited(self, reason)

    # --- faults ---------------------------------------------------------------------------------------

    def _disturb(self, span_s: float) -> None:
        now_s = self._world.run.clock.now_s
        self.disturbed_until_s = max(self.disturbed_until_s, now_s + span_s)

    def freeze(self, span_s: float) -> None:
        self._frozen_until_s = self._world.run.clock.now_s + span_s
        self._disturb(span_s)

    def mute(self, span_s: float) -> None:
        """Its renewals are lost on the way."""
        self._mute_until_s = self._world.run.clock.now_s + span_s
        self._disturb(span_s)

    def delay_renewals(self, span_s: float) -> None:
        """Its renewals arrive late for a while, perhaps after its end."""
        self._late_s = self._rng.uniform(0.5, 3.0)
        self._disturb(span_s + 2 * self._late_s)
        self._world.run.clock.after(span_s, self._on_time_again)

    def _on_time_again(self) -> None:
        self._late_s = 0.0

    def stick(self) -> None:
        """It will not end when it is asked to."""
        self._deaf_to_drain = True

    def heal(self) -> None:
        now_s = self._world.run.clock.now_s
        self._frozen_until_s = self._mute_until_s = now_s
        self._late_s, self._slow_end = 0.0, False
        if self.disturbed_until_s < float("inf"):
            self.disturbed_until_s = min(self.disturbed_until_s, now_s)


def worker_of(processes: dict[WorkerId, SimReplica], worker_id: WorkerId) -> SimReplica | None:
    found = processes.get(worker_id)
    return found if found is not None and found.is_alive else None
