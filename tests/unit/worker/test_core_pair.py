"""Worker cores joined by a function: whatever happens on the way, tokens are right and blocks come back."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config import EngineConfig, TransferConfig
from baton.core.ids import WorkerId
from baton.core.messages import (
    CancelSequence,
    Phase,
    SequenceFailed,
    SequenceJoined,
    SequenceRefused,
    StepOutput,
)
from baton.core.sampling import SamplingParams
from baton.telemetry import catalogue
from tests.unit.worker.worker_pair import (
    ROUTER,
    Cluster,
    Machine,
    collected,
    expected_tokens,
    failures,
    known_hashes,
    start,
)
from worker.events import FromRouter, RouterJoined, RouterLost, ToRouter, WorkerTick
from worker.metrics import WorkerMetrics

ROOM_TOKENS = 56  # of the smallest pool below


class Request:
    def __init__(self, seq_id, prompt, max_tokens):
        self.seq_id, self.prompt, self.max_tokens = seq_id, prompt, max_tokens
        self.epoch = -1
        self.places = ()
        self.is_cancelled = False


class TinyRouter:
    """Places every request somewhere, and again with a higher epoch whenever a worker says that it failed."""

    def __init__(self, cluster, rng):
        self.cluster, self.rng = cluster, rng
        self.requests = {}
        self.read_count = dict.fromkeys(cluster.machines, 0)

    def submit(self, prompt, max_tokens):
        request = Request(f"s{len(self.requests)}", prompt, max_tokens)
        self.requests[request.seq_id] = request
        self.place(request)

    def so_far(self, request):
        return collected(*self.cluster.machines.values(), seq_id=request.seq_id)

    def is_done(self, request):
        return request.is_cancelled or self.so_far(request)[1] is not None

    def place(self, request):
        self.cancel_places(request)
        request.epoch += 1
        tokens, _ = self.so_far(request)
        names = list(self.cluster.machines)
        self.rng.shuffle(names)
        args = {"epoch": request.epoch, "max_tokens": request.max_tokens, "generated": tokens}
        if self.rng.random() < 0.2:
            request.places = names[:1]
            self.tell(names[0], start(request.seq_id, request.prompt, phase=Phase.AGGREGATED, **args))
            return
        request.places = names[:2]
        phases = [(names[0], Phase.PREFILL, None), (names[1], Phase.DECODE, names[0])]
        self.rng.shuffle(phases)
        for name, phase, source in phases:
            self.tell(name, start(request.seq_id, request.prompt, phase=phase, source=source, **args))

    def cancel(self, request):
        request.is_cancelled = True
        self.cancel_places(request)

    def cancel_places(self, request):
        for name in request.places:
            self.tell(name, CancelSequence(request.seq_id, request.epoch))

    def tell(self, name, message):
        self.cluster.machines[name].handle(FromRouter(ROUTER, message), self.cluster.now_s)
        self.cluster.post()

    def rejoin(self, name):
        self.cluster.machines[name].handle(RouterLost(ROUTER), self.cluster.now_s)
        self.cluster.machines[name].told.append(None)  # a new session: block events count from 0 again
        self.cluster.machines[name].handle(RouterJoined(ROUTER), self.cluster.now_s)
        self.cluster.post()
        for request in self.requests.values():
            if name in request.places and not self.is_done(request):
                self.place(request)

    def listen(self):
        """Answers failures of current attempts."""
        for name, machine in self.cluster.machines.items():
            news, self.read_count[name] = machine.told[self.read_count[name] :], len(machine.told)
            for message in news:
                if not isinstance(message, SequenceFailed | SequenceRefused):
                    continue
                request = self.requests[message.seq_id]
                if message.epoch == request.epoch and not self.is_done(request):
                    self.place(request)


def one_random_thing(rng, cluster, router):
    kind = rng.choices(
        ["perform", "submit", "cancel", "cut", "bad_read", "settle", "wait", "rejoin"],
        [60, 8, 2, 1, 4, 3, 4, 0.5],
    )[0]
    names = list(cluster.machines)
    if kind == "perform" and (choices := cluster.choices()):
        cluster.perform(rng.choice(choices))
    elif kind == "submit" and len(router.requests) < 12:
        family, count = rng.randrange(3), rng.randint(1, 24)
        router.submit(tuple(family * 100 + p for p in range(count)), rng.randint(1, 12))
    elif kind == "cancel" and router.requests:
        router.cancel(rng.choice(list(router.requests.values())))
    elif kind == "cut":
        cluster.cut(*rng.sample(names, 2))
    elif kind == "bad_read":
        reads = [(name, read_id) for name, m in cluster.machines.items() for read_id in m.reads]
        if reads:
            cluster.finish_read(*rng.choice(reads), error="broken", is_settled=rng.random() < 0.5)
    elif kind == "settle":
        cluster.settle_late()
    elif kind == "wait":
        cluster.now_s += rng.choice([0.01, 0.5, 2.0, 6.0])
        for machine in cluster.machines.values():
            machine.handle(WorkerTick(), cluster.now_s)
        cluster.post()
    elif kind == "rejoin":
        router.rejoin(rng.choice(names))


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), machine_count=st.integers(2, 3), blocks=st.integers(14, 24))
def test_chaos_ends_with_right_tokens_and_all_blocks_back(seed, machine_count, blocks):
    rng = random.Random(seed)
    transfer = TransferConfig(lease_s=3.0, lease_slack_s=0.2, receive_wait_s=2.0)
    machines = [Machine(f"m{i}", block_count=blocks, transfer=transfer) for i in range(machine_count)]
    cluster = Cluster(*machines, seed=seed)
    router = TinyRouter(cluster, rng)
    for _ in range(250):
        one_random_thing(rng, cluster, router)
        router.listen()
    for _ in range(400):
        if all(router.is_done(r) for r in router.requests.values()):
            break
        cluster.settle_late()
        cluster.run()
        cluster.advance(0.5)
        router.listen()
    cluster.settle_late()
    cluster.advance(20)
    cluster.assert_quiet()
    room_tokens = min(64, blocks * 4)
    for request in router.requests.values():
        tokens, finish = router.so_far(request)
        want = expected_tokens(request.prompt, SamplingParams(max_tokens=request.max_tokens), room_tokens)
        assert tokens == want[: len(tokens)]
        assert request.is_cancelled or (finish is not None and tokens == want)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), step_tokens=st.integers(1, 20), count=st.integers(1, 6))
def test_two_workers_say_what_one_says(seed, step_tokens, count):
    """Messages, steps and reads come in any order, without faults."""
    engine = EngineConfig(step_tokens_max=step_tokens, batch_sequences_max=4)
    rng = random.Random(seed)
    pair = Cluster(Machine("p", engine=engine), Machine("d", engine=engine), seed=seed)
    single = Cluster(Machine("w", engine=engine), seed=seed)
    for i in range(count):
        prompt = tuple(rng.randrange(2) for _ in range(rng.randint(1, 20)))
        phases = [("p", Phase.PREFILL, None), ("d", Phase.DECODE, "p")]
        rng.shuffle(phases)
        for name, phase, source in phases:
            pair.tell(name, start(f"s{i}", prompt, phase=phase, source=source))
        single.tell("w", start(f"s{i}", prompt, phase=Phase.AGGREGATED))
    pair.run()
    single.run()
    for i in range(count):
        two = collected(*pair.machines.values(), seq_id=f"s{i}")
        assert two == collected(*single.machines.values(), seq_id=f"s{i}")
        assert two[1] is not None
    pair.assert_quiet()
    single.assert_quiet()
    for machine in (*pair.machines.values(), *single.machines.values()):
        assert failures(machine) == []
        assert known_hashes(machine) == set(machine.core._cache.snapshot())


def test_reading_overlaps_computing():
    """The first chunk is read before the last one is computed."""
    engine = EngineConfig(step_tokens_max=4)
    cluster = Cluster(Machine("p", engine=engine), Machine("d"))
    prompt = tuple(range(20))
    cluster.tell("d", start("s", prompt, phase=Phase.DECODE, source="p"))
    cluster.tell("p", start("s", prompt, phase=Phase.PREFILL))
    while cluster.channels.get(("d", "p")):
        cluster.perform(("deliver", ("d", "p")))
    cluster.perform(("step", "p"))
    while cluster.channels[("p", "d")]:
        cluster.perform(("deliver", ("p", "d")))
    assert cluster.machines["d"].reads
    assert not cluster.machines["p"].outputs("s")
    cluster.run()
    [joined] = cluster.machines["d"].told_of(SequenceJoined)
    assert joined.transferred_bytes == 5 * 4
    cluster.assert_quiet()


def test_cached_blocks_are_not_transferred_again():
    cluster = Cluster(Machine("p"), Machine("d"))
    prompt = tuple(range(18))
    for name in ("a", "b"):
        cluster.tell("p", start(name, prompt, phase=Phase.PREFILL))
        cluster.tell("d", start(name, prompt, phase=Phase.DECODE, source="p"))
        cluster.run()
    first, second = cluster.machines["d"].told_of(SequenceJoined)
    assert (first.transferred_bytes, second.transferred_bytes) == (5 * 4, 1 * 4)
    assert cluster.machines["p"].outputs("b")[0].cached_token_count == 17  # the last is computed


def test_either_worker_says_what_was_cached_and_one_counts_it():
    """An answer of few tokens may come whole from the decode worker before the prefill worker is heard."""
    cluster = Cluster(Machine("p"), Machine("d"))
    for name in ("a", "b"):
        cluster.tell("p", start(name, tuple(range(18)), phase=Phase.PREFILL))
        cluster.tell("d", start(name, tuple(range(18)), phase=Phase.DECODE, source="p"))
        cluster.run()
    for name, cached in (("a", 0), ("b", 17)):
        for worker, hits in (("p", cached), ("d", 0)):
            outputs = cluster.machines[worker].outputs(name)
            counts = [output.cached_token_count for output in outputs]
            assert counts == [cached] + [None] * (len(counts) - 1)
            metrics = WorkerMetrics(WorkerId(worker))
            for output in outputs:
                metrics.on_action(ToRouter(ROUTER, StepOutput((output,))))
            assert metrics.meter.value(catalogue.PREFIX_HIT_TOKENS, worker=worker) == hits


def test_a_resumed_sequence_goes_on_where_it_stopped():
    cluster = Cluster(Machine("p"), Machine("d"))
    prompt = tuple(range(5))
    want = expected_tokens(prompt, SamplingParams(max_tokens=6), 64)
    args = {"epoch": 3, "generated": want[:2]}
    cluster.tell("p", start("s", prompt, phase=Phase.PREFILL, **args))
    cluster.tell("d", start("s", prompt, phase=Phase.DECODE, source="p", **args))
    cluster.run()
    assert cluster.machines["p"].outputs("s")[0].first_index == 2
    found = {o.first_index: o.tokens[0] for m in cluster.machines.values() for o in m.outputs("s")}
    assert [found[i] for i in range(2, 6)] == want[2:]
    cluster.assert_quiet()
