"""Processes of expert ranks and callers around one pure `ExpertRankGroup`, under virtual time."""

from dataclasses import dataclass, field

from baton.core.experts import (
    ExpertCallerHello,
    ExpertCountsReport,
    ExpertDropOrder,
    ExpertEpochUsed,
    ExpertLoaded,
    ExpertLoadFailed,
    ExpertLoadOrder,
    ExpertRankBeat,
    ExpertRankHello,
    ExpertRankRef,
    ExpertRankRetired,
    ExpertRankSuspected,
)
from control_plane.experts import group_values as v
from control_plane.experts.group import ExpertRankGroup
from control_plane.experts.group_state import group_state
from control_plane.reconcile_events import RestartPolicy

LAYERS, EXPERTS, BYTES = 2, 8, 1000
RESTART = RestartPolicy(
    backoff_s=0.5, backoff_max_s=8.0, start_timeout_s=60.0, drain_timeout_s=10.0, stable_s=5.0
)


def policy(**settings):
    defaults = {"restart": RESTART, "replicas": 1.0, "rebalance_s": 30.0, "gain_min": 0.05}
    return v.ExpertGroupPolicy(**{**defaults, "half_life_s": 60.0, "bytes_per_s": 1e12, **settings})


@dataclass
class Process:
    rank_id: str
    slots: int
    node: str
    state: str = "starting"
    """starting, running, stopped or dead."""
    stream: int = 0
    held: set = field(default_factory=set)
    orders: list = field(default_factory=list)
    rows: int = 0
    busy_s: float = 0.0
    row_s: float = 0.001
    is_exit_known: bool = False


@dataclass
class Caller:
    name: str
    stream: int
    maps: dict = field(default_factory=dict)
    """Maps that it may still use, by epoch."""
    is_open: bool = True

    @property
    def newest(self):
        return max(self.maps, default=0)


