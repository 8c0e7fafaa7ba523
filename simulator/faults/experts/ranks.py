"""One process of an expert rank: what it holds, loads and computes."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.experts import (
    ExpertDropOrder,
    ExpertLoaded,
    ExpertLoadFailed,
    ExpertLoadOrder,
    ExpertRankBeat,
    ExpertRankHello,
    ExpertRankOrder,
    ExpertRankRef,
    ExpertRankReport,
    ExpertRankRetired,
)
from baton.core.ids import ExpertRankId
from simulator.faults.experts.rows import PostedRows, RowResults
from simulator.faults.experts.scenario import ExpertScenario, RankMoment

BEAT_S = 0.1
RECONNECT_S = 0.15
EXPERT_BYTES = 1


class RankSurroundings(Protocol):
    """What an expert rank has of the world."""

    @property
    def now_s(self) -> float: ...
    @property
    def scenario(self) -> ExpertScenario: ...
    @property
    def counts(self) -> Counter[str]: ...
    @property
    def group_name(self) -> str: ...

    def after(self, delay_s: float, call: Callable[[], None]) -> None: ...
    def open_stream(self) -> int | None: ...
    def from_rank(self, rank_id: ExpertRankId, stream: int, report: ExpertRankReport) -> None: ...
    def reached(self, rank: "SimExpertRank", moment: RankMoment) -> None: ...
    def rank_died(self, rank: "SimExpertRank", *, is_silent: bool) -> None: ...
    def load_s(self) -> float: ...
    def load_failure(self, order: ExpertLoadOrder) -> str: ...
    def to_caller(self, rank: "SimExpertRank", name: str, results: RowResults) -> None: ...


@dataclass(eq=False)
class SimExpertRank:
    world: RankSurroundings
    rank_id: ExpertRankId
    node: str
    slots: int
    is_alive: bool = True
    is_serving: bool = False
    """It has started."""
    stopped_s: float | None = None
    """Since when its process is stopped."""
    slow_factor: float = 1.0
    held: set[int] = field(default_factory=set[int])
    stream: int | None = None
    """Number of its stream to the control plane."""
    rows: int = 0
    busy_s: float = 0.0
    _orders: deque[ExpertLoadOrder] = field(default_factory=deque[ExpertLoadOrder])
    _is_loading: bool = False
    _waiting: list[PostedRows] = field(default_factory=list[PostedRows])
    _computing: list[PostedRows] = field(default_factory=list[PostedRows])
    _frozen: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    died_s: float = 0.0
    kills_lost: int = 0

    # --- its life -----------------------------------------------------------------------------------

    def act(self, call: Callable[[], None]) -> None:
        """Do something in the process: never if it is dead, and later if it is stopped."""
        if not self.is_alive:
            return
        if self.stopped_s is not None:
            self._frozen.append(call)
        else:
            call()

    def begin(self) -> None:
        self.is_serving = True
        self.connect()
        self._beat()

    def stop(self) -> None:
        if self.is_alive and self.stopped_s is None:
            self.stopped_s = self.world.now_s

    def go_on(self) -> None:
        if self.stopped_s is None:
            return
        self.stopped_s = None
        frozen, self._frozen = self._frozen, []
        for call in frozen:
            self.act(call)

    def heal(self) -> None:
        self.slow_factor = 1.0

    def die(self, *, is_silent: bool = False) -> None:
        """End. Peers hear of it at once unless the whole machine is gone."""
        if not self.is_alive:
            return
        self.is_alive, self.died_s = False, self.world.now_s
        self.world.rank_died(self, is_silent=is_silent)

    @property
    def seen_alive_s(self) -> float:
        """When a caller that is connected saw the last sign of life."""
        if not self.is_alive:
            return self.died_s
        return self.world.now_s if self.stopped_s is None else self.stopped_s

    @property
    def is_well(self) -> bool:
        return self.is_alive and self.is_serving and self.stopped_s is None

    # --- the control plane --------------------------------------------------------------------------

    def connect(self) -> None:
        """Open a stream, if there is a control plane; otherwise try again."""
        if self.stream is not None:
            return
        self.stream = self.world.open_stream()
        if self.stream is None:
            self.world.after(RECONNECT_S, lambda: self.act(self.connect))
            return
        scenario = self.world.scenario
        self._say(
            ExpertRankHello(
                ref=ExpertRankRef(self.rank_id, self.node, f"@{self.rank_id}", "", "secret"),
                group=self.world.group_name,
                node=self.node,
                pid=1,
                layer_count=scenario.layers,
                expert_count=scenario.experts,
                expert_bytes=EXPERT_BYTES,
                slots=self.slots,
                held=tuple(sorted(self.held)),
            )
        )

    def stream_broke(self) -> None:
        """Another control plane does not know of what is being loaded, so that it is given up."""
        self.stream = None
        self._orders.clear()
        self.world.after(RECONNECT_S, lambda: self.act(self.connect))

    def _say(self, report: ExpertRankReport) -> None:
        if self.stream is not None:
            self.world.from_rank(self.rank_id, self.stream, report)

    def _beat(self) -> None:
        self._say(ExpertRankBeat(self.rows, self.busy_s))
        self.world.after(BEAT_S, lambda: self.act(self._beat))

    def on_order(self, order: ExpertRankOrder) -> None:
        match order:
            case ExpertLoadOrder():
                self._orders.append(order)
                self._load_next()
            case ExpertDropOrder(expert):
                self.held.discard(expert)
                self._orders = deque(one for one in self._orders if one.expert != expert)
            case ExpertRankRetired():
                self.world.counts["expert ranks retired"] += 1
                self.die()

    # --- loads --------------------------------------------------------------------------------------

    def _load_next(self) -> None:
        if self._is_loading or not self._orders:
            return
        self._is_loading = True
        order = self._orders[0]
        self.world.reached(self, RankMoment.LOAD)
        duration_s = self.world.load_s()
        self.world.after(duration_s, lambda: self.act(lambda: self._loaded(order)))

    def _loaded(self, order: ExpertLoadOrder) -> None:
        self._is_loading = False
        if order in self._orders:  # otherwise it was told to drop it meanwhile
            self._orders.remove(order)
            if reason := self.world.load_failure(order):
                self._say(ExpertLoadFailed(order.load_id, order.expert, reason))
            else:
                self.held.add(order.expert)
                self._say(ExpertLoaded(order.load_id, order.expert))
        self._load_next()

    # --- rows ---------------------------------------------------------------------------------------

    def on_rows(self, posted: PostedRows) -> None:
        self._waiting.append(posted)
        if not self._computing:
            self._compute()

    def _compute(self) -> None:
        """Compute what waits of one layer in one product."""
        if not self._waiting:
            return
        layer = self._waiting[0].layer
        self._computing = [one for one in self._waiting if one.layer == layer]
        self._waiting = [one for one in self._waiting if one.layer != layer]
        self.world.reached(self, RankMoment.COMPUTE)
        rows = sum(len(one.pairs) for one in self._computing)
        duration_s = rows * self.world.scenario.row_s * self.slow_factor
        self.busy_s += duration_s
        self.world.after(duration_s, lambda: self.act(self._computed))

    def _computed(self) -> None:
        done, self._computing = self._computing, []
        for posted in done:
            missing = next((pair.expert for pair in posted.pairs if pair.expert not in self.held), None)
            self.rows += 0 if missing is not None else len(posted.pairs)
            results = RowResults(posted.link, posted.slot, self.rank_id, posted.pairs, missing)
            self.world.to_caller(self, posted.caller, results)
        self.world.reached(self, RankMoment.COMBINE)
        if self.is_alive:
            self._compute()

    def forget_link(self, caller: str, link: int) -> None:
        """Drop rows that wait for a connection that is closed."""
        self._waiting = [one for one in self._waiting if (one.caller, one.link) != (caller, link)]
