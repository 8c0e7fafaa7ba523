"""A worker that times itself: enough different steps, within the time, and nothing left behind."""

import itertools
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from baton.core.steps import ItemResult, StepPlan, StepResult
from engine.execution import self_timing
from engine.execution.cached_timings import KEPT, CachedTimings
from engine.execution.executor_timing import time_executor
from engine.execution.self_timing import CHECKED_SHAPES, time_steps
from engine.scheduling.step_time import StepTimeModel, StepWork
from tests.models import make_model
from tests.unit.engine.driver import Driver, load

POOL = {"block_tokens": 16, "block_count": 256, "step_tokens_max": 512, "batch_sequences_max": 64}


class Clocked:
    """An engine whose steps cost what `seconds` says, on a clock of its own."""

    def __init__(self, seconds):
        self.seconds, self.now_s, self.plans = seconds, 0.0, []

    def execute_all(self, plans) -> list[StepResult]:
        return [self.execute(plan) for plan in plans]

    def execute(self, plan: StepPlan) -> StepResult:
        elapsed_s = self.seconds(plan) if plan.items else 0.0
        self.now_s += elapsed_s
        self.plans.append(plan)
        return StepResult(plan.step_number, tuple(ItemResult() for _ in plan.items), elapsed_s)


def linear_s(plan: StepPlan) -> float:
    prompts = sum(len(item.tokens) for item in plan.items if len(item.tokens) > 1)
    decodes = [item for item in plan.items if len(item.tokens) == 1]
    context = sum(item.first_position for item in decodes)
    pairs = sum(len(i.tokens) * i.first_position for i in plan.items if len(i.tokens) > 1)
    return 0.003 + 1e-4 * prompts + 5e-4 * len(decodes) + 2e-7 * context + 1e-9 * pairs


def timed(engine, **changes):
    facts = POOL | {"positions_max": 2047, "vocab": 512, "budget_s": 1.5} | changes
    return time_steps(engine.execute_all, now=lambda: engine.now_s, **facts)


def test_what_it_measures_tells_the_costs_apart():
    model = StepTimeModel()
    for work, elapsed_s in timed(Clocked(linear_s)):
        model.observe(work, elapsed_s)
    costs = model.costs
    assert costs.prompt_token_s == pytest.approx(1e-4, rel=0.2)
    assert costs.decode_s == pytest.approx(5e-4, rel=0.2)
    assert costs.context_token_s == pytest.approx(2e-7, rel=0.3)
    for work in (StepWork(decodes=16, context_tokens=8000), StepWork(prompt_tokens=300)):
        true_s = 0.003 + 1e-4 * work.prompt_tokens + 5e-4 * work.decodes + 2e-7 * work.context_tokens
        assert model.predict_s(work) == pytest.approx(true_s, rel=0.15)


def test_a_slow_worker_learns_what_attention_costs_far_into_a_prompt():
    """A token of a prompt takes a millisecond here, and the whole first chunk of one half of the budget."""

    def seconds(plan):
        (item, *_) = plan.items
        if len(item.tokens) == 1:
            return 0.012 + 0.002 * len(plan.items)
        pairs = len(item.tokens) * item.first_position
        return 0.012 + 1.3e-3 * len(item.tokens) + 3e-7 * pairs

    model = StepTimeModel()
    for work, elapsed_s in timed(Clocked(seconds), positions_max=16_384, block_count=1024):
        model.observe(work, elapsed_s)
    assert model.costs.pair_s == pytest.approx(3e-7, rel=0.3)
    true_s = 16 * 0.012 + 1.3e-3 * 8192 + 3e-7 * 8192 * 8191 / 2
    assert model.prompt_s(0, 8192) == pytest.approx(true_s, rel=0.15)


@pytest.mark.parametrize("slowness", [1, 20, 200])
def test_it_takes_about_as_long_as_it_may(slowness):
    engine = Clocked(lambda plan: slowness * linear_s(plan))
    measured = timed(engine)
    first_two = slowness * 3 * 2 * 0.01
    assert engine.now_s <= 1.5 + first_two + 0.6 * slowness * 0.055
    assert any(work.decodes for work, _ in measured)
    assert any(work.prompt_tokens for work, _ in measured)


def test_a_long_step_is_made_once_and_counts():
    """A chunk of 512 tokens takes 0.5 s here, and is not made again to leave its first time out."""
    engine = Clocked(lambda plan: 0.004 + 1e-3 * sum(len(item.tokens) for item in plan.items))
    measured = timed(engine, budget_s=60.0)
    lengths = [sum(len(item.tokens) for item in plan.items) for plan in engine.plans]
    assert lengths.count(512) == len([1 for work, _ in measured if work.prompt_tokens == 512]) > 0
    assert len([1 for work, _ in measured if work.prompt_tokens == 32]) == 1
    short = [one for one in measured if one[0].decodes == 8 and not one[0].drafts]
    assert short
    assert lengths.count(8) == 2 * len(short)


