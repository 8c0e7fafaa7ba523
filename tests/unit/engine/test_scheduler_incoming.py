"""Blocks that come from outside the pool while their sequence waits in it."""

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import SeqKey
from baton.core.messages import Phase
from baton.core.sampling import SamplingParams
from engine.scheduling.incoming import Incoming
from tests.unit.engine.test_scheduler import BLOCK_TOKENS, REQUESTS, Bench, expected, sequence


@dataclass
class Brought:
    """Blocks that are loaded for one sequence."""

    seq: object
    incoming: Incoming
    held: list
    """Shares in blocks that are being written into."""


class Promoter:
    """Brings blocks in pieces, late, or not at all; their content is right once it is told of."""

    def __init__(self, bench, rng):
        self.bench, self.rng = bench, rng
        self.open = []

    def expect(self, seq, first, end):
        seq.incoming = Incoming(first=first, ready=first, end=end)
        self.open.append(Brought(seq, seq.incoming, []))

    def something_happens(self):
        if not self.open:
            return
        brought = self.rng.choice(self.open)
        seq, incoming = brought.seq, brought.incoming
        if seq.incoming is not incoming or not incoming.is_awaited:
            self.end(brought)
        elif not seq.block_ids:
            if self.rng.random() < 0.2:  # it is known not to come before there is a place
                incoming.end = incoming.first
                self.end(brought)
        elif brought.held:
            self.arrive(brought)
        elif self.rng.random() < 0.2:
            incoming.end = incoming.ready
            self.end(brought)
        elif incoming.ready < incoming.end:
            count = self.rng.randint(1, incoming.end - incoming.ready)
            brought.held = seq.block_ids[incoming.ready : incoming.ready + count]
            self.bench.pool.acquire(brought.held)
            for block in brought.held:  # whoever looks too early finds nonsense
                self.bench.computer.memory[block] = [-1] * BLOCK_TOKENS

    def arrive(self, brought):
        seq, incoming = brought.seq, brought.incoming
        for i, block in enumerate(brought.held, incoming.ready):
            self.bench.computer.memory[block] = seq.tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]
        incoming.ready += len(brought.held)
        self.give_back(brought)
        self.bench.scheduler.arrived(seq)

    def end(self, brought):
        self.give_back(brought)
        self.open.remove(brought)

    def give_back(self, brought):
        self.bench.pool.release(brought.held)
        brought.held = []


def add(bench, promoter, rng, number, family, prompt_count, sampling, phase):
    prompt = [family * 100 + p for p in range(prompt_count)]
    seq = sequence(f"s{number}", prompt, phase=phase, sampling=sampling)
    usable = (prompt_count - 1) // BLOCK_TOKENS
    if usable and rng.random() < 0.8:
        first = rng.randint(0, usable - 1)
        promoter.expect(seq, first, rng.randint(first + 1, usable))
    bench.add(seq)
    return seq


def is_waiting_for_blocks(bench):
    return any(seq.incoming is not None and seq.incoming.is_awaited for seq in bench.scheduler.sequences())


