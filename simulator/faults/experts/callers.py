"""One caller: it sends rows to expert ranks as its routes say, and waits for their results.

What `engine.experts.caller` does around the routes is done here: rows of a link that is closed are sent by
another one, rows without a rank wait for the next map and park the caller, ranks without a sign of life are
left out.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.experts import (
    ExpertCallerHello,
    ExpertCallerReport,
    ExpertCountsReport,
    ExpertEpochUsed,
    ExpertMapUpdate,
    ExpertRankSuspected,
)
from baton.core.ids import ExpertRankId, WorkerId
from engine.scheduling.expert_parking import ExpertParking
from engine.scheduling.expert_routes import (
    CloseExpertRank,
    ConnectExpertRank,
    ExpertRoutes,
    RouteAction,
)
from simulator.faults.experts.ranks import SimExpertRank
from simulator.faults.experts.rows import PostedRows, RowPair, RowResults
from simulator.faults.experts.scenario import ExpertScenario

WATCH_S = 0.05
COUNTS_S = 0.5
RECONNECT_S = 0.2


@dataclass(slots=True, eq=False)
class PieceOnLink:
    """Rows in a slot of a link."""

    dispatch: "ExpertDispatch"
    pairs: tuple[RowPair, ...]
    epoch: int
    posted_s: float


@dataclass(slots=True, eq=False)
class OpenExpertLink:
    rank: SimExpertRank
    slots: dict[int, PieceOnLink] = field(default_factory=dict[int, PieceOnLink])

    def free_slot(self) -> int:
        return next(number for number in range(len(self.slots) + 1) if number not in self.slots)


@dataclass(slots=True, eq=False)
class ExpertDispatch:
    """Rows of one layer, until all have results."""

    number: int
    lane: int
    layer: int
    epoch: int
    began_s: float
    pairs: frozenset[RowPair]
    results: dict[RowPair, ExpertRankId] = field(default_factory=dict[RowPair, ExpertRankId])
    unserved: list[RowPair] = field(default_factory=list[RowPair])
    """Rows that no rank can be sent."""
    unserved_since_s: float | None = None


class CallerChecks(Protocol):
    """The checks of what a caller does."""

    def suspected(self, rank_id: ExpertRankId, *, is_gone: bool) -> None: ...
    def posted(
        self, caller: "SimExpertCaller", rank: SimExpertRank, pairs: tuple[RowPair, ...], epoch: int
    ) -> None: ...
    def accepted(
        self, caller: "SimExpertCaller", dispatch: ExpertDispatch, piece: PieceOnLink, results: RowResults
    ) -> None: ...
    def done(self, caller: "SimExpertCaller", dispatch: ExpertDispatch) -> None: ...
    def look_at(self, caller: "SimExpertCaller") -> None: ...


class CallerSurroundings(Protocol):
    """What a caller has of the world."""

    @property
    def now_s(self) -> float: ...
    @property
    def scenario(self) -> ExpertScenario: ...
    @property
    def counts(self) -> Counter[str]: ...
    @property
    def group_name(self) -> str: ...
    @property
    def is_calm(self) -> bool: ...
    @property
    def checker(self) -> CallerChecks: ...

    def after(self, delay_s: float, call: Callable[[], None]) -> None: ...
    def open_stream(self) -> int | None: ...
    def from_caller(self, name: str, stream: int, report: ExpertCallerReport) -> None: ...
    def caller_died(self, caller: "SimExpertCaller") -> None: ...
    def connect(self, caller: "SimExpertCaller", link: int, rank_id: ExpertRankId) -> None: ...
    def last_beat_s(self, caller: "SimExpertCaller", rank: SimExpertRank) -> float: ...
    def to_rank(self, caller: "SimExpertCaller", rank: SimExpertRank, posted: PostedRows) -> None: ...
    def next_number(self) -> int: ...
    def draw_rows(self, layer: int) -> list[list[int]]: ...
    def choose(self, links: Sequence[int]) -> int: ...
    def think_s(self) -> float: ...


@dataclass(eq=False)
class SimExpertCaller:
    world: CallerSurroundings
    name: str
    is_alive: bool = True
    stream: int | None = None
    maps: dict[int, dict[ExpertRankId, frozenset[int]]] = field(
        default_factory=dict[int, dict[ExpertRankId, frozenset[int]]]
    )
    """Experts by rank of every map that it has used."""
    stream_since_s: float = 0.0
    """Since when its stream is open, or closed."""
    hello_epoch: int = 0
    """The epoch that it said it uses. Dispatches that began by earlier ones are not spoken of."""
    steps: int = 0
    open: dict[int, OpenExpertLink] = field(default_factory=dict[int, OpenExpertLink])
    dispatches: dict[int, ExpertDispatch] = field(default_factory=dict[int, ExpertDispatch])
    _counts: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        scenario = self.world.scenario
        self.routes = ExpertRoutes(scenario.layers, scenario.experts, retry_s=scenario.answer_timeout_s)
        self.parking = ExpertParking(scenario.park_after_s)
        self._counts = [0] * scenario.expert_total

    def begin(self) -> None:
        self.connect()
        for lane in range(self.world.scenario.lanes):
            self._step(lane)
        self._watch()
        self._report_counts()

    def die(self) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        self.world.counts["expert callers gone in mid-dispatch"] += bool(self.dispatches)
        self.world.caller_died(self)

    # --- the control plane --------------------------------------------------------------------------

    def connect(self) -> None:
        if not self.is_alive or self.stream is not None:
            return
        self.stream = self.world.open_stream()
        if self.stream is None:
            self.world.after(RECONNECT_S, self.connect)
            return
        self.stream_since_s, self.hello_epoch = self.world.now_s, self.routes.epoch
        self._say(ExpertCallerHello(self.name, WorkerId(self.name), self.world.group_name, self.routes.epoch))

    def stream_broke(self) -> None:
        self.stream, self.stream_since_s = None, self.world.now_s
        self.world.after(RECONNECT_S, self.connect)

    def _say(self, report: ExpertCallerReport) -> None:
        if self.stream is not None:
            self.world.from_caller(self.name, self.stream, report)

    def on_map(self, update: ExpertMapUpdate) -> None:
        before = self.routes.epoch
        actions = self.routes.on_map(update, now_s=self.world.now_s)
        if self.routes.epoch != before:
            self.world.counts["expert maps taken"] += 1
            self.world.counts["expert maps taken in mid-dispatch"] += bool(self.dispatches)
            self.maps[update.epoch] = {one.ref.rank_id: frozenset(one.experts) for one in update.ranks}
        self._do(actions)
        self._serve_waiting()

    @property
    def epochs_in_use(self) -> set[int]:
        return {self.routes.epoch, *(one.epoch for one in self.dispatches.values())} - {0}

    def _report_counts(self) -> None:
        if not self.is_alive:
            return
        scenario = self.world.scenario
        if any(self._counts) and not self.world.is_calm:  # at the end nothing is to be balanced any more
            self._say(ExpertCountsReport(scenario.layers, scenario.experts, tuple(self._counts)))
            self._counts = [0] * scenario.expert_total
        self.world.after(COUNTS_S, self._report_counts)

    # --- links --------------------------------------------------------------------------------------

    def _do(self, actions: Sequence[RouteAction]) -> None:
        for action in actions:
            match action:
                case ConnectExpertRank(link, ref):
                    self.world.connect(self, link, ref.rank_id)
                case CloseExpertRank(link):
                    self._close(link)
                case ExpertRankSuspected(rank_id):
                    self.world.counts["expert ranks suspected"] += 1
                    self.world.checker.suspected(rank_id, is_gone=action.is_gone)
                    self._say(action)
                case ExpertEpochUsed():
                    self._say(action)

    def connected(self, link: int, rank: SimExpertRank) -> None:
        if self.is_alive and self.routes.is_current(rank.rank_id, link):
            self.open[link] = OpenExpertLink(rank)
            self.routes.on_connected(rank.rank_id, link)
            self._serve_waiting()

    def not_connected(self, link: int, rank_id: ExpertRankId, reason: str, *, is_gone: bool) -> None:
        if self.is_alive:
            now_s = self.world.now_s
            self._do(self.routes.on_failed(rank_id, link, reason, is_gone=is_gone, now_s=now_s))

    def fail(self, link: int, reason: str, *, is_gone: bool) -> None:
        """Leave a rank out that does not answer."""
        opened = self.open.get(link)
        if opened is None or not self.is_alive:
            return
        now_s = self.world.now_s
        self._do(self.routes.on_failed(opened.rank.rank_id, link, reason, is_gone=is_gone, now_s=now_s))
        self._close(link)
        self._serve_waiting()

    def _close(self, link: int) -> None:
        opened = self.open.pop(link, None)
        if opened is None:
            return
        opened.rank.forget_link(self.name, link)
        for piece in opened.slots.values():
            self.world.counts["expert rows sent again"] += len(piece.pairs)
            self._wait(piece.dispatch, piece.pairs)
        self._serve_waiting()

    def _watch(self) -> None:
        if not self.is_alive:
            return
        now_s, scenario = self.world.now_s, self.world.scenario
        for link, opened in list(self.open.items()):
            silent_s = now_s - self.world.last_beat_s(self, opened.rank)
            late_s = now_s - min((piece.posted_s for piece in opened.slots.values()), default=now_s)
            if silent_s > scenario.answer_timeout_s:
                self.fail(link, "no sign of life", is_gone=False)
            elif late_s > scenario.compute_timeout_s:
                self.world.counts["expert ranks left out for being late"] += 1
                self.fail(link, "it did not answer", is_gone=False)
        due_s = self.routes.next_tick_s
        if due_s is not None and due_s <= now_s:
            self._do(self.routes.tick(now_s=now_s))
        self._look_at_parking(now_s)
        self.world.checker.look_at(self)
        self.world.after(WATCH_S, self._watch)

    def _look_at_parking(self, now_s: float) -> None:
        if self.rows_wait:
            self.parking.rows_wait(now_s=now_s)
        else:
            self.parking.rows_are_sent(now_s=now_s)
        has_ranks, is_complete = bool(len(self.routes.table.links)), self.routes.is_complete
        if self.parking.look(has_ranks=has_ranks, is_complete=is_complete, now_s=now_s):
            what = "parked" if self.parking.is_parked else "parked no more"
            self.world.counts[f"expert callers {what}"] += 1

    @property
    def rows_wait(self) -> bool:
        """Whether rows of some dispatch wait for an expert that no rank holds."""
        return any(one.unserved for one in self.dispatches.values())

    # --- steps --------------------------------------------------------------------------------------

    def _step(self, lane: int) -> None:
        """Begin the next step of a lane, as soon as every expert has had a rank once."""
        if not self.is_alive:
            return
        if self.routes.epoch == 0 or (not self.steps and not self.routes.is_complete):
            self.world.after(WATCH_S, lambda: self._step(lane))
        else:
            self._dispatch(lane, 0)

    def _dispatch(self, lane: int, layer: int) -> None:
        number = self.world.next_number()
        rows = self.world.draw_rows(layer)
        pairs = frozenset(
            RowPair(number, row, expert) for row, chosen in enumerate(rows) for expert in chosen
        )
        for pair in pairs:
            self._counts[pair.expert] += 1
        epoch = self.routes.on_dispatch()
        dispatch = ExpertDispatch(number, lane, layer, epoch, self.world.now_s, pairs)
        self.dispatches[number] = dispatch
        self._wait(dispatch, sorted(pairs))
        self._serve(dispatch)

    def _wait(self, dispatch: ExpertDispatch, pairs: Sequence[RowPair]) -> None:
        dispatch.unserved += [pair for pair in pairs if pair not in dispatch.results]

    def _serve_waiting(self) -> None:
        for dispatch in list(self.dispatches.values()):
            if dispatch.unserved:
                self._serve(dispatch)

    def _serve(self, dispatch: ExpertDispatch) -> None:
        """Send what has no results and is not on its way, by the present table."""
        table = self.routes.table
        by_link: dict[int, list[RowPair]] = {}
        left: list[RowPair] = []
        for pair in dispatch.unserved:
            links = table.links[table.starts[pair.expert] : table.starts[pair.expert + 1]].tolist()
            if links:
                by_link.setdefault(self.world.choose(links), []).append(pair)
            else:
                left.append(pair)
        dispatch.unserved = left
        if not left:
            dispatch.unserved_since_s = None
        else:
            if dispatch.unserved_since_s is None:
                dispatch.unserved_since_s = self.world.now_s
                self.world.counts["expert rows that waited for a rank"] += len(left)
            dispatch.epoch, actions = self.routes.on_waiting(dispatch.epoch)
            self._do(actions)
        for link, pairs in by_link.items():
            self._post(dispatch, link, tuple(pairs), table.epoch)

    def _post(self, dispatch: ExpertDispatch, link: int, pairs: tuple[RowPair, ...], epoch: int) -> None:
        opened = self.open[link]
        slot = opened.free_slot()
        opened.slots[slot] = PieceOnLink(dispatch, pairs, epoch, self.world.now_s)
        self.world.checker.posted(self, opened.rank, pairs, epoch)
        self.world.to_rank(self, opened.rank, PostedRows(self.name, link, slot, dispatch.layer, pairs))

    def on_results(self, results: RowResults) -> None:
        """Take what lies in a slot. Nobody looks at slots of links that are closed."""
        opened = self.open.get(results.link)
        piece = None if opened is None else opened.slots.pop(results.slot, None)
        if piece is None:
            self.world.counts["expert results of closed links"] += 1
            return
        dispatch = piece.dispatch
        if results.refused is not None:
            self.world.counts["expert rows refused"] += 1
            self.routes.on_refused(results.rank_id, results.refused)
            self._wait(dispatch, piece.pairs)
            self._serve(dispatch)
            return
        self.world.checker.accepted(self, dispatch, piece, results)
        for pair in results.pairs:
            dispatch.results[pair] = results.rank_id
        if len(dispatch.results) == len(dispatch.pairs):
            self._done(dispatch)

    def _done(self, dispatch: ExpertDispatch) -> None:
        del self.dispatches[dispatch.number]
        self.world.checker.done(self, dispatch)
        self._do(self.routes.on_dispatched(dispatch.epoch))
        scenario = self.world.scenario
        if dispatch.layer + 1 < scenario.layers:
            self._dispatch(dispatch.lane, dispatch.layer + 1)
            return
        self.steps += 1
        self.world.counts["expert steps"] += 1
        self.world.after(self.world.think_s(), lambda: self._step(dispatch.lane))
