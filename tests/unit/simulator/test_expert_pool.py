"""Costs of pools whose experts are divided: bytes, overlap, balance, memory, and published figures."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.experts import ExpertsConfig
from baton.core.errors import SetupError
from benchmarks.expert_nodes.published import CASES, predict
from simulator.experts.layout import ExpertLayout, layout_of, slots_needed
from simulator.experts.pool import ExpertPool
from simulator.experts.popularity import ExpertPopularity
from simulator.experts.stages import ExpertStepWork
from simulator.experts.timeline import LayerParts, layer_s
from simulator.experts.traffic import nodes_per_token, ranks_per_token, traffic_of
from simulator.hardware import find_gpu
from simulator.models import MODELS, ModelShape

DEEPSEEK = MODELS["deepseek-v3"]
SMALL = ModelShape(
    "small", 4, 1024, 8, 8, 128, 512, 1000, experts=16, experts_used=2, groups=4, groups_used=2
)


def pool(ranks=32, slots=9, load="zipf:1.0", model=DEEPSEEK, **layout):
    popularity = ExpertPopularity.parse(load, model)
    return ExpertPool(model, find_gpu("h100"), ExpertLayout(ranks, ranks, slots, **layout), popularity)


# --- published figures ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_data_sheets_predict_published_throughput_within_a_fifth(case):
    row = predict(case, "zipf:1.0", with_fleet=False)
    assert abs(row.difference) <= 0.2


@pytest.mark.parametrize("load", ["uniform", "zipf:0.5"])
@pytest.mark.parametrize("case", [case for case in CASES if case.is_main], ids=lambda case: case.name)
def test_the_prediction_does_not_hang_on_how_uneven_tokens_are_taken_to_be(case, load):
    assert abs(predict(case, load, with_fleet=False).difference) <= 0.2


# --- rows of tokens -------------------------------------------------------------------------------


def drawn_destinations(model: ModelShape, nodes: int, node_ranks: int, *, by_group: bool):
    """Count nodes and ranks of tokens whose experts are drawn, with groups in order on the nodes, and the
    experts of a node in any order on its ranks."""
    random = np.random.default_rng(5)
    per_group, per_node = model.experts // model.groups, model.experts // nodes
    per_rank = per_node // node_ranks
    places = np.concatenate([node * per_node + random.permutation(per_node) for node in range(nodes)])
    found: list[tuple[int, int]] = []
    for _ in range(4000):
        if by_group:
            groups = random.choice(model.groups, model.groups_used, replace=False)
            able = np.concatenate([np.arange(g * per_group, (g + 1) * per_group) for g in groups])
        else:
            able = np.arange(model.experts)
        ranks = {int(places[e]) // per_rank for e in random.choice(able, model.experts_used, replace=False)}
        found.append((len({rank // node_ranks for rank in ranks}), len(ranks)))
    return np.mean(found, axis=0)


@pytest.mark.parametrize(("nodes", "by_group"), [(4, True), (8, True), (2, True), (4, False), (8, False)])
def test_nodes_and_ranks_of_a_token_are_those_that_drawing_gives(nodes, by_group):
    drawn_nodes, drawn_ranks = drawn_destinations(DEEPSEEK, nodes, 8, by_group=by_group)
    layout = ExpertLayout(nodes * 8, nodes * 8, 256 // (nodes * 8))
    groups = {"has_whole_groups": by_group}
    assert nodes_per_token(DEEPSEEK, nodes, **groups) == pytest.approx(drawn_nodes, rel=0.03)
    assert ranks_per_token(DEEPSEEK, layout, **groups) == pytest.approx(drawn_ranks, rel=0.06)


def test_a_row_crosses_the_network_once_per_node_or_once_per_rank():
    layout = ExpertLayout(32, 32, 8, sent_bytes=1.0, returned_bytes=2.0)
    per_rank = traffic_of(DEEPSEEK, layout, has_whole_groups=False)
    per_node = traffic_of(DEEPSEEK, replace(layout, once_per_node=True), has_whole_groups=False)
    row = 7168 * (1 + 4 / 128)
    ranks = 32 * (1 - (31 / 32) ** 8)
    assert per_rank.network_out == pytest.approx(ranks * 24 / 32 * row)
    assert per_rank.network_back == pytest.approx(8 * 24 / 32 * 7168 * 2)
    assert per_node.network_out == pytest.approx(4 * (1 - (3 / 4) ** 8) * 3 / 4 * row)
    assert per_node.network_out < per_rank.network_out / 1.5


def test_on_one_node_no_row_crosses_the_network_and_apart_all_do():
    alone = traffic_of(SMALL, ExpertLayout(8, 8, 2), has_whole_groups=False)
    assert alone.network_out == alone.network_back == 0.0
    assert alone.peer_out > 0.0
    apart = traffic_of(SMALL, ExpertLayout(8, 4, 2, is_apart=True), has_whole_groups=False)
    assert apart.peer_out == apart.peer_back == 0.0
    assert apart.network_back == pytest.approx(2 * 1024 * 2)


# --- overlap --------------------------------------------------------------------------------------

times = st.floats(0.0, 1.0)


@settings(max_examples=200, deadline=None)
@given(parts=st.builds(LayerParts, times, times, times, times, times), apart=st.booleans())
def test_halves_in_turn_take_no_less_than_the_busiest_and_no_more_than_all_after_another(parts, apart):
    each = layer_s(parts, halves=2, is_apart=apart)
    network_s = parts.dispatch_s + parts.combine_s
    busiest_s = (
        max(parts.attention_s + parts.shared_s, parts.experts_s, network_s)
        if apart
        else max(parts.computed_s, network_s)
    )
    way_s = parts.attention_s + max(parts.dispatch_s, 0.0) + parts.experts_s + parts.combine_s
    assert each >= max(2 * busiest_s, way_s) - 1e-9
    assert each <= 2 * (parts.computed_s + network_s) + 1e-9


@given(parts=st.builds(LayerParts, times, times, times, times, times))
def test_one_batch_waits_for_its_rows_and_computes_shared_experts_meanwhile(parts):
    away_s = max(parts.dispatch_s, parts.shared_s)
    expected_s = parts.attention_s + away_s + parts.experts_s + parts.combine_s
    assert layer_s(parts, halves=1, is_apart=False) == pytest.approx(expected_s)


def test_the_gain_of_two_halves_in_prefill_is_as_published():
    """The report says 27 to 35 % at 8,192 tokens per GPU."""
    work = ExpertStepWork(prompt_tokens=8192, pairs=8192 * 2048)
    two, one = (pool(once_per_node=True, overlaps=overlaps).step_s(work) for overlaps in (True, False))
    assert 1.2 < one / two < 1.4


def test_small_batches_are_not_divided():
    work = ExpertStepWork(decodes=4, context_tokens=8000)
    assert pool(overlaps=True).step_s(work) == pool(overlaps=False).step_s(work)


# --- balance and memory ---------------------------------------------------------------------------


def test_no_expert_gets_more_than_one_row_of_a_token():
    popularity = ExpertPopularity.parse("zipf:2.0", DEEPSEEK)
    assert popularity.shares.max() <= 1 / 8 * (1 + 1e-9)
    assert popularity.shares.sum(axis=1) == pytest.approx(np.ones(58))
    uniform = ExpertPopularity.parse("uniform", DEEPSEEK)
    assert uniform.shares == pytest.approx(np.full((58, 256), 1 / 256))


def test_counts_of_a_file_are_repeated_over_the_layers(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps([[1, *[0] * 14, 3], [2.5] * 16, [1] * 16]))
    shares = ExpertPopularity.parse(str(path), SMALL).shares
    assert shares.shape == (4, 16)
    assert shares[0] == pytest.approx([0.25, *[0] * 14, 0.75])
    assert (shares[3] == shares[0]).all()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("zipf:x", "write zipf: and an exponent"),
        ("zipf:9", "from 0 to 4"),
        ("nosuch.json", "cannot read counts"),
        ("[[1]", "is no list of counts"),
        ("[[1, 2], [1]]", "as many counts"),
        ("[]", "as many counts"),
        ("[[1, -2]]", "0 or more"),
        ("[[1, 2]]", "counts 2 experts"),
        (json.dumps([[0] * 16]), "no rows at all"),
    ],
)
def test_counts_that_are_none_are_refused(tmp_path, text, complaint):
    path = tmp_path / "counts.json"
    path.write_text(text)
    name = text if text.startswith(("zipf", "no")) else str(path)
    with pytest.raises(SetupError, match=complaint):
        ExpertPopularity.parse(name, SMALL)


def test_redundant_slots_even_out_what_replicas_can():
    free = replace(DEEPSEEK, groups=1)
    tight, loose = pool(64, 4, model=free), pool(64, 6, model=free)
    assert tight.unevenness(8192).rank > 2 * loose.unevenness(8192).rank
    assert loose.unevenness(8192).rank < 1.1
    # A small step has not seen the mean yet.
    assert loose.unevenness(16).rank > loose.unevenness(8192).rank


def test_memory_of_a_rank_falls_with_their_number():
    rooms = {ranks: pool(ranks, slots_needed(DEEPSEEK, ranks=ranks, replicas=1)) for ranks in (32, 64, 128)}
    experts = {ranks: one.rank_bytes for ranks, one in rooms.items()}
    assert experts[64] / experts[32] == pytest.approx(0.5, rel=0.01)
    assert experts[128] / experts[32] == pytest.approx(0.25, rel=0.02)
    free = {ranks: one.kv_pool_bytes() for ranks, one in rooms.items()}
    assert free[64] - free[32] == pytest.approx(experts[32] - experts[64])


def test_a_pool_that_does_not_fit_says_what_to_do():
    with pytest.raises(SetupError, match=r"16 expert ranks with 16 experts.*take more workers, or fewer"):
        pool(16, 16, model=DEEPSEEK, node_gpus=8).kv_pool_bytes(use=0.7)
    with pytest.raises(SetupError, match=r"needs experts\.ranks"):
        layout_of(ExpertsConfig(parallel="ranks"), SMALL, workers=2, node_gpus=8, once_per_node=False)


def test_ranks_of_their_own_leave_workers_room_and_split_the_work():
    config = ExpertsConfig(parallel="ranks", ranks=32, rows="int8")
    layout = layout_of(config, DEEPSEEK, workers=16, node_gpus=8, once_per_node=False)
    assert (layout.ranks, layout.callers, layout.gpu_count, layout.slots) == (32, 16, 48, 8)
    popularity = ExpertPopularity.parse("uniform", DEEPSEEK)
    apart = ExpertPool(DEEPSEEK, find_gpu("h100"), layout, popularity)
    assert apart.kv_pool_bytes() > pool(32, 8).kv_pool_bytes() + 15e9
    work = ExpertStepWork(decodes=128, context_tokens=128 * 2048)
    parts, beside = apart.parts(work, halves=1), pool(32, 8, "uniform").parts(work, halves=1)
    assert parts.experts_s < beside.experts_s  # half as many rows for a rank
    assert parts.attention_s == beside.attention_s


# --- linear costs ---------------------------------------------------------------------------------


def test_linear_costs_meet_the_steps_that_they_are_laid_through():
    decode, prefill = pool(72, 4), pool(32, 9, once_per_node=True)
    costs = decode.costs(chunk_tokens=2048, batch=256)
    full = ExpertStepWork(decodes=256, context_tokens=256 * 2048)
    assert costs.step_s(decodes=256, context_tokens=256 * 2048) == pytest.approx(decode.step_s(full))
    assert costs.step_s(decodes=1) == pytest.approx(decode.step_s(ExpertStepWork(decodes=1)))
    chunk = prefill.costs(chunk_tokens=16_384, batch=256)
    prompts = ExpertStepWork(prompt_tokens=16_384, pairs=16_384 * 1024)
    assert chunk.step_s(prompt_tokens=16_384, pairs=16_384 * 1024) == pytest.approx(prefill.step_s(prompts))
    assert costs.is_usable
    assert chunk.is_usable


@settings(max_examples=40, deadline=None)
@given(
    decodes=st.integers(1, 512), context=st.integers(0, 4096), load=st.sampled_from(["uniform", "zipf:1.0"])
)
def test_more_work_never_takes_less_time(decodes, context, load):
    one = POOLS[load]
    step_s = one.step_s(ExpertStepWork(decodes=decodes, context_tokens=decodes * context))
    longer_s = one.step_s(ExpertStepWork(decodes=decodes, context_tokens=decodes * (context + 512)))
    twice_s = one.step_s(ExpertStepWork(decodes=2 * decodes, context_tokens=2 * decodes * context))
    assert step_s <= longer_s + 1e-12
    assert step_s <= twice_s * (1 + 1e-3)
    assert twice_s <= 2.2 * step_s


POOLS = {load: pool(16, 2, load, SMALL) for load in ("uniform", "zipf:1.0")}
