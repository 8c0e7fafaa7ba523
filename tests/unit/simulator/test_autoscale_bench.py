"""Loads, rules and searches that the autoscaler is compared by."""

import msgspec
import pytest
from rich.console import Console

from baton.core.errors import SetupError
from baton.core.messages import Role
from benchmarks.autoscale import measure
from benchmarks.autoscale_cli import COLUMNS, table_of
from benchmarks.autoscale_loads import AutoscaleLoad, MeanLengths, of_trace
from benchmarks.autoscale_runs import AutoscaleCase, cached_tokens, stage
from benchmarks.autoscale_static import Clairvoyant, peak_pools, sized_pools
from control_plane.autoscaler.values import Observation, RoleState
from simulator.fleet.scaling import traits_of
from simulator.fleet.setup import PoolSizes
from simulator.fleet.workload import FleetRequest

P, D = Role.PREFILL, Role.DECODE
SHORT = MeanLengths(8000, 500)


def test_cached_is_what_an_earlier_prompt_of_the_same_copy_began_with():
    requests = [
        FleetRequest(0, 0.0, 1000, 1, (1, 2)),
        FleetRequest(1, 1.0, 1500, 1, (1, 2, 3)),
        FleetRequest(2, 2.0, 1500, 1, (1, 4, 5)),
        FleetRequest(3, 3.0, 1000, 1, (1, 2), copy=1),
        FleetRequest(4, 4.0, 512, 1, (1, 9)),
    ]
    # Block 2 of the first prompt is its partial one: nobody finds it.
    assert cached_tokens(requests, 512) == [0, 512, 512, 0, 511]


def test_of_a_trace_whole_conversations_are_kept(tmp_path):
    lines = [
        f'{{"timestamp": {1000 * i}, "input_length": 1000, "output_length": 5, "hash_ids": [0, {i % 40}]}}'
        for i in range(400)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    load = AutoscaleLoad("t", 390.0, 0.0, "steady", trace=str(tmp_path / "t.jsonl"), keep=4)
    requests, _ = of_trace(load)
    conversations = {request.hash_ids[1] for request in requests if request.copy == 0}
    assert 3 <= len(conversations) <= 20
    assert len(requests) >= 9 * len(conversations)
    with pytest.raises(SetupError, match="give a smaller --keep"):
        of_trace(msgspec.structs.replace(load, keep=10**9))


def test_a_cache_makes_the_peak_smaller():
    ready = stage(AutoscaleCase(AutoscaleLoad("s", 900.0, 2.0, "steady", lengths=SHORT)))
    cold = peak_pools(ready)
    ready.cached[:] = [d.input_tokens // 2 for d in ready.demands]
    assert peak_pools(ready).prefill < cold.prefill
    assert peak_pools(ready).decode == cold.decode


def clairvoyant(load):
    ready = stage(AutoscaleCase(load))
    rule = Clairvoyant(ready, ready.settings())
    traits = {kind.role: traits_of(kind) for kind, _ in ready.spec(PoolSizes(1, 1)).workers}
    state = {P: RoleState(serving=1), D: RoleState(serving=1)}

    def desired(at_s):
        return rule.decide(Observation(at_s, 15.0, {}, state), traits).desired

    return desired


def test_the_clairvoyant_starts_before_a_jump_and_not_long_before():
    load = AutoscaleLoad("step", 3600.0, 0.6, "step", start_s=120.0)
    desired, jump_s = clairvoyant(load), 0.4 * 3600
    low, ready_for = desired(600.0), desired(jump_s - 130.0)
    assert ready_for[P] > low[P]
    assert ready_for[D] > low[D]
    assert desired(jump_s - 500.0) == desired(600.0) or desired(jump_s - 500.0)[P] < ready_for[P]
    assert desired(0.65 * 3600 + 300.0)[P] < ready_for[P]


def test_the_sizing_of_a_moment_follows_the_rate_at_that_moment():
    ready = stage(AutoscaleCase(AutoscaleLoad("steady", 900.0, 1.0, "steady", lengths=SHORT)))
    once, twice = sized_pools(ready, 0.0, 300.0), sized_pools(ready, 0.0, 300.0, scale=2.0)
    assert twice.prefill > once.prefill


@pytest.fixture(scope="module")
def result():
    load = AutoscaleLoad("step", 600.0, 0.3, "step", start_s=30.0, lengths=SHORT)
    return measure(AutoscaleCase(load), progress=lambda _: None)


def test_every_rule_is_run_under_a_load_and_stands_in_the_table(result):
    rules = [run.rule for run in result.runs]
    assert rules[:3] == ["baton", "baton, headroom 2", "clairvoyant"]
    assert {"hpa 0.7", "queue-depth", "peak"} <= set(rules)
    assert all(run.requests for run in result.runs)
    console = Console(width=200)
    with console.capture() as shown:
        console.print(table_of([result, result]))
    text = shown.get()
    assert all(name in text for name in (*COLUMNS, *rules))
    assert text.count("clairvoyant") == 2


def test_the_best_static_cluster_attains_what_the_autoscaler_did(result):
    assert result.best is not None
    assert result.best.met >= result.baton.met
