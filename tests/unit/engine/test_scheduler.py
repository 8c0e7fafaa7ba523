from collections import deque

from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.config import EngineConfig
from baton.core.hashing import root_hash
from baton.core.ids import SeqKey
from baton.core.messages import Phase
from baton.core.sampling import SamplingParams
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from tests.fake_engine import FakeEngine, crc_token

BLOCK_TOKENS = 4
ROOT = root_hash("f", b"")
next_token = crc_token


def sequence(name, prompt, *, max_tokens=1, phase=Phase.AGGREGATED, sampling=None, **more):
    params = sampling or SamplingParams(max_tokens=max_tokens)
    return Sequence(SeqKey(name, 0), phase, list(prompt), len(prompt), params, ROOT, BLOCK_TOKENS, **more)


class Bench:
    """A scheduler, an engine of dictionaries, and a clock of one second per step."""

    def __init__(self, *, blocks=16, step_tokens=8, batch=4, overlap=False, next_token=crc_token, **engine):
        engine = {"speculation": "off", "tpot_slo_s": 0.0, **engine}
        config = EngineConfig(
            step_tokens_max=step_tokens, batch_sequences_max=batch, overlap_steps=overlap, **engine
        )
        self.step_tokens, self.batch = step_tokens, batch
        self.pool = BlockPool(blocks, [0] * blocks)
        self.cache = PrefixCache(self.pool)
        self.scheduler = Scheduler(self.cache, config, block_tokens=BLOCK_TOKENS, block_bytes=1)
        self.computer = FakeEngine(blocks, BLOCK_TOKENS, next_token)
        self.emitted = {}
        self.first_step = {}
        self.done = []
        self.line = deque()
        self.plans = []
        self.steps = 0
        self.now_s = 0.0
        self.step_s = lambda plan: 0.01

    @property
    def computed_tokens(self):
        return self.computer.computed_tokens

    def add(self, *sequences):
        for seq in sequences:
            self.emitted[seq.key] = []
            self.scheduler.add(seq, now_s=self.now_s)

    def plan(self):
        """Plan as many steps as may be under way. True if there is one to compute."""
        while self.scheduler.can_plan and (plan := self.scheduler.plan(now_s=self.now_s)) is not None:
            self.check()
            assert 0 < plan.token_count <= self.step_tokens
            assert len(plan.items) <= self.batch
            self.steps += 1
            for item in plan.items:
                self.first_step.setdefault(item.key, self.steps)
            self.line.append(plan)
            self.plans.append(plan)
        self.check()
        return bool(self.line)

    def step(self, before_finish=None):
        if not self.plan():
            return None
        plan = self.line.popleft()
        result = self.computer.run(plan, self.step_s(plan))
        self.now_s += 1.0
        if before_finish is not None:
            before_finish()
        for progress in self.scheduler.finish_step(result):
            self._after(progress)
        self.check()
        return plan

    def _after(self, progress):
        seq = progress.sequence
        if progress.tokens:
            self.emitted[seq.key] += progress.tokens
            assert self.emitted[seq.key] == seq.tokens[seq.prompt_token_count :]
            if seq.phase is Phase.PREFILL or seq.finish is not None:
                self.done.append(seq.key)
                self.scheduler.remove(seq)

    def run(self, steps_max=2000):
        for _ in range(steps_max):
            if self.step() is None:
                return
        raise AssertionError("does not come to rest")

    def check(self):
        self.pool.check()
        self.cache.check()
        self.scheduler.check()

    def assert_empty(self):
        assert self.scheduler.is_empty
        assert self.pool.held_count == 0


def looping_token(tokens):
    """Repeats what came five tokens ago, mostly: draft tokens are right more often than not."""
    chance = crc_token(tokens)
    return tokens[-5] if len(tokens) > 5 and chance % 8 else chance


