"""The processes of one expert group, the streams and links between them, and what time everything takes."""

from collections import Counter
from collections.abc import Callable, Sequence

from baton.core.experts import (
    ExpertCallerReport,
    ExpertLoadOrder,
    ExpertMapUpdate,
    ExpertRankOrder,
    ExpertRankReport,
    group_name,
)
from baton.core.ids import ExpertRankId
from control_plane.experts import group_values as v
from simulator.faults.experts.callers import SimExpertCaller
from simulator.faults.experts.checks import ExpertChecker
from simulator.faults.experts.control import SimExpertControl
from simulator.faults.experts.ranks import SimExpertRank
from simulator.faults.experts.rows import PostedRows, RowResults
from simulator.faults.experts.scenario import ExpertScenario, RankMoment
from simulator.faults.run_context import RunContext

EXIT_S = (0.02, 0.3)
"""Time after a process's end at which the cluster knows it."""
NODE_EXIT_S = (0.5, 1.5)
RESTART_S = (0.3, 1.5)
CONNECT_TIMEOUT_S = 0.5
START_FAILURE, LOAD_FAILURE, KILL_LOST = 0.4, 0.3, 0.4
"""Chances, where the fault is drawn."""
KILLS_LOST_MAX = 2
"""A process that outlives more orders to kill it counts as ended at some time, and stays."""

Strike = Callable[[SimExpertRank], None]