def test_blocks_and_tokens_exist_and_every_sequence_is_said_goodbye_to():
    for blocks, positions in itertools.product((1, 3, 256), (1, 40, 2047)):
        engine = Clocked(linear_s)
        timed(engine, block_count=blocks, positions_max=positions)
        used = set()
        for plan in engine.plans[:-1]:
            for item in plan.items:
                used.add(item.key)
                assert set(item.block_ids) <= set(range(blocks))
                assert len(set(item.block_ids)) == len(item.block_ids)
                assert len(item.block_ids) * 16 >= item.first_position + len(item.tokens)
                assert item.first_position + len(item.tokens) <= max(positions, 2)
                assert all(0 <= token < 512 for token in item.tokens)
            assert sum(len(item.tokens) for item in plan.items) <= 512
        assert set(engine.plans[-1].ended) == used


def test_a_real_model_leaves_no_trace(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", with_tokenizer=False)
    fresh, timed_one = Driver(load(tmp_path)), Driver(load(tmp_path))
    measured = time_executor(timed_one.executor, 0.5, uses_cache=False)
    assert all(elapsed_s > 0 for _, elapsed_s in measured)
    assert {bool(work.decodes) for work, _ in measured} == {True, False}
    prompt = list(range(3, 66))
    assert timed_one.generate(prompt) == fresh.generate(prompt)


class TwoStages(Clocked):
    """Steps pass two stages, each of which takes half of a step's time and begins the next step then."""

    def execute_all(self, plans) -> list[StepResult]:
        results, begun_s, done_s = [], self.now_s, self.now_s
        for plan in plans:
            half_s = self.seconds(plan) / 2 if plan.items else 0.0
            self.plans.append(plan)
            started_s, before_s = begun_s, done_s
            begun_s += half_s
            done_s = max(begun_s, before_s) + half_s
            overlap_s = max(0.0, before_s - started_s)
            items = tuple(ItemResult() for _ in plan.items)
            results.append(StepResult(plan.step_number, items, done_s - started_s, overlap_s))
        self.now_s = done_s
        return results


def test_stages_are_timed_as_they_work_together():
    """A chunk costs what it adds to the one before, and a token a round of the groups of all sequences."""
    model = StepTimeModel(stages=2)
    for work, elapsed_s in timed(TwoStages(linear_s), stages=2):
        model.observe(work, elapsed_s)
    chunk = StepWork(prompt_tokens=400)
    assert model.predict_s(chunk) == pytest.approx((0.003 + 400e-4) / 2, rel=0.15)
    one, many = StepWork(decodes=1, context_tokens=64), StepWork(decodes=32, context_tokens=32 * 64)
    assert model.predict_s(one) == pytest.approx(0.003 + 5e-4, rel=0.3)
    assert model.predict_s(many) == pytest.approx(2 * (0.003 + 16 * 5e-4 + 16 * 64 * 2e-7) / 2, rel=0.15)


def test_drafts_are_timed_where_there_is_speculation():
    def seconds(plan):
        drafts = sum(item.draft_count for item in plan.items)
        return 0.004 + 5e-4 * len(plan.items) + 3e-4 * drafts if drafts else linear_s(plan)

    model = StepTimeModel()
    for work, elapsed_s in timed(Clocked(seconds), drafts=6):
        model.observe(work, elapsed_s)
    assert model.draft_s == pytest.approx(3e-4, rel=0.4)
    assert not any(work.drafts for work, _ in timed(Clocked(linear_s)))


def timed_again(earlier, seconds=linear_s, **changes):
    """What a second start says, and the number of steps that it made for it."""
    engine = Clocked(seconds)
    steps = timed(engine, earlier=earlier, **changes)
    return steps, len([plan for plan in engine.plans if plan.items])


def test_a_second_start_makes_the_first_few_shapes_only():
    first, made = timed_again([])
    again, made_again = timed_again(first)
    assert dict(again) == pytest.approx(dict(first))
    assert made_again == 2 * (CHECKED_SHAPES + 1) < made / 2
    drafted = timed(Clocked(linear_s), drafts=4)
    assert dict(timed_again(drafted, drafts=4)[0]) == pytest.approx(dict(drafted))


def test_each_start_makes_another_of_the_other_shapes_anew():
    """All were measured while something else had the processor, but for the few that are always made."""
    whole = timed(Clocked(linear_s))
    steps = [
        (work, elapsed_s * (1 if n < CHECKED_SHAPES else 50)) for n, (work, elapsed_s) in enumerate(whole)
    ]
    for _ in range(len(whole) - CHECKED_SHAPES):
        again, made = timed_again(steps)
        assert made in (2 * CHECKED_SHAPES + 1, 2 * CHECKED_SHAPES + 2)  # a long one is made once
        assert dict(again).keys() == dict(steps).keys()
        steps = again
    assert dict(steps) == pytest.approx(dict(whole))


@pytest.mark.parametrize("factor", [0.5, 1.2, 3.0])
def test_a_machine_that_became_faster_or_slower_as_a_whole_is_known(factor):
    first = timed(Clocked(linear_s))
    again, made = timed_again(first, lambda plan: factor * linear_s(plan))
    assert made == 2 * (CHECKED_SHAPES + 1)
    assert dict(again) == pytest.approx({work: factor * elapsed_s for work, elapsed_s in first})


def test_one_kind_of_step_that_has_changed_is_enough():
    """Decodes take as long as before, and prompts three times as long."""
    first = timed(Clocked(linear_s))

    def seconds(plan):
        return linear_s(plan) * (3 if any(len(item.tokens) > 1 for item in plan.items) else 1)

    again, made = timed_again(first, seconds)
    assert made == timed_again([], seconds)[1]
    assert dict(again) == dict(timed(Clocked(seconds)))


def test_later_starts_go_on_where_the_first_had_no_time_left_and_take_less():
    whole = dict(timed(Clocked(linear_s)))
    first = Clocked(linear_s)
    steps = timed(first, budget_s=0.25)
    assert CHECKED_SHAPES < len(steps) < len(whole) - 1
    known = dict(steps).keys()
    for _ in range(2 * len(whole)):
        later = Clocked(linear_s)
        steps = timed(later, budget_s=0.25, earlier=steps)
        assert later.now_s < first.now_s / 2
        assert dict(steps).keys() >= known
        known = dict(steps).keys()
    assert len(known) > CHECKED_SHAPES + 3
    assert dict(steps) == pytest.approx({work: whole[work] for work in known})


def test_timings_of_other_shapes_are_no_use():
    first = timed(Clocked(linear_s), batch_sequences_max=4)
    assert timed_again(first) == timed_again([])


class TestTheCache:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch) -> Path:
        monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
        return tmp_path / "cache" / "timings"

    def test_what_was_written_is_read_by_the_same_facts_only(self, folder):
        timings = [(StepWork(decodes=3, drafts=1), 0.25)]
        CachedTimings(("model", 2)).write(timings)
        assert CachedTimings(("model", 2)).read() == timings
        assert CachedTimings(("model", 1)).read() == []
        assert len(list(folder.iterdir())) == 1

    def test_what_is_broken_is_none_and_replaced(self, folder):
        cached, timings = CachedTimings(("model",)), [(StepWork(), 1.0)]
        absurd = [b"[[{}, %s]]" % one for one in (b'"long"', b"0", b"-1", b"1e300", b"NaN", b"null")]
        for content in (b"", b"{}", b"\xff", *absurd):
            cached.write(timings)
            (file,) = folder.iterdir()
            file.write_bytes(content)
            assert cached.read() == []
        cached.write(timings)
        assert cached.read() == timings

    def test_the_oldest_makes_room(self, folder):
        for number in range(KEPT + 3):
            CachedTimings((number,)).write([])
            newest = CachedTimings((number,))._file
            os.utime(newest, (number, number))
        assert len(list(folder.iterdir())) == KEPT
        assert newest.exists()

    def test_a_folder_that_cannot_be_written_is_no_error(self, folder):
        folder.parent.mkdir()
        folder.write_text("a file")
        CachedTimings(("model",)).write([])
        assert CachedTimings(("model",)).read() == []

    def test_a_workers_second_start_takes_what_its_first_measured(self, folder, tmp_path, monkeypatch):
        """Steps of a tiny model take what other work on the machine leaves, so any factor agrees here."""
        monkeypatch.setattr(self_timing, "CHECK_FACTOR", 1e9)
        make_model(tmp_path / "model", "llama", with_tokenizer=False)
        first, second, other = (load(tmp_path / "model", block_tokens=n) for n in (16, 16, 32))
        measured = time_executor(first, 60.0)
        begun = second.begin = Mock(side_effect=second.begin)
        taken = time_executor(second, 60.0)
        assert begun.call_count <= 2 * (CHECKED_SHAPES + 1) + 1
        assert dict(taken).keys() == dict(measured).keys()
        assert len(measured) > 2 * CHECKED_SHAPES
        time_executor(other, 1.0)
        assert len(list(folder.iterdir())) == 2

    def test_what_a_busy_machine_leaves_time_for_replaces_nothing(self, folder, tmp_path, monkeypatch):
        make_model(tmp_path / "model", "llama", with_tokenizer=False)
        time_executor(load(tmp_path / "model"), 60.0)
        (file,) = folder.iterdir()
        before = file.read_bytes()
        monkeypatch.setattr(self_timing, "CHECK_FACTOR", 0.5)  # nothing agrees with anything
        few = time_executor(load(tmp_path / "model"), 0.0)
        assert 0 < len(few) <= CHECKED_SHAPES
        assert file.read_bytes() == before
        time_executor(load(tmp_path / "model"), 60.0)
        assert file.read_bytes() != before