def expected(prompt, count, next_token=crc_token):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # which family of prompts: members share prefixes
        st.integers(1, 30),  # prompt tokens
        st.integers(1, 20),  # generated tokens
        st.sampled_from([Phase.AGGREGATED, Phase.AGGREGATED, Phase.PREFILL]),
        st.integers(0, 6),  # steps before the next arrives
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=REQUESTS,
    blocks=st.integers(13, 30),
    step_tokens=st.integers(1, 24),
    batch=st.integers(1, 6),
    overlap=st.booleans(),
    swap_bytes=st.sampled_from([0, 8, 100]),
    speculation=st.sampled_from(["off", "ngram"]),
    loop=st.booleans(),
    shape=st.sampled_from(["1", "pp2", "pp3"]),
)
@example(  # one is preempted and admitted again for the same step
    requests=[
        (0, 26, 13, Phase.AGGREGATED, 4),
        (0, 26, 12, Phase.AGGREGATED, 4),
        (0, 1, 1, Phase.AGGREGATED, 0),
        (0, 1, 13, Phase.AGGREGATED, 0),
    ],
    blocks=13,
    step_tokens=2,
    batch=3,
    overlap=False,
    swap_bytes=0,
    speculation="off",
    loop=False,
    shape="1",
)
def test_every_sequence_completes_with_its_own_tokens(
    requests, blocks, step_tokens, batch, overlap, swap_bytes, speculation, loop, shape
):
    """Whatever is preempted, swapped, cached, copied, guessed, chunked or interleaved; the pool always
    holds the largest alone."""
    chooses = looping_token if loop else crc_token
    bench = Bench(
        blocks=blocks,
        step_tokens=step_tokens,
        batch=batch,
        overlap=overlap,
        swap_bytes=swap_bytes,
        speculation=speculation,
        next_token=chooses,
        shape=shape,
    )
    want = {}
    for i, (family, prompt_count, token_count, phase, gap) in enumerate(requests):
        prompt = [family * 100 + p for p in range(prompt_count)]
        count = 1 if phase is Phase.PREFILL else token_count
        sampling = SamplingParams(max_tokens=count, presence_penalty=float(i % 2))
        bench.add(sequence(f"s{i}", prompt, phase=phase, sampling=sampling, priority=i % 3))
        want[SeqKey(f"s{i}", 0)] = expected(prompt, count, chooses)
        for _ in range(gap):
            bench.step()
    bench.run()
    assert bench.emitted == want
    bench.assert_empty()


@settings(max_examples=60, deadline=None)
@given(
    requests=REQUESTS,
    data=st.data(),
    overlap=st.booleans(),
    swap_bytes=st.sampled_from([0, 20]),
    shape=st.sampled_from(["1", "pp2"]),
)
def test_cancelling_at_any_moment_gives_everything_back(requests, data, overlap, swap_bytes, shape):
    bench = Bench(
        blocks=14,
        overlap=overlap,
        swap_bytes=swap_bytes,
        speculation="ngram",
        next_token=looping_token,
        shape=shape,
    )
    live = []
    for i, (family, prompt_count, token_count, phase, _) in enumerate(requests):
        seq = sequence(f"s{i}", [family] * prompt_count, max_tokens=token_count, phase=phase)
        bench.add(seq)
        live.append(seq)

    def cancel_one():
        running = [seq for seq in live if seq.key not in bench.done]
        if running and data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(running))
            live.remove(victim)
            bench.done.append(victim.key)
            bench.scheduler.remove(victim)

    for _ in range(2000):
        cancel_one()
        if bench.step(before_finish=cancel_one) is None:
            break
    bench.assert_empty()


def test_a_cancelled_sequence_keeps_its_blocks_until_the_step_is_done():
    bench = Bench()
    seq = sequence("s", range(5))
    bench.add(seq)
    plan = bench.scheduler.plan(now_s=0.0)
    bench.scheduler.remove(seq)
    assert bench.pool.held_count == 2
    assert bench.scheduler.finish_step(bench.computer.run(plan)) == []
    bench.assert_empty()


def test_decodes_go_first_and_prompts_fill_the_budget():
    bench = Bench(step_tokens=8)
    bench.add(sequence("a", range(3), max_tokens=9))
    bench.step()
    bench.add(sequence("b", range(50, 70), max_tokens=1))
    plan = bench.step()
    assert [(item.key.seq_id, len(item.tokens)) for item in plan.items] == [("a", 1), ("b", 7)]


def test_the_oldest_in_the_queue_is_passed_by_three_smaller_ones_at_most():
    bench = Bench(blocks=8, step_tokens=32)
    bench.add(sequence("running", range(12), max_tokens=8))
    bench.step()
    bench.add(sequence("large", range(100, 124)))  # seven blocks: must wait
    bench.add(*(sequence(f"small{i}", [200 + i]) for i in range(5)))
    bench.run()
    started_before = [i for i in range(5) if bench.first_step[f"small{i}", 0] < bench.first_step["large", 0]]
    assert len(started_before) <= 3


