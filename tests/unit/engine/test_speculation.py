import random

from hypothesis import given
from hypothesis import strategies as st

from baton.core.sampling import SamplingParams
from engine.scheduling.speculation import (
    INDEXED_TOKENS_MAX,
    OBSERVED_AT_ONCE_MAX,
    TRIAL_STEPS,
    TRIAL_STEPS_MAX,
    DraftTrials,
    ModelDrafter,
    NgramDrafter,
)
from tests.unit.engine.test_scheduler import Bench, expected, sequence


def observed(tokens):
    drafter, tokens = NgramDrafter(), list(tokens)
    for _ in range(len(tokens) // OBSERVED_AT_ONCE_MAX + 1):
        drafter.observe(tokens)
    return drafter


def test_what_followed_the_same_tokens_is_drafted():
    assert observed([1, 2, 3, 4, 5, 6, 7, 8, 2, 3, 4]).draft(3) == (5, 6, 7)


def test_a_loop_is_drafted_as_a_loop():
    assert observed([9, 9, 1, 2, 1, 2, 1, 2]).draft(5) == (1, 2, 1, 2, 1)


def test_text_that_never_came_before_is_not_drafted():
    drafter = observed(range(50))
    assert (drafter.draft(4), drafter.hit_rate) == ((), 0.0)


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(1, 8))
def test_a_draft_continues_an_earlier_occurrence_of_the_last_two_tokens(tokens, count):
    found = observed(tokens).draft(count)
    assert len(found) in (0, count)
    earlier = [i for i in range(2, len(tokens)) if tokens[i - 2 : i] == tokens[-2:]]
    assert bool(found) == bool(earlier)
    if found:
        assert found[0] in {tokens[i] for i in earlier}


@given(st.lists(st.integers(0, 3), max_size=60))
def test_token_by_token_is_as_all_at_once(tokens):
    one, seen = NgramDrafter(), []
    for token in tokens:
        seen.append(token)
        one.observe(seen)
    assert one.draft(6) == observed(tokens).draft(6)
    assert one.hit_rate == observed(tokens).hit_rate


def test_the_hit_rate_follows_what_comes():
    rng = random.Random(1)
    wrong = observed([rng.randrange(6) for _ in range(400)])
    right = observed([1, 2, 3, 4, 5] * 40)
    assert right.hit_rate > 0.9
    assert wrong.hit_rate < 0.5


