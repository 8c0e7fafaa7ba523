"""The core gets nothing of a sequence until its grammar and adapter are ready; whatever ends the
sequence meanwhile is honoured."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from baton.core.errors import SetupError
from baton.core.hashing import HASH_BYTES
from baton.core.messages import (
    STILL_COMPILED,
    AdapterRef,
    CancelSequence,
    FailureReason,
    Phase,
    RefusalReason,
    SequenceFailed,
    SequenceRefused,
    StartSequence,
)
from baton.core.sampling import Grammar, GrammarKind, SamplingParams
from engine.grammar import CompilerBusy
from engine.grammar_compile import GrammarError
from worker.preparation import NotPrepared, StartPreparation
from worker.preparers import AdapterPreparer, GrammarPreparer, compiling_threads, warm_compiler
from worker.turns import FairTurns

GRAMMAR = Grammar(GrammarKind.REGEX, "a+")


def start(seq_id="s", epoch=1, *, grammar=None, adapter=None, time_left_s=60.0, tenant="", tokens=(1,)):
    params = SamplingParams(8, grammar=grammar)
    ref = None if adapter is None else AdapterRef(adapter, f"/{adapter}", "d")
    root = b"h" * HASH_BYTES
    return StartSequence(
        seq_id,
        epoch,
        Phase.AGGREGATED,
        tokens,
        1,
        params,
        root,
        time_left_s,
        adapter=ref,
        fairness_key=tenant,
    )


class Core:
    def __init__(self):
        self.seen = []

    def from_router(self, router_id, message):
        self.seen.append(message)

    def router_joined(self, router_id):
        self.seen.append(("joined", router_id))

    def router_lost(self, router_id):
        self.seen.append(("lost", router_id))

    def preparation_began(self, key, phase):
        self.seen.append(("preparing", key))

    def preparation_ended(self, key, reason):
        self.seen.append(("not prepared", key))

    @property
    def starts(self):
        return [(m.seq_id, m.epoch) for m in self.seen if isinstance(m, StartSequence)]


class Slow:
    """Grammars are ready when the test says so."""

    def __init__(self):
        self.begun, self.done = asyncio.Queue(), {}

    def is_ready(self, message):
        return message.sampling.grammar is None

    async def prepare(self, message, claimed):
        key = (message.seq_id, message.epoch)
        self.done[key] = asyncio.get_running_loop().create_future()
        self.begun.put_nowait(key)
        await self.done[key]


class Bench:
    def __init__(self, *preparers, prepare_s=60.0, pending_max=8):
        self.is_draining = False
        self.core, self.answers, self.tasks = Core(), asyncio.Queue(), []
        self.now_s = 0.0
        self.preparation = StartPreparation(
            self.core,
            preparers,
            spawn=self.spawn,
            prepare_s=prepare_s,
            pending_max=pending_max,
            is_draining=lambda: self.is_draining,
            now=lambda: self.now_s,
        )
        self.preparation.answer = lambda router_id, message: self.answers.put_nowait(message)

    def spawn(self, coroutine):
        self.tasks.append(asyncio.ensure_future(coroutine))
        return self.tasks[-1]

    def tell(self, message, router_id="r"):
        self.preparation.from_router(router_id, message)

    async def settle(self):
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert not self.preparation._pending


@pytest.fixture
async def bench():
    return Bench(Slow())


@pytest.fixture
def slow(bench):
    return bench.preparation._preparers[0]


async def test_what_needs_nothing_goes_straight_through(bench):
    message = start()
    bench.tell(message)
    assert bench.core.seen == [message]


async def test_a_start_waits_for_its_grammar_and_has_that_much_less_time(bench, slow):
    message = start(epoch=0, grammar=GRAMMAR)
    bench.tell(message)
    bench.tell(message)  # a repetition changes nothing
    key = await slow.begun.get()
    assert bench.core.seen == [("preparing", ("s", 0))]
    bench.now_s = 2.5
    slow.done[key].set_result(None)
    await bench.settle()
    assert bench.core.seen[1:] == [msgspec.structs.replace(message, time_left_s=57.5)]


async def test_a_cancelled_start_is_never_told(bench, slow):
    bench.tell(start(epoch=1, grammar=GRAMMAR))
    key = await slow.begun.get()
    bench.tell(CancelSequence("s", 1))
    await bench.settle()
    assert slow.done[key].cancelled()
    assert bench.core.starts == []
    assert bench.core.seen[-1] == CancelSequence("s", 1)


async def test_a_cancel_of_an_older_epoch_leaves_it_alone(bench, slow):
    bench.tell(start(epoch=2, grammar=GRAMMAR))
    key = await slow.begun.get()
    bench.tell(CancelSequence("s", 1))
    slow.done[key].set_result(None)
    await bench.settle()
    assert bench.core.starts == [("s", 2)]


async def test_a_higher_epoch_replaces_it_and_a_lower_one_is_refused(bench, slow):
    bench.tell(start(epoch=2, grammar=GRAMMAR))
    await slow.begun.get()
    bench.tell(start(epoch=1, grammar=GRAMMAR))
    refused = bench.answers.get_nowait()
    assert (refused.epoch, refused.reason) == (1, RefusalReason.STALE_EPOCH)
    bench.tell(start(epoch=3))  # needs no grammar any more
    await bench.settle()
    assert bench.core.starts == [("s", 3)]


async def test_nothing_is_made_ready_for_a_core_that_refuses_it(bench, slow):
    bench.is_draining = True
    bench.tell(start(grammar=GRAMMAR))
    assert bench.core.starts == [("s", 1)]
    assert slow.begun.empty()


async def test_the_core_hears_of_every_end_of_a_preparation(bench, slow):
    bench.tell(start(epoch=0, grammar=GRAMMAR))
    bench.tell(cancel := CancelSequence("s", 0))
    assert bench.core.seen == [("preparing", ("s", 0)), ("not prepared", ("s", 0)), cancel]
    await bench.settle()


async def test_the_epoch_before_ends_when_the_new_one_comes_not_when_it_is_ready(bench, slow):
    bench.tell(start(epoch=1))
    bench.tell(start(epoch=2, grammar=GRAMMAR))
    assert bench.core.seen[-2:] == [CancelSequence("s", 1), ("preparing", ("s", 2))]
    bench.tell(CancelSequence("s", 2))
    await bench.settle()


@pytest.mark.parametrize("how", ["router_lost", "router_joined"])
async def test_a_lost_router_takes_its_own_starts_with_it(bench, slow, how):
    bench.tell(start("a", grammar=GRAMMAR), "r")
    bench.tell(start("b", grammar=GRAMMAR), "q")
    await slow.begun.get()
    await slow.begun.get()
    getattr(bench.preparation, how)("r")
    slow.done["b", 1].set_result(None)
    await bench.settle()
    assert bench.core.starts == [("b", 1)]


async def test_more_than_may_wait_are_refused():
    bench = Bench(slow := Slow(), pending_max=1)
    bench.tell(start("a", 0, grammar=GRAMMAR))
    bench.tell(start("b", 0, grammar=GRAMMAR))
    assert bench.answers.get_nowait().reason is RefusalReason.BUSY
    slow.done[await slow.begun.get()].set_result(None)
    await bench.settle()


def prefill(seq_id="s", epoch=0):
    message = start(seq_id, epoch, grammar=GRAMMAR)
    return msgspec.structs.replace(message, phase=Phase.PREFILL)


async def test_the_core_hears_of_a_prefill_phase_that_is_made_ready(bench, slow):
    bench.tell(message := prefill())
    slow.done[await slow.begun.get()].set_result(None)
    await bench.settle()
    assert bench.core.seen == [("preparing", ("s", 0)), message]


@pytest.mark.parametrize("how", ["cancelled", "refused", "failed", "late", "router lost", "replaced"])
async def test_the_core_hears_of_every_prefill_phase_that_will_not_start(bench, slow, how):
    bench.tell(prefill(epoch=1))
    key = await slow.begun.get()
    match how:
        case "cancelled":
            bench.tell(CancelSequence("s", 1))
        case "refused":
            slow.done[key].set_exception(NotPrepared(RefusalReason.BUSY, "busy"))
        case "failed":
            slow.done[key].set_exception(OSError("the disk is on fire"))
        case "late":
            slow.done[key].set_exception(TimeoutError())
        case "router lost":
            bench.preparation.router_lost("r")
        case _:
            bench.tell(start(epoch=2))
    await bench.settle()
    assert bench.core.seen.count(("not prepared", ("s", 1))) == 1


@pytest.mark.parametrize("epoch", [0, 1])
async def test_who_waits_in_vain_is_sent_to_another_worker(epoch):
    bench = Bench(Slow(), prepare_s=0.01)
    bench.tell(start(epoch=epoch, grammar=GRAMMAR))
    await bench.settle()
    refused = bench.answers.get_nowait()
    assert isinstance(refused, SequenceRefused)
    assert (refused.epoch, refused.reason) == (epoch, RefusalReason.BUSY)
    assert "0.01 s" in refused.message


async def test_a_deadline_is_a_deadline():
    bench = Bench(Slow(), prepare_s=0.01)
    bench.tell(start(epoch=1, grammar=GRAMMAR, time_left_s=0.001))
    await bench.settle()
    failed = bench.answers.get_nowait()
    assert isinstance(failed, SequenceFailed)
    assert failed.reason is FailureReason.DEADLINE
    assert bench.core.starts == []


async def test_one_tenant_cannot_take_all_places():
    bench = Bench(slow := Slow(), pending_max=4)
    for seq_id in "abc":
        bench.tell(start(seq_id, grammar=GRAMMAR, tenant="greedy"))
    assert bench.answers.get_nowait().seq_id == "c"
    assert bench.answers.empty()
    bench.tell(start("d", grammar=GRAMMAR, tenant="other"))
    assert bench.answers.empty()
    for _ in range(3):
        slow.done[await slow.begun.get()].set_result(None)
    await bench.settle()


class PanicException(BaseException):
    """What a library in Rust raises, as pyo3 makes it."""


@pytest.mark.parametrize("error", [OSError("the disk is on fire"), PanicException("index out of bounds")])
async def test_an_error_nobody_thought_of_fails_the_one_sequence(bench, slow, error):
    bench.tell(start(grammar=GRAMMAR))
    slow.done[await slow.begun.get()].set_exception(error)
    await bench.settle()
    assert bench.answers.get_nowait().reason is FailureReason.INTERNAL


class Store:
    def __init__(self):
        self.known, self.continued = set(), []

    def has(self, grammar):
        return grammar in self.known

    def prepare(self, grammar, *, is_continued=False):
        if grammar.text == "bad":
            raise GrammarError("regex: no")
        if grammar.text == "unlucky":
            raise CompilerBusy("the compiler was lost")
        self.continued += [grammar.text] if is_continued else []
        self.known.add(grammar)


async def test_a_grammar_that_does_not_compile_is_unsupported_with_the_compilers_words():
    with ThreadPoolExecutor(1) as threads:
        bench = Bench(GrammarPreparer(Store(), threads))
        bench.tell(start(grammar=Grammar(GrammarKind.REGEX, "bad")))
        await bench.settle()
        refused = bench.answers.get_nowait()
        assert (refused.reason, refused.message) == (RefusalReason.UNSUPPORTED, "regex: no")
        bench.tell(start("t", grammar=GRAMMAR))
        await bench.settle()
        bench.tell(start("u", grammar=GRAMMAR))  # known now: without a detour
        assert bench.core.starts == [("t", 1), ("u", 1)]


async def test_a_compiler_that_was_lost_is_not_the_grammars_fault():
    with ThreadPoolExecutor(1) as threads:
        bench = Bench(GrammarPreparer(Store(), threads))
        bench.tell(start(grammar=Grammar(GrammarKind.REGEX, "unlucky")))
        await bench.settle()
        assert bench.answers.get_nowait().reason is RefusalReason.BUSY


async def test_the_compiler_hears_that_the_text_has_begun_elsewhere():
    store = Store()
    with ThreadPoolExecutor(1) as threads:
        bench = Bench(GrammarPreparer(store, threads))
        bench.tell(start("a", grammar=Grammar(GrammarKind.REGEX, "a"), tokens=(1, 7)))
        bench.tell(start("b", grammar=Grammar(GrammarKind.REGEX, "b")))
        await bench.settle()
    assert store.continued == ["a"]


class Stuck(Store):
    """Blocks until the test lets go."""

    def __init__(self):
        super().__init__()
        self.go_on, self.begun, self.niceness, self.warm = threading.Event(), [], 0, str

    def prepare(self, grammar, *, is_continued=False):
        self.begun.append(grammar.text)
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.go_on.wait(30)
        super().prepare(grammar)


async def test_one_grammar_compiles_at_a_time_and_those_given_up_are_never_begun():
    store = Stuck()
    with compiling_threads() as threads:
        threads.submit(warm_compiler, store)
        bench = Bench(GrammarPreparer(store, threads, prepare_s=0.05), prepare_s=0.05)
        for text in ("a", "b", "c"):
            bench.tell(start(text, 0, grammar=Grammar(GrammarKind.REGEX, text)))
        await bench.settle()
        refusals = [bench.answers.get_nowait() for _ in range(3)]
        assert [one.reason for one in refusals] == [RefusalReason.BUSY] * 3
        assert all(one.message.startswith(STILL_COMPILED) for one in refusals)
        waits = [one.message.rpartition(": ")[2] for one in refusals]
        assert sorted(waits) == ["others come first for the compiler"] * 2 + ["this machine is busy"]
        store.go_on.set()
        await asyncio.wrap_future(threads.submit(str))
        assert store.begun == ["a"]
        assert store.niceness == os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_the_time_of_its_own_grammar_begins_with_its_turn():
    store = Stuck()
    with compiling_threads() as threads:
        bench = Bench(GrammarPreparer(store, threads, prepare_s=1000.0), prepare_s=1000.0)
        for text in ("a", "b"):
            bench.tell(start(text, time_left_s=9000.0, grammar=Grammar(GrammarKind.REGEX, text)))
        impatient = GrammarPreparer(store, threads, prepare_s=0.0)
        with pytest.raises(NotPrepared, match="still being compiled after 0 s"):
            await impatient.prepare(start("c", grammar=Grammar(GrammarKind.REGEX, "c")), set)
        store.go_on.set()
        await bench.settle()
    assert [seq_id for seq_id, _ in bench.core.starts] == ["a", "b"]


async def test_tenants_have_their_grammars_compiled_in_turn():
    store = Stuck()
    with compiling_threads() as threads:
        bench = Bench(GrammarPreparer(store, threads), pending_max=64)
        for text in ("a1", "a2", "a3", "b1", "a4", "c1", "b2"):
            bench.tell(start(text, grammar=Grammar(GrammarKind.REGEX, text), tenant=text[0]))
        store.go_on.set()
        await bench.settle()
    assert store.begun == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_a_turn_that_is_given_up_goes_to_the_next():
    turns, order = FairTurns(), []

    async def use(key):
        await turns.take(key)
        order.append(key)
        await asyncio.sleep(0)
        turns.release()

    await turns.take("first")
    tasks = [asyncio.create_task(use(key)) for key in "abc"]
    await asyncio.sleep(0)
    tasks[0].cancel()
    turns.release()  # before the cancelled one has run
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["b", "c"]
    await asyncio.wait_for(use("d"), 5)


async def test_a_turn_that_comes_with_the_cancellation_is_passed_on():
    turns = FairTurns()
    await turns.take("first")
    tasks = [asyncio.create_task(turns.take(key)) for key in "ab"]
    await asyncio.sleep(0)
    turns.release()
    tasks[0].cancel()
    await asyncio.wait_for(tasks[1], 5)


class Loader:
    def __init__(self):
        self.log, self.slots = [], set()

    def read(self, ref):
        if ref.name == "broken":
            raise SetupError("adapter broken: no")
        return ref.key

    async def install(self, adapter):
        await asyncio.sleep(0)
        self.slots.add(adapter)
        assert len(self.slots) <= 2
        self.log.append(f"+{adapter[0]}")

    async def drop(self, key):
        await asyncio.sleep(0)
        self.slots.remove(key)
        self.log.append(f"-{key[0]}")


@pytest.fixture
async def lora():
    loader, in_use = Loader(), set()
    with ThreadPoolExecutor(1) as threads:
        bench = Bench(AdapterPreparer(loader, threads, count_max=2, in_use=lambda: in_use))
        bench.loader, bench.in_use = loader, in_use
        yield bench


async def test_the_least_recently_started_adapter_makes_room(lora):
    for seq_id, adapter in enumerate("abacb"):
        lora.tell(start(str(seq_id), adapter=adapter))
        await lora.settle()
    assert lora.loader.log == ["+a", "+b", "-b", "+c", "-a", "+b"]
    assert len(lora.core.starts) == 5


async def test_an_adapter_in_use_stays_and_the_newcomer_is_refused(lora):
    for seq_id, adapter in enumerate("ab"):
        lora.tell(start(str(seq_id), adapter=adapter))
        await lora.settle()
    lora.in_use.update({"a@d", "b@d"})
    lora.tell(start("n", adapter="c"))
    await lora.settle()
    assert lora.answers.get_nowait().reason is RefusalReason.NO_ROOM
    lora.in_use.remove("a@d")
    lora.tell(start("m", adapter="c"))
    await lora.settle()
    assert lora.loader.log == ["+a", "+b", "-a", "+c"]


async def test_one_that_many_wait_for_is_read_once_even_if_the_first_loses_interest(lora):
    for seq_id in "xyz":
        lora.tell(start(seq_id, adapter="a"))
    lora.tell(CancelSequence("x", 1))
    await lora.settle()
    assert lora.loader.log == ["+a"]
    assert sorted(lora.core.starts) == [("y", 1), ("z", 1)]


async def test_a_broken_adapter_is_unsupported(lora):
    lora.tell(start(adapter="broken"))
    await lora.settle()
    refused = lora.answers.get_nowait()
    assert (refused.reason, refused.message) == (RefusalReason.UNSUPPORTED, "adapter broken: no")