def test_a_budget_smaller_than_the_batch_goes_round():
    bench = Bench(step_tokens=2, batch=4)
    bench.add(*(sequence(f"s{i}", [i], max_tokens=10) for i in range(4)))
    for _ in range(12):
        bench.step()
    counts = sorted(len(tokens) for tokens in bench.emitted.values())
    assert counts[-1] - counts[0] <= 2


def test_prompts_make_progress_beside_decodes_that_fill_the_budget():
    bench = Bench(blocks=32, step_tokens=3, batch=4)
    bench.add(*(sequence(f"d{i}", [i], max_tokens=40) for i in range(3)))
    for _ in range(4):
        bench.step()
    bench.add(sequence("p", range(50, 54)))
    for _ in range(8):
        bench.step()
    assert bench.emitted["p", 0]


def test_the_youngest_is_preempted_and_what_it_computed_is_found_again():
    bench = Bench(blocks=5, step_tokens=32)
    old, young = sequence("old", range(7), max_tokens=8), sequence("young", range(100, 107), max_tokens=4)
    bench.add(old, young)
    bench.run()
    assert bench.emitted["old", 0] == expected(range(7), 8)
    assert bench.emitted["young", 0] == expected(range(100, 107), 4)
    assert bench.done[0] == old.key


def test_a_fully_cached_prompt_still_computes_its_last_token():
    bench = Bench(step_tokens=32)
    bench.add(sequence("a", range(8)))
    bench.run()
    again = sequence("b", range(8))
    bench.add(again)
    plan = bench.step()
    [item] = plan.items
    assert item.first_position == again.cached_token_count == 7  # a block, and a copied tail
    assert bench.emitted["b", 0] == bench.emitted["a", 0]


def test_generated_blocks_are_cached_too():
    bench = Bench(step_tokens=32)
    bench.add(sequence("a", range(6), max_tokens=7))
    bench.run()
    follow_up = sequence("b", [*range(6), *bench.emitted["a", 0], 77])
    bench.add(follow_up)
    bench.run()
    assert follow_up.cached_token_count == 12  # the last generated token was never computed


def test_prefill_phases_are_never_preempted():
    """When no block is left the older, generating sequence gives way itself."""
    bench = Bench(blocks=6, step_tokens=2)
    whole, prefill = (
        sequence("whole", range(4), max_tokens=14),
        sequence("p", range(50, 62), phase=Phase.PREFILL),
    )
    bench.add(whole)
    bench.step()
    bench.add(prefill)
    bench.step()
    was_preempted = False
    while prefill.key not in bench.done:
        bench.step()
        was_preempted |= not whole.block_ids
        assert len(prefill.block_ids) in (0, 3) if prefill.key in bench.done else len(prefill.block_ids) == 3
    bench.run()
    assert was_preempted
    assert bench.emitted[whole.key] == expected(range(4), 14)


def test_while_the_head_of_the_queue_lacks_blocks_nobody_else_may_reserve():
    bench = Bench(blocks=8, step_tokens=32)
    bench.add(sequence("running", range(8), max_tokens=8))
    bench.step()
    assert bench.scheduler.keep_free == 1
    bench.add(sequence("large", range(100, 124)))
    bench.step()
    assert bench.scheduler.keep_free == 8
    bench.run()
    assert bench.scheduler.keep_free == 0


def test_joined_sequences_run_without_a_prompt_step():
    bench = Bench()
    seq = sequence("j", range(4), max_tokens=3)
    seq.block_ids = bench.pool.allocate(2)
    for i, token in enumerate(range(4)):
        bench.computer.memory[seq.block_ids[0]][i] = token
    bench.emitted[seq.key] = [next_token(range(4))]
    seq.tokens.append(bench.emitted[seq.key][0])
    seq.computed_count, seq.committed_count = 4, 0
    bench.scheduler.join(seq, now_s=0.0)
    [item] = bench.step().items
    assert item.first_position == 4
    bench.run()
    assert bench.emitted[seq.key] == expected(range(4), 3)
    bench.assert_empty()