@settings(max_examples=150, deadline=None)
@given(
    requests=REQUESTS,
    seed=st.integers(0, 2**32),
    blocks=st.integers(13, 30),
    step_tokens=st.integers(1, 24),
    batch=st.integers(1, 6),
    overlap=st.booleans(),
    swap_bytes=st.sampled_from([0, 8, 100]),
    speculation=st.sampled_from(["off", "ngram"]),
    cancels=st.booleans(),
)
def test_whatever_comes_or_does_not_the_tokens_are_right(
    requests, seed, blocks, step_tokens, batch, overlap, swap_bytes, speculation, cancels
):
    rng = random.Random(seed)
    bench = Bench(
        blocks=blocks,
        step_tokens=step_tokens,
        batch=batch,
        overlap=overlap,
        swap_bytes=swap_bytes,
        speculation=speculation,
    )
    promoter = Promoter(bench, rng)
    want, live = {}, []
    for i, (family, prompt_count, token_count, phase, gap) in enumerate(requests):
        sampling = SamplingParams(max_tokens=1 if phase is Phase.PREFILL else token_count)
        live.append(add(bench, promoter, rng, i, family, prompt_count, sampling, phase))
        want[SeqKey(f"s{i}", 0)] = expected(
            [family * 100 + p for p in range(prompt_count)], sampling.max_tokens
        )
        for _ in range(gap):
            bench.step(before_finish=promoter.something_happens)
            promoter.something_happens()
    for _ in range(4000):
        promoter.something_happens()
        if cancels and live and rng.random() < 0.05:
            victim = live.pop(rng.randrange(len(live)))
            if victim.key not in bench.done:
                bench.done.append(victim.key)
                bench.scheduler.remove(victim)
        if bench.step(before_finish=promoter.something_happens) is None and not promoter.open:
            break
    assert not is_waiting_for_blocks(bench)
    for seq in live:
        assert bench.emitted[seq.key] == want[seq.key]
    bench.assert_empty()


def test_computing_stops_where_blocks_are_awaited_and_jumps_over_them():
    bench = Bench(step_tokens=32)
    seq = sequence("s", range(22))
    promoter = Promoter(bench, random.Random(0))
    promoter.expect(seq, 2, 4)
    bench.add(seq)
    assert [len(item.tokens) for item in bench.step().items] == [8]
    assert bench.step() is None
    [brought] = promoter.open
    brought.held = seq.block_ids[2:4]
    bench.pool.acquire(brought.held)
    promoter.arrive(brought)
    [item] = bench.step().items
    assert (item.first_position, len(item.tokens)) == (16, 6)
    assert bench.emitted[seq.key] == expected(range(22), 1)
    assert seq.cached_token_count == 8


def test_what_the_cache_has_by_admission_is_not_waited_for():
    bench = Bench(step_tokens=32)
    bench.add(sequence("first", range(12)))
    bench.run()
    seq = sequence("s", range(15))
    seq.incoming = Incoming(first=0, end=3)
    bench.add(seq)
    [item] = bench.step().items
    assert item.first_position == 12
    assert not seq.incoming


def test_a_sequence_is_not_admitted_before_it_is_known_what_comes():
    bench = Bench(step_tokens=32)
    seq = sequence("s", range(8))
    seq.incoming = Incoming(wait_until_s=2.0)
    bench.add(seq, sequence("other", range(50, 55)))
    assert [item.key.seq_id for item in bench.step().items] == ["other"]
    assert bench.step() is None
    bench.now_s = 2.0
    assert [item.key.seq_id for item in bench.step().items] == ["s"]


def test_only_what_was_computed_here_is_told_as_committed():
    bench = Bench(step_tokens=32)
    told = []
    bench.scheduler.on_commit(lambda seq, first, end: told.append((first, end)))
    seq = sequence("s", range(18))
    promoter = Promoter(bench, random.Random(0))
    promoter.expect(seq, 0, 3)
    bench.add(seq)
    bench.step()
    [brought] = promoter.open
    brought.held = seq.block_ids[0:3]
    bench.pool.acquire(brought.held)
    promoter.arrive(brought)
    bench.run()
    assert told == [(3, 4)]
    assert len(bench.cache.snapshot()) == 4


def test_a_sequence_that_gives_way_waits_for_nothing_any_more():
    bench = Bench(blocks=8, step_tokens=32)
    bench.add(sequence("old", range(4), max_tokens=20))
    bench.step()
    young = sequence("young", range(100, 117), max_tokens=2)
    young.incoming = Incoming(first=0, end=4)
    bench.add(young)
    bench.step()
    assert young.block_ids
    while young.block_ids:
        bench.step()
    assert young.incoming is None
    bench.run()
    assert bench.emitted[young.key] == expected(range(100, 117), 2)
