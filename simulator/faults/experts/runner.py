"""One expert seed, from the first event to rest."""

import random
from collections.abc import Callable

from control_plane.experts import group_values as v
from simulator.faults.experts.ranks import SimExpertRank
from simulator.faults.experts.scenario import ExpertScenario, RankMoment, draw_experts
from simulator.faults.experts.world import ExpertWorld, Strike
from simulator.faults.run_context import RunContext, Violation

EVENTS_MAX = 200_000
CHECK_EVERY = 16
STEPS_AT_END_S = 1.0


class ExpertRun:
    """One seed of an expert group."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.scenario: ExpertScenario = draw_experts(context.stream("expert scenario"))
        self.world = ExpertWorld(context, self.scenario)
        self._rng: random.Random = context.stream("expert faults")

    @property
    def faults_drawn(self) -> frozenset[str]:
        return self.scenario.faults

    def play(self) -> None:
        """Run it. Raises Violation, or whatever a decision object raised."""
        clock, scenario, world = self.context.clock, self.scenario, self.world
        world.control.begin()
        for _ in range(scenario.callers):
            world.add_caller()
        self._schedule()
        end_s = scenario.begins_s + scenario.churn_s
        clock.run(until_s=end_s, is_over=self._is_astray, check_every=CHECK_EVERY)
        self._calm()
        clock.run(
            until_s=clock.now_s + scenario.settles_within_s,
            is_over=lambda: self._is_astray() or world.checker.is_at_rest(),
            check_every=4 * CHECK_EVERY,
        )
        world.checker.rest()
        before = {name: caller.steps for name, caller in world.callers.items()}
        clock.run(until_s=clock.now_s + STEPS_AT_END_S, is_over=self._is_astray, check_every=CHECK_EVERY)
        idle = [name for name, caller in world.callers.items() if caller.steps == before.get(name)]
        if idle:
            raise Violation(16, f"{', '.join(idle)} do no steps at the end")

    def _is_astray(self) -> bool:
        if self.context.clock.event_count > EVENTS_MAX:
            raise Violation(6, f"{EVENTS_MAX} events and no end")
        return False

    # --- faults ---------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        scenario, rng, world = self.scenario, self._rng, self.world
        strikes: dict[str, Callable[[], None]] = {
            "rank_kill": lambda: self._at_some_moment(lambda rank: rank.die()),
            "rank_stop": lambda: self._at_some_moment(self._stop),
            "rank_slow": lambda: self._at_some_moment(self._slow),
            "node_loss": self._lose_node,
            "two_at_once": self._kill_two,
            "link_breaks": self._break_link,
            "link_stalls": self._stall_link,
            "caller_crash": self._crash_caller,
            "streams_break": self._break_stream,
            "control_restart": world.crash_control,
            "control_stall": lambda: world.control.stall(rng.choice((0.2, 0.8, 2.5))),
            "nodes_left": self._leave_node,
            "scaling": lambda: world.control.order(wanted=rng.randint(1, 5)),
            "rebalances": lambda: world.control.handle(v.ExpertsRebalanced()),
            "all_lost": self._kill_all,
        }
        for name, strike in strikes.items():
            if name not in scenario.faults:
                continue
            for _ in range(rng.randint(1, scenario.strikes_max)):
                at_s = scenario.begins_s + rng.uniform(0.0, scenario.churn_s - 0.5)
                self.context.clock.at(at_s, self._strike, name, strike)

    def _strike(self, name: str, strike: Callable[[], None]) -> None:
        self.context.counts[f"expert fault: {name}"] += 1
        self.context.note("fault", name)
        self.world.checker.something_happened()
        strike()

    def _at_some_moment(self, strike: Strike) -> None:
        moment = self._rng.choice(tuple(RankMoment))
        if moment is not RankMoment.IDLE:
            self.world.arm(moment, strike)
            return
        if well := self._well():
            self.context.counts[f"expert ranks struck while {moment}"] += 1
            strike(self._rng.choice(well))

    def _well(self) -> list[SimExpertRank]:
        return [rank for rank in self.world.ranks.values() if rank.is_well]

    def _stop(self, rank: SimExpertRank) -> None:
        rank.stop()
        for_s = self._rng.choice((0.1, 0.3, 0.6, 1.5, 60.0))
        self.world.after(for_s, rank.go_on)

    def _slow(self, rank: SimExpertRank) -> None:
        rank.slow_factor = self._rng.choice((10.0, 400.0))
        self.world.after(self._rng.uniform(0.5, 2.0), rank.heal)

    def _lose_node(self) -> None:
        nodes = sorted({rank.node for rank in self._well()})
        if len(nodes) < 2:
            return
        lost = self._rng.choice(nodes)
        for rank in self._well():
            if rank.node == lost:
                rank.die(is_silent=True)

    def _kill_two(self) -> None:
        well = self._well()
        self._rng.shuffle(well)
        if len(well) >= 2:
            self.context.counts["expert ranks lost two at once"] += 1
            for rank in well[:2]:
                rank.die()

    def _kill_all(self) -> None:
        for rank in list(self.world.ranks.values()):
            rank.die()
        self.context.counts["expert groups lost at once"] += 1
        self.context.counts["expert groups lost in mid-dispatch"] += any(
            caller.dispatches for caller in self.world.callers.values()
        )

    def _break_link(self) -> None:
        callers = list(self.world.callers.values())
        caller = self._rng.choice(callers) if callers else None
        if caller is None or not caller.open:
            return
        link = self._rng.choice(list(caller.open))
        if self._rng.random() < 0.5:  # it is made anew while the rank still computes what came by the old one
            caller.open[link].rank.slow_factor = 1.5 / self.scenario.row_s
            self.world.after(2.0, caller.open[link].rank.heal)
            self.world.control.stall(2.5)
            self.world.after(0.1, lambda: caller.fail(link, "the connection broke", is_gone=False))
        else:
            self.context.counts["expert connections that ended"] += 1
            caller.fail(link, "the connection ended", is_gone=True)

    def _stall_link(self) -> None:
        callers, well = list(self.world.callers.values()), self._well()
        if callers and well:
            for_s = self._rng.choice((0.2, 0.7, 1.5))
            self.world.stall_link(self._rng.choice(callers), self._rng.choice(well), for_s)

    def _crash_caller(self) -> None:
        callers = [one for one in self.world.callers.values() if one.dispatches]
        if callers:
            self._rng.choice(callers).die()

    def _break_stream(self) -> None:
        ones = [*self._well(), *self.world.callers.values()]
        if ones:
            self.world.break_stream(self._rng.choice(ones))

    def _leave_node(self) -> None:
        node = f"node-{self._rng.randrange(self.scenario.nodes)}"
        self.world.control.order(avoided=frozenset({node}))
        self.world.after(self._rng.uniform(0.5, 3.0), lambda: self.world.control.order(avoided=frozenset()))

    def _calm(self) -> None:
        """Heal everything."""
        world = self.world
        world.is_calm = True
        world.checker.something_happened()
        for rank in world.ranks.values():
            rank.slow_factor = 1.0
            rank.go_on()
        world.control.order(wanted=self.scenario.wanted, avoided=frozenset())
