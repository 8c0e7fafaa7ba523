"""The compact index does what an index of plain dictionaries does, whatever happens to it."""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.core.ids import BlockHash, WorkerId
from baton.core.messages import BlockEvents
from router.decisions import prefix_index, prefix_table
from router.decisions.prefix_index import PrefixIndex
from tests.unit.router.index_model import DictIndex

WORKERS = [WorkerId(f"w{i}") for i in range(40)]
RNG = Random(7)
CHAINS = [[BlockHash(RNG.randbytes(16)) for _ in range(n)] for n in (3, 60, 700, 3000)]

workers = st.sampled_from(WORKERS[:4]) | st.sampled_from(WORKERS)
pieces = st.tuples(st.integers(0, len(CHAINS) - 1), st.integers(0, 60), st.integers(1, 3000))


def cut(piece):
    chain, start, count = piece
    return CHAINS[chain][start : start + count]


class IndexMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.pair = (PrefixIndex(), DictIndex())
        self.next_number: dict[WorkerId, int] = {}

    def _both(self, act):
        found, expected = (act(index) for index in self.pair)
        assert found == expected

    def _apply(self, worker, **what):
        if worker not in self.next_number:
            self.next_number[worker] = 0
            self._both(lambda index: index.add_worker(worker))
        events = BlockEvents(self.next_number[worker], **what)
        self.next_number[worker] += 1
        self._both(lambda index: index.apply(worker, events, now_s=self.now_s))

    @rule(worker=workers, blocks=pieces)
    def snapshot(self, worker, blocks):
        self._apply(worker, stored=tuple(cut(blocks)), is_snapshot=True)

    @rule(worker=workers, blocks=pieces, gone=pieces)
    def change(self, worker, blocks, gone):
        self._apply(worker, stored=tuple(cut(blocks)), removed=tuple(cut(gone)))

    @rule(worker=workers)
    def gap(self, worker):
        if worker in self.next_number:
            self.next_number[worker] += 1
            self._apply(worker)

    @rule(worker=workers, blocks=pieces)
    def expect(self, worker, blocks):
        if worker in self.next_number:
            self._both(lambda index: index.expect(worker, cut(blocks), now_s=self.now_s))

    @rule(worker=workers)
    def lose(self, worker):
        if self.next_number.pop(worker, None) is not None:
            self._both(lambda index: index.remove_worker(worker))

    @rule(seconds=st.floats(0.0, 8.0))
    def wait(self, seconds):
        self.now_s += seconds
        self._both(lambda index: index.expire(self.now_s))

    @rule(blocks=pieces)
    def match(self, blocks):
        self._both(lambda index: index.match(cut(blocks)))

    @invariant()
    def same(self):
        self.pair[0].check()
        self._both(lambda index: [index.match(chain) for chain in CHAINS])
        self._both(lambda index: [index.block_count(worker) for worker in self.next_number])
        self._both(lambda index: [index.is_known(worker) for worker in self.next_number])
        self._both(lambda index: index.next_tick_s)


class TestIndex(IndexMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("scalar_max", [0, 5])
def test_many_blocks_come_and_go_while_the_table_grows(monkeypatch, scalar_max):
    monkeypatch.setattr(prefix_table, "SCALAR_MAX", scalar_max)
    monkeypatch.setattr(prefix_index, "SCALAR_MAX", scalar_max)
    rng = Random(scalar_max)
    pair = (PrefixIndex(), DictIndex())
    blocks = [BlockHash(rng.randbytes(16)) for _ in range(20_000)]
    for worker in WORKERS[:3]:
        for index in pair:
            index.add_worker(worker)
            index.apply(worker, BlockEvents(0, is_snapshot=True), now_s=0.0)
    for number in range(1, 60):
        for worker in WORKERS[:3]:
            at = rng.randrange(len(blocks))
            events = BlockEvents(
                number, tuple(blocks[at : at + 900]), tuple(rng.sample(blocks, rng.choice((1, 30, 800))))
            )
            for index in pair:
                index.apply(worker, events, now_s=0.0)
        if number % 20 == 0:
            pair[0].check()
        at = rng.randrange(len(blocks))
        assert pair[0].match(blocks[at:]) == pair[1].match(blocks[at:])
    for worker in WORKERS[:3]:
        assert pair[0].block_count(worker) == pair[1].block_count(worker)
    assert pair[0].byte_count <= 100 * max(pair[0].total_blocks, 1024)


@pytest.mark.parametrize("seed", range(12))
def test_a_long_prompt_matches_up_to_the_first_hole_of_each_worker(seed):
    rng = Random(seed)
    chain = [BlockHash(rng.randbytes(16)) for _ in range(rng.choice((97, 500, 3000)))]
    pair = (PrefixIndex(), DictIndex())
    for worker in WORKERS[:3]:
        stored = chain[rng.randrange(20) // 18 : rng.randrange(len(chain) // 2, len(chain) + 1)]
        holes = rng.sample(stored, rng.choice((0, 0, 1, 3)))
        for index in pair:
            index.add_worker(worker)
            index.apply(worker, BlockEvents(0, is_snapshot=True), now_s=0.0)
            index.apply(worker, BlockEvents(1, stored=tuple(stored)), now_s=0.0)
            index.apply(worker, BlockEvents(2, removed=tuple(holes)), now_s=0.0)
    for length in (len(chain), len(chain) - 1, 97):
        found = pair[0].match(chain[:length])
        assert found == pair[1].match(chain[:length])
        assert found


def test_sets_that_nobody_has_are_used_again(monkeypatch):
    monkeypatch.setattr("router.decisions.holder_sets.SETS_MAX", 256)
    rng = Random(1)
    index = PrefixIndex()
    blocks = [BlockHash(rng.randbytes(16)) for _ in range(50)]
    for worker in WORKERS:
        index.add_worker(worker)
        index.apply(worker, BlockEvents(0, is_snapshot=True), now_s=0.0)
    for number in range(1, 40):
        for worker in WORKERS:
            some = tuple(rng.sample(blocks, 3))
            index.apply(worker, BlockEvents(number, stored=some[:2], removed=some[2:]), now_s=0.0)
        index.check()
    for worker in WORKERS:
        index.remove_worker(worker)
    assert index.match(blocks) == {}
    index.check()
