"""Two or more WorkerCores joined by plain functions: no network, no torch, time by hand.

The fake model's next token is a hash of all tokens before it *as read from block contents*, so a wrong
block, a stale read or a missing position shows as a wrong token.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from baton.config import EngineConfig, StoreConfig, TransferConfig
from baton.core.hashing import root_hash
from baton.core.ids import RouterId, SequenceId, WorkerId
from baton.core.messages import (
    BlockEvents,
    PeerRef,
    Role,
    SequenceFailed,
    SequenceRefused,
    StartSequence,
    StepOutput,
)
from baton.core.sampling import SamplingParams, finish_after
from baton.core.steps import StepPlan
from kv_transfer.read import BlockRead, ReadDone
from tests.fake_engine import FakeEngine, crc_token
from worker.core import WorkerCore
from worker.events import (
    CopyFromStore,
    CopyToStore,
    FromOwner,
    FromReader,
    FromRouter,
    OwnerLost,
    ReaderLost,
    ReadSettled,
    RouterJoined,
    RunStep,
    StepDone,
    ToOwner,
    ToReader,
    ToRouter,
    ToStore,
    WorkerTick,
)

BLOCK_TOKENS = 4
ROUTER = RouterId("router-0")
ROOT = root_hash("fingerprint", b"")


next_token = crc_token


def expected_tokens(prompt, sampling, room_tokens):
    """What one sequence generates, by the dullest possible loop."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        count = len(tokens) - len(prompt)
        if finish_after(sampling, tokens[-1], count) or len(tokens) >= room_tokens:
            return tokens[len(prompt) :]


