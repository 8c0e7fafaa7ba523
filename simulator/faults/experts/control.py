"""The control plane's side of one expert group: its core, timers and streams, over several lives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from baton.core.experts import ExpertMapUpdate, ExpertRankOrder
from baton.core.ids import ExpertRankId
from control_plane.experts import group_values as v
from control_plane.experts.group import ExpertRankGroup
from simulator.faults.experts.checks import ExpertChecker
from simulator.faults.experts.ranks import SimExpertRank
from simulator.faults.experts.scenario import ExpertScenario
from simulator.faults.run_context import RunContext

TICK_AFTER_S = 1e-6
PREFIX = "experts-decode"


class ControlSurroundings(Protocol):
    """What the control plane has of the world."""

    @property
    def now_s(self) -> float: ...
    @property
    def context(self) -> RunContext: ...
    @property
    def scenario(self) -> ExpertScenario: ...
    @property
    def group_name(self) -> str: ...
    @property
    def ranks(self) -> Mapping[ExpertRankId, SimExpertRank]: ...
    @property
    def checker(self) -> ExpertChecker: ...

    def after(self, delay_s: float, call: Callable[[], None]) -> None: ...
    def start_rank(self, rank_id: ExpertRankId, ranks: int, avoid: Sequence[str]) -> None: ...
    def kill_rank(self, rank_id: ExpertRankId) -> None: ...
    def to_expert_rank(self, rank_id: ExpertRankId, order: ExpertRankOrder) -> None: ...
    def announce(self, update: ExpertMapUpdate, only: str | None) -> None: ...


class SimExpertControl:
    def __init__(self, world: ControlSurroundings) -> None:
        self.world = world
        self.group: ExpertRankGroup | None = None
        self.wanted = world.scenario.wanted
        self.avoided: frozenset[str] = frozenset()
        self.lives = 0
        self.since_s = 0.0
        """Since when it lives and is not held up."""
        self._stalled_until_s = 0.0
        self._held_up: list[v.ExpertGroupEvent] = []
        self._version = 0

    @property
    def is_up(self) -> bool:
        return self.group is not None

    def begin(self) -> None:
        """Begin a life that knows nothing but the processes that it finds."""
        self.lives += 1
        self.since_s = self.world.now_s
        policy = self.world.scenario.policy
        self.group = ExpertRankGroup(self.world.group_name, PREFIX, policy, life=f"c{self.lives}x")
        for rank in list(self.world.ranks.values()):
            if rank.is_alive:
                self.handle(v.ExpertRankAdopted(rank.rank_id))
        if self.avoided:
            self.handle(v.ExpertNodesAvoided(self.avoided))
        self.handle(v.ExpertRanksWanted(self.wanted))

    def crash(self) -> None:
        self.group = None
        self._held_up = []
        self._stalled_until_s = 0.0
        self._version += 1

    def stall(self, for_s: float) -> None:
        """Receive nothing for a while."""
        if self.group is None or self._stalled_until_s > self.world.now_s:
            return
        self._stalled_until_s = self.world.now_s + for_s
        self._version += 1
        life = self.lives
        self.world.after(for_s, lambda: self._go_on(life, for_s))

    def _go_on(self, life: int, for_s: float) -> None:
        if life != self.lives or self.group is None:
            return
        self._stalled_until_s = 0.0
        self.since_s = self.world.now_s
        held_up, self._held_up = self._held_up, []
        for event in (v.ExpertGroupPaused(for_s), *held_up):
            self.handle(event)

    def handle(self, event: v.ExpertGroupEvent) -> None:
        group = self.group
        if group is None:
            return
        if self._stalled_until_s > self.world.now_s:
            self._held_up.append(event)
            return
        for action in group.handle(event, now_s=self.world.now_s):
            self._perform(action)
        self.world.checker.look_at_group(group)
        self._arm()

    def order(self, wanted: int | None = None, avoided: frozenset[str] | None = None) -> None:
        """What operators and the cluster want. It outlives the control plane."""
        if wanted is not None:
            self.wanted = wanted
            self.handle(v.ExpertRanksWanted(wanted))
        if avoided is not None:
            self.avoided = avoided
            self.handle(v.ExpertNodesAvoided(avoided))

    def _arm(self) -> None:
        self._version += 1
        due_s = None if self.group is None else self.group.next_tick_s
        if due_s is not None:
            self.world.context.clock.at(
                max(due_s, self.world.now_s) + TICK_AFTER_S, self._tick, self._version
            )

    def _tick(self, version: int) -> None:
        if version == self._version:
            self.handle(v.ExpertGroupTick())

    def _perform(self, action: v.ExpertGroupAction) -> None:
        world = self.world
        match action:
            case v.StartExpertRank(rank_id, ranks):
                world.start_rank(rank_id, ranks, action.avoid)
            case v.KillExpertRank(rank_id):
                world.kill_rank(rank_id)
            case v.TellExpertRank(rank_id, order):
                world.checker.ordered(rank_id, order)
                world.to_expert_rank(rank_id, order)
            case v.TellExpertCallers(update, caller):
                world.checker.announced(update)
                world.announce(update, caller)
