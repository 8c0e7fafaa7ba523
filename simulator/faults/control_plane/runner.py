"""One control seed, from the first event to rest."""

import random
from collections.abc import Callable

from simulator.faults.control_plane.replicas import SimReplica
from simulator.faults.control_plane.scenario import ControlScenario, draw_control
from simulator.faults.control_plane.world import ControlWorld
from simulator.faults.run_context import RunContext, Violation

LOOK_S = 1.0
EVENTS_MAX = 100_000
CHECK_EVERY = 16


class ControlRun:
    """One seed of the control plane."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.scenario: ControlScenario = draw_control(context.stream("control scenario"))
        self.world = ControlWorld(context, self.scenario)
        self._rng: random.Random = context.stream("control faults")

    @property
    def faults_drawn(self) -> frozenset[str]:
        return self.scenario.faults

    def play(self) -> None:
        """Run it. Raises Violation, or whatever a decision object raised."""
        clock, scenario = self.context.clock, self.scenario
        self._schedule()
        self._look()
        clock.run(until_s=scenario.churn_s, is_over=self._is_astray, check_every=CHECK_EVERY)
        self._calm()
        end_s = clock.now_s + scenario.settles_within_s
        clock.run(until_s=end_s, is_over=self._is_astray, check_every=CHECK_EVERY)
        life = self.world.life
        if life is None:
            raise Violation(0, "there is no control plane")
        # An autoscaler may order something at any time; what it ordered just now is under way.
        clock.run(
            until_s=clock.now_s + scenario.settles_within_s, is_over=self._is_settled, check_every=CHECK_EVERY
        )
        self.world.checker.rest(life, self.world.processes)

    def _is_settled(self) -> bool:
        life = self.world.life
        return life is not None and life.reconciler.is_settled and self._is_quiet()

    def _is_quiet(self) -> bool:
        """No worker has news under way."""
        return all(one.is_serving for one in self.world.processes.values() if one.is_alive)

    def _look(self) -> None:
        life = self.world.life
        if life is not None:
            living = [one for one in self.world.processes.values() if one.is_alive]
            self.world.checker.look(life, living)
        self.context.clock.after(LOOK_S, self._look)

    def _is_astray(self) -> bool:
        if self.context.clock.event_count > EVENTS_MAX:
            raise Violation(6, f"{EVENTS_MAX} events and no end")
        return False

    # --- faults ---------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        scenario, rng, world = self.scenario, self._rng, self.world
        strikes: dict[str, Callable[[], None]] = {
            "crash": lambda: self._on_replica(lambda one: one.die("crashed")),
            "freeze": lambda: self._on_replica(lambda one: one.freeze(self._span_s())),
            "mute": lambda: self._on_replica(lambda one: one.mute(self._span_s())),
            "stuck_drain": lambda: self._on_replica(lambda one: one.stick()),
            "late_renewals": lambda: self._on_replica(lambda one: one.delay_renewals(self._span_s())),
            "control_stall": self._stall,
            "control_kill": lambda: world.kill_control(rng.uniform(0.5, 10.0)),
            "router_crash": world.crash_router,
            "router_silent": self._silence_router,
        }
        for name, strike in strikes.items():
            if name in scenario.faults:
                for _ in range(rng.randint(1, 2 * scenario.strikes_max)):
                    self.context.clock.at(
                        rng.uniform(10.0, scenario.churn_s - 20.0), self._strike, name, strike
                    )
        for _ in range(scenario.order_count):
            self.context.clock.at(rng.uniform(15.0, scenario.churn_s - 20.0), world.operate)

    def _strike(self, name: str, strike: Callable[[], None]) -> None:
        self.context.counts[f"control fault: {name}"] += 1
        strike()

    def _span_s(self) -> float:
        """Draw a time: shorter than a lease, about as long, or longer."""
        return self._rng.choice((0.5, 2.5, 5.0, 12.0)) * self._rng.uniform(0.7, 1.3)

    def _on_replica(self, strike: Callable[[SimReplica], None]) -> None:
        living = [one for one in self.world.processes.values() if one.is_alive]
        if living:
            strike(self._rng.choice(living))

    def _stall(self) -> None:
        life = self.world.life
        if life is not None:
            life.stall(self._span_s())

    def _silence_router(self) -> None:
        if not self.world.routers:
            return
        router = self._rng.choice(self.world.routers)
        router.silent_until_s = self.context.clock.now_s + self._rng.choice((4.0, 15.0, 40.0))

    def _calm(self) -> None:
        """Heal everything."""
        self.world.is_calm = True
        for process in self.world.processes.values():
            process.heal()
        for router in self.world.routers:
            router.silent_until_s = 0.0