def start(
    seq_id, prompt, *, phase, epoch=0, max_tokens=6, source=None, time_left_s=1000.0, generated=(), **sampling
):
    return StartSequence(
        seq_id=SequenceId(seq_id),
        epoch=epoch,
        phase=phase,
        tokens=(*prompt, *generated),
        prompt_token_count=len(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        cache_root=ROOT,
        time_left_s=time_left_s,
        source=None if source is None else PeerRef(WorkerId(source), f"{source}:1"),
    )


@dataclass
class Machine:
    """A worker core, its block contents (one token per position), and what it has asked the world for."""

    name: str
    block_count: int = 16
    engine: EngineConfig = field(
        default_factory=lambda: EngineConfig(step_tokens_max=16, batch_sequences_max=8, prepare_s=30.0)
    )
    transfer: TransferConfig = field(default_factory=TransferConfig)
    role: Role = Role.AGGREGATED
    max_model_tokens: int = 64
    store: StoreConfig = field(default_factory=StoreConfig)

    def __post_init__(self):
        self.generations = [0] * self.block_count
        self.computer = FakeEngine(self.block_count, BLOCK_TOKENS)
        self.memory = self.computer.memory
        self.core = WorkerCore(
            worker_id=WorkerId(self.name),
            role=self.role,
            model="m",
            fingerprint="f",
            block_tokens=BLOCK_TOKENS,
            block_bytes=BLOCK_TOKENS,
            block_count=self.block_count,
            max_model_tokens=self.max_model_tokens,
            engine=self.engine,
            transfer=self.transfer,
            store=self.store,
            router_grace_s=2.0,
            heartbeat_s=1000.0,
            generations=self.generations,
            now_s=0.0,
        )
        self.line: deque[StepPlan] = deque()  # planned and not computed
        self.plans: list[StepPlan] = []  # all of them
        self.reads: dict[int, BlockRead] = {}
        self.told: list = []  # messages to routers
        self.told_to: list = []  # the same, with the router
        self.out: deque = deque()  # ToOwner and ToAsker not delivered yet
        self.to_store: deque = deque()  # messages to the store node
        self.copies: dict = {}  # CopyToStore and CopyFromStore under way

    def handle(self, event, now_s):
        actions = self.core.handle(event, now_s=now_s)
        for action in actions:
            match action:
                case RunStep(plan):
                    assert len(self.line) < 2, "three steps at once"
                    self._check_plan(plan)
                    self.line.append(plan)
                    self.plans.append(plan)
                case BlockRead():
                    self.reads[action.read_id] = action
                case ToRouter(router_id, message):
                    self.told.append(message)
                    self.told_to.append((router_id, message))
                case ToOwner() | ToReader():
                    self.out.append(action)
                case ToStore(message):
                    self.to_store.append(message)
                case CopyToStore() | CopyFromStore():
                    self.copies[action.copy_id] = action
        self.core.check()
        return actions

    def _check_plan(self, plan):
        assert plan.items
        assert plan.token_count <= self.engine.step_tokens_max
        assert len(plan.items) <= self.engine.batch_sequences_max
        assert len({item.key for item in plan.items}) == len(plan.items)

    def finish_step(self, now_s):
        """Computes the running step into memory and samples from what the memory holds."""
        return self.handle(StepDone(self.computer.run(self.line.popleft())), now_s)

    @property
    def plan(self):
        """The step under way."""
        return self.line[0] if self.line else None

    def outputs(self, seq_id):
        return [o for m in self.told if isinstance(m, StepOutput) for o in m.outputs if o.seq_id == seq_id]

    def told_of(self, kind):
        return [m for m in self.told if isinstance(m, kind)]


class Cluster:
    """Machines by name, one clock, and ordered channels between each two of them."""

    def __init__(self, *machines, seed=0):
        self.machines = {m.name: m for m in machines}
        self.now_s = 0.0
        self.random = random.Random(seed)
        self.channels: dict[tuple[str, str], deque] = {}
        self.late: list = []  # (machine, read): bytes that may yet land
        self.stores: dict = {}  # a DullStore of each machine that has one
        for m in machines:
            m.handle(RouterJoined(ROUTER), self.now_s)

    def tell(self, name, message):
        self.machines[name].handle(FromRouter(ROUTER, message), self.now_s)
        self.post()

    def post(self):
        """Moves what machines sent into the channels."""
        for name, m in self.machines.items():
            while m.out:
                action = m.out.popleft()
                if isinstance(action, ToOwner):
                    peer, event = action.source.worker_id, FromReader(WorkerId(name), action.message)
                else:
                    peer, event = action.reader, FromOwner(WorkerId(name), action.message)
                self.channels.setdefault((name, peer), deque()).append(event)

    def choices(self):
        """Everything that could happen next, in a fixed order."""
        found = [("deliver", pair) for pair, channel in self.channels.items() if channel]
        for name, m in self.machines.items():
            if m.plan is not None:
                found.append(("step", name))
            found += [("read", (name, read_id)) for read_id in m.reads]
        for name, node in self.stores.items():
            found += [("store", (name, choice)) for choice in node.choices()]
        return found

    def perform(self, choice):
        what, where = choice
        if what == "deliver":
            event = self.channels[where].popleft()
            self.machines[where[1]].handle(event, self.now_s)
        elif what == "step":
            self.machines[where].finish_step(self.now_s)
        elif what == "store":
            node = self.stores[where[0]]
            node.now_s = self.now_s
            node.perform(where[1])
        else:
            self.finish_read(*where)
        self.post()

    def finish_read(self, name, read_id, *, error="", is_settled=True):
        m = self.machines[name]
        read = m.reads.pop(read_id)
        if error:
            m.handle(ReadDone(read_id, error, is_settled), self.now_s)
            if not is_settled:
                self.late.append((name, read))
            self.post()
            return
        self.copy(name, read)
        source = self.machines[read.owner]
        is_stale = any(
            source.generations[b] != g for b, g in zip(read.source_blocks, read.generations, strict=True)
        )
        m.handle(ReadDone(read_id, "stale" if is_stale else "", True, is_stale), self.now_s)
        self.post()

    def copy(self, name, read):
        source = self.machines[read.owner]
        for theirs, ours in zip(read.source_blocks, read.local_blocks, strict=True):
            self.machines[name].memory[ours] = list(source.memory[theirs])

    def settle_late(self):
        """The bytes of abandoned reads land now, then the reads are settled."""
        late, self.late = self.late, []
        for name, read in late:
            self.copy(name, read)
            self.machines[name].handle(ReadSettled(read.read_id), self.now_s)
        self.post()

    def run(self, *, events_max=5000):
        """Run until nothing can happen without time passing."""
        for _ in range(events_max):
            choices = self.choices()
            if not choices:
                return
            self.perform(self.random.choice(choices))
        raise AssertionError("does not come to rest")

    def advance(self, seconds):
        """Time passes; every machine ticks when it wants to."""
        end_s = self.now_s + seconds
        while True:
            due = [m.core.next_tick_s for m in self.machines.values() if m.core.next_tick_s is not None]
            next_s = max(self.now_s, min(due, default=end_s + 1))
            if next_s > end_s:
                break
            self.now_s = next_s
            for m in self.machines.values():
                m.handle(WorkerTick(), self.now_s)
            self.post()
            self.run()
        self.now_s = end_s

    def cut(self, one, other):
        """The session between two machines breaks: undelivered messages are lost."""
        for pair in ((one, other), (other, one)):
            self.channels.pop(pair, None)
        for here, there in ((one, other), (other, one)):
            self.machines[here].handle(ReaderLost(WorkerId(there)), self.now_s)
            self.machines[here].handle(OwnerLost(WorkerId(there), "cut"), self.now_s)
        self.post()

    def assert_quiet(self):
        for m in self.machines.values():
            m.core.check()
            assert m.core.is_idle, m.core.status()
            assert m.core.status().held_blocks == 0


def collected(*machines, seq_id):
    """Tokens by generated index, over all machines; two machines never disagree about one."""
    found: dict[int, int] = {}
    finish = None
    for m in machines:
        for output in m.outputs(seq_id):
            for index, token in enumerate(output.tokens, start=output.first_index):
                assert found.setdefault(index, token) == token
            finish = output.finish or finish
    assert sorted(found) == list(range(len(found))), "a token is missing"
    return [found[i] for i in sorted(found)], finish


def failures(machine):
    return [m for m in machine.told if isinstance(m, SequenceFailed | SequenceRefused)]


def known_hashes(machine, router_id=ROUTER):
    """What a router would believe of the machine's cache, from its block events alone."""
    known: set[bytes] = set()
    events_heard = [m for r, m in machine.told_to if r == router_id and isinstance(m, BlockEvents)]
    for number, events in enumerate(events_heard):
        assert events.sequence_number == number
        known = (
            set(events.stored) if events.is_snapshot else (known | set(events.stored)) - set(events.removed)
        )
    return known