def test_a_long_prompt_is_indexed_in_pieces_and_not_without_bound():
    drafter, tokens = NgramDrafter(), [i % 7 for i in range(2 * INDEXED_TOKENS_MAX)]
    drafter.observe(tokens)
    assert drafter.draft(2) == ()  # not all of it is known yet
    for _ in range(INDEXED_TOKENS_MAX // OBSERVED_AT_ONCE_MAX):
        drafter.observe(tokens)
    assert drafter.draft(2) == (tokens[-7], tokens[-6])
    assert len(drafter._after) <= 3 * INDEXED_TOKENS_MAX


def test_drafts_are_kept_as_far_as_they_come_true():
    drafter = ModelDrafter()
    drafter.observe([1])
    drafter.offer((2, 3, 4))
    assert drafter.draft(2) == (2, 3)
    drafter.observe([1, 2])
    assert drafter.draft(5) == (3, 4)
    drafter.observe([1, 2, 9])
    assert drafter.draft(5) == ()


def run(next_token, **engine):
    bench = Bench(blocks=64, step_tokens=64, next_token=next_token, **engine)
    bench.add(sequence("s", range(3), max_tokens=160))
    bench.run()
    assert bench.emitted["s", 0] == expected(range(3), 160, next_token)
    return bench


def test_text_that_repeats_takes_fewer_steps():
    plain = run(lambda tokens: len(tokens) % 9, speculation="off", overlap=True)
    drafted = run(lambda tokens: len(tokens) % 9, speculation="ngram", overlap=True)
    assert drafted.steps < plain.steps / 2.5


def test_a_draft_model_that_is_right_saves_most_steps():
    def next_token(tokens):
        return 10_000 + len(tokens)

    plain = run(next_token, speculation="off", overlap=True)
    drafted = run(next_token, speculation="draft", draft_model="small", overlap=True)
    assert drafted.steps < plain.steps / 2.5
    [history] = [item.history for plan in drafted.plans for item in plan.items if item.history is not None]
    assert history == (0, 1, 2)


def test_a_draft_model_that_is_wrong_is_seldom_asked():
    def next_token(tokens):
        return 10_000 + len(tokens)

    bench = Bench(blocks=64, step_tokens=64, next_token=next_token, speculation="draft", overlap=True)
    bench.computer._drafts = lambda item, tokens, sampled: (7,) * item.want_drafts
    bench.add(sequence("s", range(3), max_tokens=160))
    bench.run()
    assert bench.emitted["s", 0] == expected(range(3), 160, next_token)
    assert sum(item.want_drafts for plan in bench.plans for item in plan.items) < 80
    assert bench.computer.draft_tokens < 40


def test_text_that_does_not_repeat_takes_as_many_steps_all_planned_ahead():
    bench = run(lambda tokens: 10_000 + len(tokens), speculation="ngram", overlap=True)
    assert bench.computer.draft_tokens == 0
    assert sum(item.tokens == (-1,) for plan in bench.plans for item in plan.items) >= 155


def test_drafts_that_keep_failing_are_given_up():
    """Pairs come again, and what follows them is never what followed before."""

    def next_token(tokens):
        position = len(tokens)
        return position % 2 if position % 3 else 1000 + position

    bench = run(next_token, speculation="ngram", overlap=True)
    assert bench.computer.draft_tokens < 40


def test_drafts_stop_paying_in_a_large_batch():
    """Here a step costs by the token, so a draft token costs what a token costs, and fails now and then."""

    def draft_share(batch):
        def next_token(tokens):
            return hash((len(tokens), tokens[0])) % 97 if len(tokens) % 7 == 0 else len(tokens) % 7

        bench = Bench(blocks=400, step_tokens=256, batch=32, next_token=next_token, speculation="ngram")
        bench.step_s = lambda plan: 0.02 + 0.004 * plan.token_count
        bench.add(*(sequence(f"s{i}", [i], max_tokens=42) for i in range(batch)))
        bench.run()
        return bench.computer.draft_tokens / batch

    assert draft_share(32) < draft_share(1) / 2


def test_a_finish_among_right_drafts_ends_the_sequence_there():
    loop = [1, 2, 3, 4, 5, 6]
    params = SamplingParams(max_tokens=90, stop_token_ids=(50,))

    def next_token(tokens):
        return 50 if len(tokens) == 40 else loop[len(tokens) % 6]

    bench = Bench(blocks=64, step_tokens=64, next_token=next_token, speculation="ngram", overlap=True)
    bench.add(sequence("s", range(3), sampling=params))
    bench.run()
    assert bench.emitted["s", 0][-1] == 50
    assert len(bench.emitted["s", 0]) == 38
    bench.assert_empty()


def test_right_drafts_do_not_keep_prompts_out():
    bench = Bench(
        blocks=800,
        step_tokens=24,
        batch=8,
        next_token=lambda tokens: len(tokens) % 3,
        speculation="ngram",
        chunk_tokens_min=6,
    )
    bench.step_s = lambda plan: 0.01  # a draft token costs nothing, so as many as may be are made
    bench.add(*(sequence(f"s{i}", [i], max_tokens=350) for i in range(7)))
    for _ in range(30):
        bench.step()
    assert bench.computer.draft_tokens > 100
    bench.add(sequence("new", range(500, 530)))
    for _ in range(12):
        bench.step()
    assert ("new", 0) in bench.done
    bench.run()


def slow_drafts(until_step, step_s=0.01):
    """Seconds of a step: one with draft tokens is slow at first, as on a machine that is busy then."""

    def seconds(plan):
        drafts = sum(item.draft_count for item in plan.items)
        return step_s * (1 + 9 * min(1, drafts) if plan.step_number < until_step else 1 + 0.02 * drafts)

    return seconds


def test_slow_steps_at_the_start_do_not_switch_drafts_off_for_good():
    bench = Bench(blocks=400, step_tokens=64, next_token=lambda tokens: len(tokens) % 9, speculation="ngram")
    bench.step_s = slow_drafts(until_step=40)
    bench.add(sequence("s", range(3), max_tokens=700))
    for _ in range(40):
        bench.step()
    drafted = bench.computer.draft_tokens
    steps = bench.steps
    bench.run()
    assert bench.computer.draft_tokens - drafted > 300
    assert bench.steps - steps < 300  # of 660 tokens and more


def test_drafts_that_stay_dear_are_tried_ever_more_seldom():
    bench = Bench(blocks=400, step_tokens=64, next_token=lambda tokens: len(tokens) % 9, speculation="ngram")
    bench.step_s = slow_drafts(until_step=10**9)
    bench.add(sequence("s", range(3), max_tokens=1500))
    bench.run()
    with_drafts = sum(any(item.draft_count for item in plan.items) for plan in bench.plans)
    assert with_drafts < 20
    assert bench.emitted["s", 0] == expected(range(3), 1500, lambda tokens: len(tokens) % 9)


@given(st.lists(st.booleans(), min_size=1, max_size=4000))
def test_trials_come_at_least_so_often_and_at_most(has_room):
    """Drafts that are never worth it are tried again for ever, and cost one step in TRIAL_STEPS at most."""
    trials, tried, last = DraftTrials(), [], 0
    for step, room in enumerate(has_room, start=1):
        trials.stepped(has_drafts=False)
        assert step - last <= 2 * TRIAL_STEPS_MAX or not all(has_room[last:step])
        if trials.is_due and room:
            trials.tried()
            tried.append(step)
            last = step
    assert len(tried) <= len(has_room) / TRIAL_STEPS


def test_drafts_that_pay_again_are_tried_as_soon_as_at_first():
    trials = DraftTrials()
    for _ in range(10):
        trials.tried()
    trials.stepped(has_drafts=True)
    for _ in range(TRIAL_STEPS - 1):
        trials.stepped(has_drafts=False)
    assert not trials.is_due
    trials.stepped(has_drafts=False)
    assert trials.is_due