class ExpertWorld:
    def __init__(self, context: RunContext, scenario: ExpertScenario) -> None:
        self.context, self.scenario = context, scenario
        self.counts: Counter[str] = context.counts
        self.group_name = group_name("sim", "decode")
        self._rng = context.stream("expert world")
        self._rows_rng = context.stream("expert rows")
        self.checker = ExpertChecker(self)
        self.control = SimExpertControl(self)
        self.ranks: dict[ExpertRankId, SimExpertRank] = {}
        """Processes that exist, and those whose end the cluster does not know yet."""
        self.callers: dict[str, SimExpertCaller] = {}
        self.is_calm = False
        self._armed: list[tuple[RankMoment, Strike]] = []
        self._streams = self._numbers = self._caller_number = self._started = 0
        self._last_s: dict[tuple[str, str], float] = {}
        """Arrival of the last message by its direction: messages of one stream keep their order."""
        self._stalls: dict[tuple[str, ExpertRankId], tuple[float, float]] = {}
        """Links that deliver nothing: from when, until when."""

    # --- time and chance ----------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self.context.clock.now_s

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.context.clock.after(delay_s, call)

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def open_stream(self) -> int | None:
        """Return the number of a new stream to the control plane; None if there is none."""
        if not self.control.is_up:
            return None
        self._streams += 1
        return self._streams

    def think_s(self) -> float:
        return self.scenario.think_s * self._rng.uniform(0.5, 1.5)

    def load_s(self) -> float:
        return self.scenario.load_s * self._rng.uniform(0.5, 1.5)

    def choose(self, links: Sequence[int]) -> int:
        return self._rows_rng.choice(links)

    def draw_rows(self, layer: int) -> list[list[int]]:
        """Return the experts of each row; low numbers are popular, and after a while others."""
        scenario, rng = self.scenario, self._rows_rng
        shift = int(self.now_s / 3.0)
        rows: list[list[int]] = []
        for _ in range(rng.randint(1, scenario.tokens_max)):
            chosen: set[int] = set()
            while len(chosen) < scenario.experts_used:
                drawn = min(rng.randrange(scenario.experts), rng.randrange(scenario.experts))
                chosen.add((drawn + shift) % scenario.experts)
            rows.append([layer * scenario.experts + expert for expert in sorted(chosen)])
        return rows

    def _send(self, sender: str, receiver: str, call: Callable[[], None], *, more_s: float = 0.0) -> None:
        """Deliver in order."""
        delay_s = self.scenario.latency_s * self._rng.uniform(0.5, 1.5) + more_s
        at_s = max(self._last_s.get((sender, receiver), 0.0), self.now_s + delay_s)
        self._last_s[sender, receiver] = at_s
        self.context.clock.at(at_s, call)

    # --- streams to the control plane ---------------------------------------------------------------

    def from_rank(self, rank_id: ExpertRankId, stream: int, report: ExpertRankReport) -> None:
        event, life = v.ExpertRankSaid(rank_id, stream, report), self.control.lives
        self._send(rank_id, "control", lambda: self._hear(event, life))

    def from_caller(self, name: str, stream: int, report: ExpertCallerReport) -> None:
        event, life = v.ExpertCallerSaid(name, stream, report), self.control.lives
        self.context.note(name, report)
        self._send(name, "control", lambda: self._hear(event, life))

    def _hear(self, event: v.ExpertGroupEvent, life: int) -> None:
        if life == self.control.lives:
            self.control.handle(event)

    def to_expert_rank(self, rank_id: ExpertRankId, order: ExpertRankOrder) -> None:
        rank = self.ranks.get(rank_id)
        self.context.note(rank_id, order)
        if rank is None or rank.stream is None:
            return
        stream = rank.stream

        def deliver() -> None:
            if rank.stream == stream:
                rank.act(lambda: rank.on_order(order))

        self._send("control", rank_id, deliver)

    def announce(self, update: ExpertMapUpdate, only: str | None) -> None:
        self.counts["expert maps announced"] += 1
        self.context.note("control", update)
        for caller in list(self.callers.values()):
            if caller.stream is not None and only in (None, caller.name):
                self._send_map(caller, caller.stream, update)

    def _send_map(self, caller: SimExpertCaller, stream: int, update: ExpertMapUpdate) -> None:
        late_s = 0.0
        if "maps_late" in self.scenario.faults and not self.is_calm and self._rng.random() < 0.3:
            late_s = self._rng.uniform(0.05, 0.8)
            self.counts["expert maps late"] += 1

        def deliver() -> None:
            if caller.is_alive and caller.stream == stream:
                caller.on_map(update)

        self._send("control", caller.name, deliver, more_s=late_s)

    def break_stream(self, one: SimExpertRank | SimExpertCaller) -> None:
        """Both ends hear that a stream is over."""
        stream = one.stream
        if stream is None:
            return
        if isinstance(one, SimExpertRank):
            event: v.ExpertGroupEvent = v.ExpertRankHungUp(one.rank_id, stream)
            one.stream = None
            one.act(one.stream_broke)
            name: str = one.rank_id
        else:
            event, name = v.ExpertCallerHungUp(one.name, stream), one.name
            one.stream_broke()
        life = self.control.lives
        self._send(name, "control", lambda: self._hear(event, life))

    # --- links between callers and ranks ------------------------------------------------------------

    def connect(self, caller: SimExpertCaller, link: int, rank_id: ExpertRankId) -> None:
        def decide() -> None:
            rank = self.ranks.get(rank_id)
            if rank is None or not rank.is_alive:
                caller.not_connected(link, rank_id, "connection refused", is_gone=True)
            elif rank.stopped_s is not None or self.is_stalled(caller, rank):
                late = "timed out"
                self.after(
                    CONNECT_TIMEOUT_S, lambda: caller.not_connected(link, rank_id, late, is_gone=False)
                )
            else:
                caller.connected(link, rank)

        self.after(2 * self.scenario.latency_s, decide)

    def to_rank(self, caller: SimExpertCaller, rank: SimExpertRank, posted: PostedRows) -> None:
        self.reached(rank, RankMoment.DISPATCH)
        delay_s = self._link_delay_s(caller, rank)
        self._send(
            f"{caller.name}/{posted.link}",
            rank.rank_id,
            lambda: rank.act(lambda: rank.on_rows(posted)),
            more_s=delay_s,
        )

    def to_caller(self, rank: SimExpertRank, name: str, results: RowResults) -> None:
        caller = self.callers.get(name)
        if caller is None:
            return
        delay_s = self._link_delay_s(caller, rank)

        def deliver() -> None:
            if caller.is_alive:
                caller.on_results(results)

        self._send(rank.rank_id, f"{name}/{results.link}", deliver, more_s=delay_s)

    def last_beat_s(self, caller: SimExpertCaller, rank: SimExpertRank) -> float:
        """When a caller saw the last sign of life of a rank that it is connected to."""
        stall = self._stalls.get((caller.name, rank.rank_id))
        seen_s = rank.seen_alive_s
        return min(seen_s, stall[0]) if stall is not None and self.now_s < stall[1] else seen_s

    def is_stalled(self, caller: SimExpertCaller, rank: SimExpertRank) -> bool:
        stall = self._stalls.get((caller.name, rank.rank_id))
        return stall is not None and self.now_s < stall[1]

    def _link_delay_s(self, caller: SimExpertCaller, rank: SimExpertRank) -> float:
        stall = self._stalls.get((caller.name, rank.rank_id))
        return max(0.0, stall[1] - self.now_s) if stall is not None else 0.0

    def stall_link(self, caller: SimExpertCaller, rank: SimExpertRank, for_s: float) -> None:
        self._stalls[caller.name, rank.rank_id] = (self.now_s, self.now_s + for_s)

    # --- processes ----------------------------------------------------------------------------------

    def start_rank(self, rank_id: ExpertRankId, ranks: int, avoid: Sequence[str]) -> None:
        nodes = [f"node-{number}" for number in range(self.scenario.nodes)]
        able = [node for node in nodes if node not in avoid] or nodes
        self._started += 1
        node = able[self._started % len(able)]
        rank = self.ranks[rank_id] = SimExpertRank(self, rank_id, node, self.scenario.slots(ranks))
        start_s = self.scenario.start_s * self._rng.uniform(0.7, 1.3)
        fails = "start_fails" in self.scenario.faults and not self.is_calm
        if fails and self._rng.random() < START_FAILURE:
            self.counts["expert ranks that did not start"] += 1
            self.after(start_s, rank.die)
        else:
            self.after(start_s, lambda: rank.act(rank.begin))

    def kill_rank(self, rank_id: ExpertRankId) -> None:
        self.counts["expert ranks ended by the control plane"] += 1
        rank = self.ranks.get(rank_id)
        if rank is None:
            return
        is_lost = "kills_lost" in self.scenario.faults and not self.is_calm
        if is_lost and rank.kills_lost < KILLS_LOST_MAX and self._rng.random() < KILL_LOST:
            rank.kills_lost += 1
            self.counts["expert ranks' kills lost"] += 1
            return
        if rank.is_alive:
            self.after(self.scenario.latency_s, rank.die)
        else:
            self._exit(rank, EXIT_S)

    def rank_died(self, rank: SimExpertRank, *, is_silent: bool) -> None:
        self.checker.something_happened()
        stream, rank.stream, life = rank.stream, None, self.control.lives
        if not is_silent:
            if stream is not None:
                hung_up = v.ExpertRankHungUp(rank.rank_id, stream)
                self._send(rank.rank_id, "control", lambda: self._hear(hung_up, life))
            for caller in self.callers.values():
                for link, opened in list(caller.open.items()):
                    if opened.rank is rank:
                        self._hang_up(rank, caller, link)
        self._exit(rank, NODE_EXIT_S if is_silent else EXIT_S)

    def _hang_up(self, rank: SimExpertRank, caller: SimExpertCaller, link: int) -> None:
        """What the rank had sent arrives before the end of the connection."""
        gone = "its process closed the connection"
        delay_s = self._link_delay_s(caller, rank)
        self._send(
            rank.rank_id,
            f"{caller.name}/{link}",
            lambda: caller.fail(link, gone, is_gone=True),
            more_s=delay_s,
        )

    def _exit(self, rank: SimExpertRank, span_s: tuple[float, float]) -> None:
        def known() -> None:
            self.ranks.pop(rank.rank_id, None)
            self.control.handle(v.ExpertRankExited(rank.rank_id, "its process ended"))

        self.after(self._rng.uniform(*span_s), known)

    def add_caller(self) -> None:
        self._caller_number += 1
        name = f"decode-{self._caller_number}.0/0"
        caller = self.callers[name] = SimExpertCaller(self, name)
        caller.begin()

    def caller_died(self, caller: SimExpertCaller) -> None:
        stream, caller.stream, life = caller.stream, None, self.control.lives
        del self.callers[caller.name]
        for link, opened in caller.open.items():
            opened.rank.forget_link(caller.name, link)
        if stream is not None:
            event = v.ExpertCallerHungUp(caller.name, stream)
            self._send(caller.name, "control", lambda: self._hear(event, life))
        self.after(0.5, self.add_caller)

    def crash_control(self) -> None:
        if not self.control.is_up:
            return
        self.counts["expert control planes restarted"] += 1
        self.checker.something_happened()
        self.control.crash()
        for one in (*self.ranks.values(), *self.callers.values()):
            if one.stream is not None:
                one.stream = None
                if isinstance(one, SimExpertRank):
                    one.act(one.stream_broke)
                else:
                    one.stream_broke()
        self.after(self._rng.uniform(*RESTART_S), self.control.begin)

    def load_failure(self, order: ExpertLoadOrder) -> str:
        """Return why a load fails; empty: it does not."""
        if "load_fails" in self.scenario.faults and not self.is_calm and self._rng.random() < LOAD_FAILURE:
            self.counts["expert loads failed"] += 1
            self.checker.something_happened()
            return "the file cannot be read"
        if order.source is None:
            return ""
        source = self.ranks.get(order.source.rank_id)
        if source is None or not source.is_well or order.expert not in source.held:
            self.counts["expert loads whose source was gone"] += 1
            return "the source does not answer"
        return ""

    # --- strikes ------------------------------------------------------------------------------------

    def arm(self, moment: RankMoment, strike: Strike) -> None:
        """Strike the first rank that reaches this moment."""
        self._armed.append((moment, strike))

    def reached(self, rank: SimExpertRank, moment: RankMoment) -> None:
        for one in self._armed:
            if one[0] is moment and rank.is_well and not self.is_calm:
                self._armed.remove(one)
                self.counts[f"expert ranks struck while {moment}"] += 1
                self.context.note(rank.rank_id, f"struck while {moment}")
                one[1](rank)
                return