class World:
    """`step` lets the time go on. Orders and reports arrive at once unless a test holds them back."""

    def __init__(self, wanted=4, *, replicas=1.0, nodes=2, life="a", slots_max=0, **settings):
        """slots_max: of all ranks, or by the number in their name; 0: they have memory for all experts."""
        self.slots_max, self.full = slots_max, ""
        self.policy = policy(replicas=replicas, **settings)
        self.mean_replicas, self.nodes = replicas, nodes
        self.now_s, self.streams = 0.0, 0
        self.processes: dict[str, Process] = {}
        self.callers: dict[str, Caller] = {}
        self.log, self.hung_up = [], []
        self.restart(life)
        self.send(v.ExpertRanksWanted(wanted))

    def restart(self, life):
        """A control plane that knows nothing."""
        self.group = ExpertRankGroup("decode of m", "experts-decode", self.policy, life=life)
        for caller in self.callers.values():
            caller.is_open = False

    # --- the control plane's side ---------------------------------------------------------------------

    def send(self, event):
        actions = self.group.handle(event, now_s=self.now_s)
        for action in actions:
            self.log.append(action)
            self.perform(action)
        return actions

    def perform(self, action):
        match action:
            case v.StartExpertRank(rank_id, ranks):
                slots = -int(-EXPERTS * self.mean_replicas // ranks)
                node = f"n{len(self.processes) % self.nodes}"
                self.processes[rank_id] = Process(rank_id, slots, node)
            case v.KillExpertRank(rank_id):
                self.processes[rank_id].state = "dead"
            case v.TellExpertRank(rank_id, order):
                self.tell(self.processes[rank_id], order)
            case v.TellExpertCallers(update, caller):
                self.announce(update, caller)

    def tell(self, process, order):
        match order:
            case ExpertLoadOrder():
                assert process.state in ("running", "stopped", "dead"), "only ranks that said hello load"
                assert order.expert not in process.held
                process.orders.append(order)
            case ExpertDropOrder(expert):
                for caller in self.callers.values():
                    for epoch, ranks in caller.maps.items():
                        named = ranks.get(process.rank_id, ())
                        assert expert not in named, f"{caller.name} may use epoch {epoch}"
                process.held.discard(expert)
                process.orders = [one for one in process.orders if one.expert != expert]
            case ExpertRankRetired():
                if process.state != "stopped":
                    process.state = "dead"
                    self.hung_up.append((process.rank_id, process.stream))

    def announce(self, update, only):
        ranks = {one.ref.rank_id: set(one.experts) for one in update.ranks}
        for rank_id, experts in ranks.items():
            process = self.processes[rank_id]
            assert experts <= process.held or process.state == "dead", "a map names what no rank holds"
        for caller in self.callers.values():
            if caller.is_open and only in (None, caller.name):
                assert update.epoch > caller.newest or update.epoch in caller.maps
                caller.maps[update.epoch] = ranks

    # --- ranks ----------------------------------------------------------------------------------------

    def stream(self):
        self.streams += 1
        return self.streams

    def hello(self, rank_id):
        process = self.processes[rank_id]
        process.state, process.stream = "running", self.stream()
        ref = ExpertRankRef(rank_id, "host", f"@{rank_id}", "h:1", "s")
        number = int(rank_id.partition(".")[0].rpartition("-")[2])
        most = self.slots_max if isinstance(self.slots_max, int) else self.slots_max[number]
        hello = ExpertRankHello(
            *(ref, "decode of m", process.node, 1, LAYERS, EXPERTS, BYTES, process.slots),
            *(tuple(process.held), 1, most),
        )
        return self.send(v.ExpertRankSaid(rank_id, process.stream, hello))

    def answer(self, process, order, reason=""):
        process.orders.remove(order)
        if reason or self.full:
            said = ExpertLoadFailed(order.load_id, order.expert, reason or self.full, bool(self.full))
        else:
            process.held.add(order.expert)
            said = ExpertLoaded(order.load_id, order.expert)
        self.send(v.ExpertRankSaid(process.rank_id, process.stream, said))

    def kill(self, rank_id):
        """The process dies, which its stream's end shows at once."""
        process = self.processes[rank_id]
        process.state = "dead"
        self.send(v.ExpertRankHungUp(rank_id, process.stream))

    def beat(self):
        for process in list(self.processes.values()):
            if process.state == "running":
                beat = ExpertRankBeat(process.rows, process.busy_s)
                self.send(v.ExpertRankSaid(process.rank_id, process.stream, beat))

    # --- callers --------------------------------------------------------------------------------------

    def join(self, name):
        """A caller connects, or connects anew."""
        caller = self.callers.setdefault(name, Caller(name, 0))
        caller.stream, caller.is_open = self.stream(), True
        hello = ExpertCallerHello(name, name, "decode of m", min(caller.maps, default=0))
        self.send(v.ExpertCallerSaid(name, caller.stream, hello))
        return caller

    def say(self, name, report):
        self.send(v.ExpertCallerSaid(name, self.callers[name].stream, report))

    def use_newest(self, name):
        caller = self.callers[name]
        if len(caller.maps) > 1:
            caller.maps = {caller.newest: caller.maps[caller.newest]}
            if caller.is_open:
                self.say(name, ExpertEpochUsed(caller.newest))

    def suspect(self, name, rank_id, *, is_gone=False):
        self.say(name, ExpertRankSuspected(rank_id, is_gone, "no answer"))

    def count(self, name, counts):
        self.say(name, ExpertCountsReport(LAYERS, EXPERTS, tuple(counts)))

    def hang_up(self, name):
        caller = self.callers[name]
        caller.is_open = False
        self.send(v.ExpertCallerHungUp(name, caller.stream))

    # --- time -----------------------------------------------------------------------------------------

    def settle(self):
        """Everything that is on its way arrives."""
        while self.hung_up:
            self.send(v.ExpertRankHungUp(*self.hung_up.pop()))
        for process in list(self.processes.values()):
            if process.state == "starting":
                self.hello(process.rank_id)
            if process.state == "dead":
                self.exit(process)
        while orders := [(p, o) for p in self.processes.values() if p.state == "running" for o in p.orders]:
            self.answer(*orders[0])
            for name in self.callers:
                self.use_newest(name)
        for name in self.callers:
            self.use_newest(name)

    def exit(self, process):
        del self.processes[process.rank_id]
        self.send(v.ExpertRankExited(process.rank_id, "its process died"))

    def tick(self, after_s):
        self.now_s += after_s
        self.send(v.ExpertGroupTick())
        due_s = self.group.next_tick_s
        assert due_s is None or due_s > self.now_s, "ticks would follow one another without end"

    def run(self, for_s, every_s=0.1):
        """Whatever is ordered is done at once, and ranks beat."""
        for _ in range(round(for_s / every_s)):
            self.settle()
            self.beat()
            self.tick(every_s)
        self.settle()

    # --- what is seen ---------------------------------------------------------------------------------

    def state(self):
        return group_state(self.group, model="m", role="decode", now_s=self.now_s)

    def live(self):
        return sorted(p.rank_id for p in self.processes.values() if p.state == "running")

    def replicas(self, name):
        """Ranks by expert in the newest map of a caller."""
        caller = self.callers[name]
        found = {n: [] for n in range(LAYERS * EXPERTS)}
        for rank_id, experts in caller.maps.get(caller.newest, {}).items():
            for expert in experts:
                found[expert].append(rank_id)
        return found
