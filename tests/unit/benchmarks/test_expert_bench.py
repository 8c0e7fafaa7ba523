"""The baseline of `baton bench experts`, and its output."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.experts.counts import adversarial
from benchmarks.experts.eplb import balanced_packing, place_as_eplb, replicate_experts
from benchmarks.experts.placement import (
    BALANCE_LOSS_MAX,
    MIGRATION_PART_MAX,
    ExpertCase,
    compare,
    migration_count,
    slots_of_ranks,
)
from commands.bench import app
from control_plane.experts.values import EMPTY


def test_the_baseline_gives_slots_to_the_expert_whose_replicas_have_most_load():
    assert replicate_experts(np.array([[90.0, 40.0, 20.0]]), 6).tolist() == [[3, 2, 1]]


def test_the_baseline_packs_the_largest_first_on_the_pack_with_least_load():
    packs = balanced_packing(np.array([[4.0, 3.0, 2.0, 1.0]]), np.array([2, 2]))
    assert packs.tolist() == [[0, 1, 1, 0]]


def test_the_baseline_keeps_groups_on_nodes():
    loads = np.random.default_rng(3).random((2, 16))
    slots = place_as_eplb(loads, np.full(4, 5), group_count=4, node_count=2)
    for of_layer in slots.reshape(2, 2, -1):
        nodes = [{int(e) // 4 for e in of_node if e != EMPTY} for of_node in of_layer]
        assert sorted(nodes[0] | nodes[1]) == [0, 1, 2, 3]
        assert not nodes[0] & nodes[1]


def test_slots_are_those_of_experts_and_redundant_ones():
    assert slots_of_ranks(256, 64, 0.25).tolist() == [5] * 64
    assert slots_of_ranks(10, 4, 0).tolist() == [3, 3, 2, 2]


def test_a_migration_is_an_expert_that_a_rank_did_not_have():
    old = np.array([[[0, 1], [2, EMPTY]]])
    new = np.array([[[1, 2], [2, 0]]])
    assert migration_count(old, new, 3) == 2


@pytest.mark.parametrize(
    ("balance", "migrations", "is_within"), [(0.90, 50, True), (0.88, 50, False), (0.95, 51, False)]
)
def test_bounds(balance, migrations, is_within):
    case = ExpertCase(
        *("zipf", 1, 8, 2, 0.0, 1, [balance], [0.9], 0.0, [migrations], [100], [1.0], [1.0], 1.0)
    )
    assert case.is_within_bounds == is_within


def test_the_command_compares_every_kind_of_counts(tmp_path):
    (tmp_path / "a.txt").write_text("one token and another, again and again. " * 400)
    sizes = ["--ranks", "4", "--redundancy", "0.25", "--layers", "2", "--experts", "16", "--times", "3"]
    words = ["experts", *sizes, "--text", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    cases = json.loads(result.stdout)["cases"]
    assert [case["counts"] for case in cases] == ["uniform", "zipf", "adversarial", "recorded"]
    assert all(len(case["balance"]) == 2 for case in cases)


def test_recorded_counts_follow_the_text(tmp_path):
    from benchmarks.experts.recorded import recorded

    (tmp_path / "a.txt").write_text("one token and another, again and again. " * 200)
    (tmp_path / "b.txt").write_text("Ganz andere Wörter stehen in diesem zweiten Text! " * 200)
    notes = []
    first, second = recorded(2, 16, text=tmp_path, seed=1, progress=notes.append)
    assert first.shape == second.shape == (8, 16)
    assert len(notes) == 2
    assert first.sum(axis=1).tolist() == [first[0].sum()] * 8, "every layer sees every token"
    assert not np.allclose(first / first.sum(), second / second.sum(), rtol=0.1)


@pytest.mark.parametrize(
    ("ranks", "redundancy", "groups"), [(32, 0.0625, 1), (64, 0.25, 1), (32, 0.25, 8), (64, 0.25, 8)]
)
def test_counts_that_change_altogether_keep_the_bounds(ranks, redundancy, groups):
    """Rows in which no exchange of two ranks helps are among them, and nodes with little load."""
    counts = adversarial(4, 61, 256, seed=1)
    case = compare(
        counts, name="adversarial", ranks=ranks, redundancy=redundancy, node_ranks=8, groups=groups
    )
    assert case.balance_difference >= -BALANCE_LOSS_MAX
    assert case.migration_part <= MIGRATION_PART_MAX
    assert case.worst_layer > -0.1


def drifting(times, layers, experts, *, seed):
    """Loads like those recorded from text: a few experts have ten times the mean, and all change by half."""
    random = np.random.default_rng(seed)
    shares = random.normal(0, 1.3, (layers, experts))
    found = []
    for _ in range(times):
        loads = np.exp(shares)
        found.append(np.minimum(loads, 12 * loads.mean(axis=1, keepdims=True)))
        shares = 0.92 * shares + random.normal(0, 0.5, shares.shape)
    return found


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_layer_stays_behind_on_ranks_of_two_or_three_experts(seed):
    counts = drifting(5, 8, 256, seed=seed)
    case = compare(counts, name="drifting", ranks=128, redundancy=0.25, node_ranks=8, groups=1)
    assert case.worst_layer > -0.012
    assert case.balance_difference >= -BALANCE_LOSS_MAX
    assert case.migration_part <= 0.46, "less than the bound, which counts from text may come near"


@pytest.mark.parametrize("seed", [2, 3])
def test_all_layers_of_a_large_model_get_to_their_goal_on_ranks_of_two_or_three_experts(seed):
    """There is time for tens of exchanges in each of 61 layers."""
    counts = drifting(4, 61, 256, seed=seed)
    case = compare(counts, name="drifting", ranks=128, redundancy=0.25, node_ranks=8, groups=1)
    assert case.balance_difference >= -BALANCE_LOSS_MAX
    assert case.migration_part <= MIGRATION_PART_MAX


def test_the_baseline_keeps_groups_on_nodes_of_unlike_slots():
    loads = np.random.default_rng(3).random((2, 16))
    slots = place_as_eplb(loads, np.array([5, 5, 4, 4]), group_count=4, node_count=2)
    for of_layer in slots:
        assert [int((of_rank != EMPTY).sum()) for of_rank in of_layer] == [5, 5, 4, 4]
        nodes = [{int(e) // 4 for e in of_node if e != EMPTY} for of_node in of_layer.reshape(2, -1)]
        assert sorted(nodes[0] | nodes[1]) == [0, 1, 2, 3]
        assert not nodes[0] & nodes[1]
