"""The router against a fake cluster that loses, refuses, repeats and delays. Whatever happens, every sequence
ends once, with exactly its tokens, and no worker holds anything in the end."""

import random
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.config.router import RouterConfig
from baton.core.ids import RequestId, SequenceId, WorkerId
from baton.core.messages import (
    BlockEvents,
    CancelSequence,
    FailureReason,
    LoadReport,
    Phase,
    RefusalReason,
    Role,
    RouterMessage,
    SequenceFailed,
    SequenceJoined,
    SequenceOutput,
    SequenceRefused,
    StartSequence,
    StepOutput,
    WorkerHello,
    WorkerMessage,
)
from baton.core.sampling import SamplingParams, finish_after
from router.decisions.core import RouterCore
from router.decisions.events import (
    ClientGone,
    Deliver,
    Failed,
    Finished,
    FromWorker,
    RouterEvent,
    Submit,
    Tick,
    ToWorker,
    WorkerJoined,
    WorkerLost,
    WorkerUpdated,
)

NAMES = ("w0", "w1", "w2", "w3")
STOP_TOKEN = 0


def right_token(seq_id: str, index: int) -> int:
    """Return the token that a greedy model generates there, wherever it runs; 0 now and then."""
    return (len(seq_id) * 31 + int(seq_id[1:]) * 7 + index * 5) % 11


@dataclass
class Running:
    start: StartSequence
    next_index: int
    has_sampled: bool = False


@dataclass
class FakeWorker:
    """A worker whose messages wait in both directions until a rule moves them, so that cancels and outputs
    cross."""

    role: Role
    inbox: list[RouterMessage] = field(default_factory=list)
    outbox: list[WorkerMessage] = field(default_factory=list)
    running: dict[str, Running] = field(default_factory=dict)


