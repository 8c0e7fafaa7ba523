import random

import pytest

from baton.core.chunks import tokens_within
from baton.core.costs import prompt_pairs
from engine.scheduling.step_time import StepTimeModel, StepWork

TRUE_S = {"base": 0.004, "prompt": 4e-4, "decode": 1e-3, "context": 2e-7}


def true_s(work):
    prompts = TRUE_S["prompt"] * work.prompt_tokens
    return (
        TRUE_S["base"] + prompts + TRUE_S["decode"] * work.decodes + TRUE_S["context"] * work.context_tokens
    )


def taught(step_count, *, stalls=0.0, seed=1):
    rng, model = random.Random(seed), StepTimeModel()
    for _ in range(step_count):
        decodes = rng.randrange(0, 33)
        prompts = rng.choice((0, 0, 64, 256, 512))
        work = StepWork(prompts, decodes, rng.randrange(20_000))
        elapsed_s = true_s(work) * rng.uniform(0.95, 1.05)
        if rng.random() < stalls:
            elapsed_s += 3.0
        model.observe(work, elapsed_s)
    return model


@pytest.mark.parametrize("work", [StepWork(512), StepWork(0, 32, 16_000), StepWork(64, 16, 8_000)])
def test_it_learns_what_steps_cost(work):
    assert taught(150).predict_s(work) == pytest.approx(true_s(work), rel=0.15)


@pytest.mark.parametrize("decodes", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(("base_s", "few_s"), [(0.00408, 0.0005), (0.0146, -0.0006)])
def test_it_learns_that_the_first_sequences_cost_more_or_less(base_s, few_s, decodes):
    """The times are a worker's on a CPU: 5.4, 14.9 and 35.5 ms for 1, 8 and 32 sequences of one rank, and
    15, 17 and 37 ms of two stages."""

    def seconds(count):
        return base_s + 0.00086 * count + few_s * min(count, 8)

    rng, model = random.Random(5), StepTimeModel()
    for _ in range(200):
        count = rng.randrange(1, 33)
        model.observe(StepWork(0, count, 512 * count), seconds(count) * rng.uniform(0.95, 1.05))
    told = model.seen_costs
    assert told is not None
    assert told.is_usable
    assert (told.few_decode_s > 0) is (few_s > 0)
    assert told.step_s(decodes=decodes, context_tokens=512 * decodes) == pytest.approx(
        seconds(decodes), rel=0.06
    )


def test_stalls_do_not_become_the_cost_of_tokens():
    assert taught(300, stalls=0.02).predict_s(StepWork(512)) < 2 * true_s(StepWork(512))


def test_no_kind_of_work_costs_less_than_nothing():
    model = StepTimeModel()
    for prompts, elapsed_s in ((512, 0.01), (64, 0.2), (512, 0.02), (8, 0.5)) * 20:
        model.observe(StepWork(prompts, 4), elapsed_s)
    more = StepWork(600, 8, 1000, 4, 4)
    assert model.predict_s(more) >= model.predict_s(StepWork(512, 4)) >= 0


def test_a_machine_that_becomes_slower_is_believed():
    model = taught(150)
    for _ in range(80):
        work = StepWork(128, 8, 4000)
        model.observe(work, 20 * true_s(work))
    assert model.predict_s(StepWork(128, 8, 4000)) > 10 * true_s(StepWork(128, 8, 4000))


def test_the_chunk_that_fits_an_objective_takes_that_long():
    model, beside = taught(150), StepWork(0, 8, 4000)
    costs, left_s = model.costs, 0.1 - model.compute_s(beside)
    tokens = tokens_within(left_s, 0, token_s=costs.prompt_token_s, pair_s=costs.pair_s)
    pairs = prompt_pairs(0, tokens)
    assert true_s(StepWork(tokens, 8, 4000, pairs=pairs)) == pytest.approx(0.1, rel=0.15)


def test_what_is_told_tells_costs_apart_after_many_steps_alike():
    """Recent costs may differ: fifty steps alike cannot tell the costs of their parts apart."""
    rng, model = random.Random(3), taught(900)
    for _ in range(200):
        work = StepWork(0, 16, 8_000)
        model.observe(work, true_s(work) * rng.uniform(0.8, 1.25))
    told = model.seen_costs
    assert told is not None
    assert told.base_s == pytest.approx(TRUE_S["base"], rel=0.3)
    assert told.prompt_token_s == pytest.approx(TRUE_S["prompt"], rel=0.1)
    assert told.decode_s == pytest.approx(TRUE_S["decode"], rel=0.15)
    assert model.seen_costs == told  # telling changes nothing


def test_steps_at_the_floor_say_nothing_about_their_own_costs() -> None:
    """Weights are read in 100 ms. Decodes compute for less, long prompts for longer."""
    times = StepTimeModel(floor_s=0.1)
    for _ in range(40):
        times.observe(StepWork(decodes=4, context_tokens=400), 0.102)
        times.observe(StepWork(prompt_tokens=512, pairs=130_816), 0.256)
        times.observe(StepWork(prompt_tokens=1024, pairs=523_776), 0.512)
    assert times.predict_s(StepWork(decodes=4, context_tokens=400)) == pytest.approx(0.1)
    assert times.predict_s(StepWork(decodes=5, prompt_tokens=64)) == pytest.approx(0.1)
    assert times.predict_s(StepWork(prompt_tokens=768, pairs=294_528)) == pytest.approx(0.384, rel=0.15)
    costs = times.seen_costs
    assert costs is not None
    assert costs.floor_s == 0.1
    assert costs.base_s < 0.05, "the floor was learnt as a cost of computing"
    # What computes beside the reading is free.
    assert 0.1 - times.compute_s(StepWork(decodes=4)) > 100 * times.costs.prompt_token_s


def test_a_floor_that_was_measured_too_high_sinks() -> None:
    times = StepTimeModel(floor_s=0.2)
    for _ in range(60):
        times.observe(StepWork(decodes=1), 0.1)
    assert times.predict_s(StepWork(decodes=1)) == pytest.approx(0.1, rel=0.05)
