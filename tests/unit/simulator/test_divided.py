"""Costs of a model that is divided over ranks, from those of the whole model on one."""

import json
import math

import msgspec
import pytest

from baton.core.costs import StepCosts
from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.core.shape import Shape
from simulator.divided import MeasuredRank, divided_costs
from simulator.fleet.setup import read_costs

WHOLE = StepCosts(0.006, 4e-4, 3e-4, 2e-7, 1e-8)
RANK = MeasuredRank(
    WHOLE, WHOLE, WHOLE, fixed_s=0.001, sum_s=0.0, sum_byte_s=0.0, layers=10, hidden=1000, element_bytes=2
)
WITH_SUMS = msgspec.structs.replace(RANK, sum_s=5e-6, sum_byte_s=1e-10)


@pytest.mark.parametrize("role", list(Role))
def test_one_rank_costs_what_was_measured(role):
    assert divided_costs(WITH_SUMS, Shape(), role) == WHOLE


def test_tensor_ranks_divide_all_but_what_is_fixed():
    costs = divided_costs(RANK, Shape(tensor=2), Role.DECODE)
    assert costs.base_s == pytest.approx(0.001 + 0.005 / 2)
    assert costs.step_s(decodes=8, context_tokens=999) == pytest.approx(
        0.001 + (WHOLE.step_s(decodes=8, context_tokens=999) - 0.001) / 2
    )


@pytest.mark.parametrize("shape", ["tp2", "pp2"])
@pytest.mark.parametrize("role", list(Role))
def test_several_ranks_cost_what_one_costs_beside_another(shape, role):
    slower = StepCosts(0.009, 4e-4, 3e-4, 4e-7, 1e-8)
    shared = msgspec.structs.replace(RANK, beside=slower, beside_unrecorded=slower)
    assert divided_costs(shared, Shape(), role) == WHOLE
    alone = msgspec.structs.replace(shared, costs=slower)
    assert divided_costs(shared, Shape.parse(shape), role) == divided_costs(alone, Shape.parse(shape), role)


def test_tensor_ranks_replay_steps_and_stages_do_not():
    replayed = msgspec.structs.replace(RANK, beside=msgspec.structs.replace(WHOLE, base_s=0.0052))
    costs = divided_costs(replayed, Shape(tensor=2), Role.DECODE)
    assert costs.base_s == pytest.approx(0.0002 + 0.005 / 2)  # 0.8 ms of the fixed 1 ms were saved
    stages = Shape(pipeline=2)
    assert divided_costs(replayed, stages, Role.DECODE) == divided_costs(RANK, stages, Role.DECODE)
    more = msgspec.structs.replace(RANK, beside=msgspec.structs.replace(WHOLE, base_s=0.0005))
    assert divided_costs(more, Shape(tensor=2), Role.DECODE).base_s == pytest.approx(0.005 / 2)


def test_sums_are_paid_per_layer_and_per_token():
    without, with_sums = (divided_costs(rank, Shape(tensor=2), Role.DECODE) for rank in (RANK, WITH_SUMS))
    assert with_sums.base_s - without.base_s == pytest.approx(21 * 5e-6)
    assert with_sums.prompt_token_s - without.prompt_token_s == pytest.approx(20 * 2000 * 1e-10)


def test_stages_share_chunks_and_take_turns_with_tokens():
    chunk, token = (divided_costs(RANK, Shape(pipeline=2), role) for role in (Role.PREFILL, Role.DECODE))
    # A chunk adds a stage's time: half of the work, and all that is fixed.
    assert chunk.base_s + 512 * chunk.prompt_token_s == pytest.approx(0.001 + (0.005 + 512 * 4e-4) / 2)
    # A token of one in eight waits for both stages, with a group of four in each.
    assert token.step_s(decodes=8) == pytest.approx(2 * (0.001 + (0.005 + 4 * 3e-4) / 2))
    assert (chunk.stages, token.stages) == (2, 2)


def test_a_long_prompt_takes_about_half_as_long_in_two_stages():
    two = divided_costs(RANK, Shape(pipeline=2), Role.PREFILL)
    ratio = WHOLE.prompt_s(0, 8192, chunk_tokens=512) / two.prompt_s(0, 8192, chunk_tokens=512)
    assert 1.6 < ratio < 2


def test_the_bench_of_ranks_is_read(tmp_path):
    file = tmp_path / "parallel.json"
    report = {"cores": [0, 1], "one_rank": json.loads(msgspec.json.encode(RANK)), "predictions": []}
    file.write_text(json.dumps(report))
    assert read_costs(file) == RANK
    file.write_text(json.dumps({**report, "one_rank": None}))
    with pytest.raises(SetupError, match="baton bench parallel"):
        read_costs(file)


@pytest.mark.parametrize("shape", ["tp2", "pp2", "tp2pp2", "tp4pp3"])
@pytest.mark.parametrize("role", list(Role))
def test_costs_of_every_shape_are_usable(shape, role):
    costs = divided_costs(WITH_SUMS, Shape.parse(shape), role)
    assert costs.is_usable
    assert all(math.isfinite(x) and x > 0 for x in (costs.base_s, costs.prompt_token_s, costs.decode_s))