class RouterAgainstCluster(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.workers: dict[str, FakeWorker] = {}
        self.submitted: dict[str, Submit] = {}
        self.delivered: dict[str, list[int]] = {}
        self.ends: dict[str, Finished | Failed] = {}
        self.gone: set[str] = set()
        self.epochs: dict[str, dict[int, list[Phase]]] = {}
        self.history: list[tuple[str, StepOutput]] = []

    @initialize(
        policy=st.sampled_from(["slo", "cached_prefix", "least_loaded", "round_robin", "random"]),
        queue=st.sampled_from([0, 2, 100]),
        fallback=st.booleans(),
        disaggregate=st.sampled_from([True, True, True, False]),
        attempts=st.sampled_from([1, 3, 50]),
    )
    def begin(self, policy, queue, fallback, disaggregate, attempts):
        config = RouterConfig(
            policy=policy,
            queue_requests_max=queue,
            fallback_to_other_pool=fallback,
            disaggregate=disaggregate,
            attempts_max=attempts,
        )
        self.core = RouterCore(config=config, rng=random.Random(3), now_s=0.0)
        self.join("w0", Role.PREFILL)
        self.join("w1", Role.DECODE)

    # --- the world --------------------------------------------------------------------------------

    def do(self, event: RouterEvent) -> None:
        for action in self.core.handle(event, now_s=self.now_s):
            match action:
                case ToWorker(worker_id, message):
                    if isinstance(message, StartSequence):
                        self.started(message)
                    if worker_id in self.workers:
                        self.workers[worker_id].inbox.append(message)
                case Deliver(seq_id, first_index, tokens):
                    assert seq_id not in self.ends
                    assert seq_id not in self.gone
                    so_far = self.delivered[seq_id]
                    assert first_index == len(so_far)
                    so_far.extend(tokens)
                case Finished(seq_id) | Failed(seq_id):
                    assert seq_id not in self.ends
                    assert seq_id not in self.gone
                    self.ends[seq_id] = action
                case _:
                    pass

    def started(self, start: StartSequence) -> None:
        """Check that an attempt starts after the tokens that the client has, with an epoch that was never
        used."""
        prompt = self.submitted[start.seq_id].prompt
        assert start.tokens == (*prompt, *self.delivered[start.seq_id])
        assert start.prompt_token_count == len(prompt)
        used = self.epochs.setdefault(start.seq_id, {})
        assert start.epoch >= max(used, default=0)
        phases = used.setdefault(start.epoch, [])
        phases.append(start.phase)
        assert len(phases) == len(set(phases))

    def join(self, name, role):
        self.workers[name] = FakeWorker(role)
        hello = WorkerHello(WorkerId(name), role, "f", "m", 2, 40, 60)
        self.do(WorkerJoined(hello, f"{name}:1"))
        self.do(FromWorker(WorkerId(name), BlockEvents(0, is_snapshot=True)))

    def take_in(self, name, refusal: RefusalReason | None) -> None:
        """The worker reads one message."""
        worker = self.workers[name]
        match worker.inbox.pop(0):
            case StartSequence(seq_id, epoch) as start:
                known = worker.running.get(seq_id)
                assert known is None or known.start.epoch < epoch
                worker.running.pop(seq_id, None)
                if refusal is not None:
                    worker.outbox.append(SequenceRefused(seq_id, epoch, refusal, ""))
                else:
                    worker.running[seq_id] = Running(start, start.generated_count)
            case CancelSequence(seq_id, epoch):
                known = worker.running.get(seq_id)
                if known is not None and known.start.epoch == epoch:
                    del worker.running[seq_id]
            case _:
                pass

    def compute(self, name, seq_id, token_count, says_joined) -> None:
        """The worker samples some tokens of a sequence, if its phase can go on."""
        worker = self.workers[name]
        run = worker.running[seq_id]
        if run.start.phase is Phase.PREFILL:
            if run.has_sampled:
                return
            token_count = 1
        if (
            run.start.phase is Phase.DECODE
            and not run.has_sampled
            and not self.pull(run, worker, says_joined)
        ):
            return
        run.has_sampled = True
        self.emit(worker, run, token_count)

    def pull(self, run: Running, worker: FakeWorker, says_joined: bool) -> bool:
        """Deliver KV if the owner has computed it. The owner is then free of the sequence."""
        assert run.start.source is not None
        source = self.workers.get(run.start.source.worker_id)
        phase = source.running.get(run.start.seq_id) if source else None
        if phase is None or phase.start.epoch != run.start.epoch or not phase.has_sampled:
            return False
        del source.running[run.start.seq_id]
        if says_joined:
            worker.outbox.append(SequenceJoined(run.start.seq_id, run.start.epoch, 1, 0.0, 0.0))
        return True

    def emit(self, worker: FakeWorker, run: Running, token_count: int) -> None:
        seq_id, sampling = run.start.seq_id, run.start.sampling
        tokens, finish, first_index = [], None, run.next_index
        while len(tokens) < token_count and finish is None:
            tokens.append(right_token(seq_id, run.next_index))
            run.next_index += 1
            finish = finish_after(sampling, tokens[-1], run.next_index)
        if finish is not None and run.start.phase is not Phase.PREFILL:
            del worker.running[seq_id]
        output = SequenceOutput(seq_id, run.start.epoch, first_index, tuple(tokens), finish, 0)
        worker.outbox.append(StepOutput((output,)))

    def say(self, name) -> None:
        """Deliver one message of the worker to the router."""
        message = self.workers[name].outbox.pop(0)
        if isinstance(message, StepOutput):
            self.history.append((name, message))
        self.do(FromWorker(WorkerId(name), message))

    # --- what may happen --------------------------------------------------------------------------

    @rule(
        prompt_length=st.integers(1, 12),
        max_tokens=st.integers(1, 6),
        stops=st.booleans(),
        patience_s=st.sampled_from([0.5, 3.0, 900.0, 900.0, 900.0]),
        tenant=st.sampled_from(["", "a", "b"]),
        ttft_slo_s=st.sampled_from([0.0, 0.0, 0.2, 2.0]),
        refuse_late=st.booleans(),
        priority=st.sampled_from([0, 0, 1]),
    )
    def submit(self, prompt_length, max_tokens, stops, patience_s, tenant, ttft_slo_s, refuse_late, priority):
        seq_id = SequenceId(f"s{len(self.submitted)}")
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,) if stops else ())
        prompt = tuple(range(prompt_length))
        submit = Submit(
            seq_id, RequestId(seq_id), prompt, sampling, b"", self.now_s + patience_s, tenant=tenant,
            ttft_slo_s=ttft_slo_s, refuse_late=refuse_late, priority=priority, request_digest=seq_id,
            arrived_s=self.now_s - 0.1,
        )  # fmt: skip
        self.submitted[seq_id] = submit
        self.delivered[seq_id] = []
        self.do(submit)

    @rule(name=st.sampled_from(NAMES), role=st.sampled_from(list(Role)))
    def worker_joins_perhaps_again(self, name, role):
        self.join(name, role)

    @rule(name=st.sampled_from(NAMES))
    def worker_is_lost(self, name):
        self.workers.pop(name, None)
        self.do(WorkerLost(WorkerId(name), "killed"))

    @rule(name=st.sampled_from(NAMES), role=st.sampled_from(list(Role)), drains=st.booleans())
    def directory_says(self, name, role, drains):
        self.do(WorkerUpdated(WorkerId(name), role, drains))

    @precondition(lambda self: any(w.inbox for w in self.workers.values()))
    @rule(data=st.data(), refusal=st.sampled_from([None, None, None, *list(RefusalReason)]))
    def worker_reads(self, data, refusal):
        name = data.draw(st.sampled_from([n for n, w in self.workers.items() if w.inbox]))
        self.take_in(name, refusal)

    @precondition(lambda self: any(w.running for w in self.workers.values()))
    @rule(data=st.data(), token_count=st.integers(1, 3), says_joined=st.booleans())
    def worker_computes(self, data, token_count, says_joined):
        name = data.draw(st.sampled_from([n for n, w in self.workers.items() if w.running]))
        seq_id = data.draw(st.sampled_from(list(self.workers[name].running)))
        self.compute(name, seq_id, token_count, says_joined)

    @precondition(lambda self: any(w.running for w in self.workers.values()))
    @rule(data=st.data(), reason=st.sampled_from(list(FailureReason)))
    def worker_fails_one(self, data, reason):
        name = data.draw(st.sampled_from([n for n, w in self.workers.items() if w.running]))
        worker = self.workers[name]
        seq_id = data.draw(st.sampled_from(list(worker.running)))
        run = worker.running.pop(seq_id)
        worker.outbox.append(SequenceFailed(run.start.seq_id, run.start.epoch, reason, ""))

    @precondition(lambda self: any(w.outbox for w in self.workers.values()))
    @rule(data=st.data())
    def router_hears(self, data):
        self.say(data.draw(st.sampled_from([n for n, w in self.workers.items() if w.outbox])))

    @precondition(lambda self: bool(self.history))
    @rule(data=st.data())
    def router_hears_again(self, data):
        name, message = data.draw(st.sampled_from(self.history))
        self.do(FromWorker(WorkerId(name), message))

    @precondition(lambda self: bool(self.workers))
    @rule(data=st.data(), free=st.integers(0, 40), drains=st.sampled_from([False, False, True]))
    def worker_reports(self, data, free, drains):
        name = data.draw(st.sampled_from(list(self.workers)))
        role = self.workers[name].role
        self.do(FromWorker(WorkerId(name), LoadReport(role, drains, free, 1, 0, 8, 0.01)))

    @precondition(lambda self: bool(self.submitted))
    @rule(data=st.data())
    def client_goes(self, data):
        seq_id = data.draw(st.sampled_from(list(self.submitted)))
        if seq_id not in self.ends:
            self.gone.add(seq_id)
        self.do(ClientGone(SequenceId(seq_id)))

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 11.0]))
    def time_passes(self, seconds):
        self.now_s += seconds
        self.do(Tick())

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def accounts_agree(self):
        if not hasattr(self, "core"):
            return
        self.core.check()
        tick_s = self.core.next_tick_s
        assert tick_s is None or tick_s > self.now_s
        live = self.submitted.keys() - self.ends.keys() - self.gone
        assert self.core.status().live == len(live)

    @invariant()
    def the_client_has_the_right_tokens_and_no_others(self):
        for seq_id, tokens in self.delivered.items():
            assert tokens == [right_token(seq_id, i) for i in range(len(tokens))]

    def teardown(self):
        if not hasattr(self, "core"):
            return
        # The other workers stay as they are, with all that they hold.
        self.join("w0", Role.PREFILL)
        self.join("w1", Role.DECODE)
        self.run_without_faults()
        self.everything_ended_well()

    def run_without_faults(self) -> None:
        for _ in range(2000):
            self.everybody_takes_a_turn()
            self.accounts_agree()
            if self.core.is_idle and not any(w.inbox for w in self.workers.values()):
                return
            self.now_s = max(self.now_s, min(self.core.next_tick_s or 0.0, self.now_s + 0.1))
            self.do(Tick())
        raise AssertionError(f"still running: {self.core.status()}")

    @rule()
    def everybody_takes_a_turn(self):
        for name, worker in list(self.workers.items()):
            while worker.inbox:
                self.take_in(name, None)
            for seq_id in list(worker.running):
                if seq_id in worker.running:
                    self.compute(name, seq_id, 2, True)
            while worker.outbox:
                self.say(name)

    def everything_ended_well(self) -> None:
        self.the_client_has_the_right_tokens_and_no_others()
        assert self.submitted.keys() == self.ends.keys() | self.gone
        for seq_id, end in self.ends.items():
            if isinstance(end, Finished):
                tokens = self.delivered[seq_id]
                assert end.generated_count == len(tokens)
                sampling = self.submitted[seq_id].sampling
                assert finish_after(sampling, tokens[-1], len(tokens)) is end.reason
                earlier = [finish_after(sampling, t, i) for i, t in enumerate(tokens[:-1], 1)]
                assert earlier == [None] * len(earlier)
        assert all(w.in_flight_count == 0 for w in self.core.status().workers)
        held = {name: list(w.running) for name, w in self.workers.items() if w.running}
        assert held == {}, "nobody told them to let go"


TestRouterAgainstCluster = RouterAgainstCluster.TestCase
TestRouterAgainstCluster.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
