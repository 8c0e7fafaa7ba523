"""Drains under virtual time, with production routers and workers: no stream and no budget pays for them."""

from dataclasses import replace

import pytest

from baton.core.messages import Role
from router.tenants.keys import Tenant
from simulator.faults import runner
from simulator.faults.client import Ending, RequestKind, SimClient
from simulator.faults.run_context import RunContext
from simulator.faults.runner import SeedRun
from simulator.faults.scenario import MODEL_NAME, Scenario
from simulator.faults.scenario_drawing import draw_scenario

DRAINS = 20
PERIOD_S = 0.8
POOLS = {
    "aggregated": (Role.AGGREGATED,) * 3,
    "disaggregated": (Role.PREFILL,) * 2 + (Role.DECODE,) * 3,
}


def scenario_of(roles: tuple[Role, ...], **router) -> Scenario:
    """Return a calm cluster with room for long streams, whose router forgives nothing."""
    calm = next(
        found
        for seed in range(1000)
        if not (found := draw_scenario(RunContext(seed).stream("scenario"))).faults
        and not found.presses_store
    )
    forgives_nothing = {
        "attempts_max": 2,
        "retry_floor": 0,
        "retry_share": 0.0,
        "migrate_after_s": 0.0,
        "hedge_share": 0.0,
        "policy": "least_loaded",
    }
    return replace(
        calm,
        roles=roles,
        tenants={"t0": Tenant()},
        router_count=1,
        block_count=1000,
        max_model_tokens=4000,
        step_base_s=0.05,
        step_token_s=0.00005,
        drain_timeout_s=30.0,
        engine=calm.engine.model_copy(update={"step_tokens_max": 256}),
        arrivals_s=DRAINS * PERIOD_S + 2.0,
        router=calm.router.model_copy(update={**forgives_nothing, **router}),
    )


def client_of(number: int, *, max_tokens: int, arrives_s: float) -> SimClient:
    prompt = tuple(range(1, 12))
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "stream": True,
        "return_token_ids": True,
    }
    client = SimClient(
        f"r{number}", kind=RequestKind.COMPLETION, prompts=(prompt,), body=body, tenant="t0", owner=0
    )
    client.arrives_s = arrives_s
    return client


def seed_run(monkeypatch, scenario: Scenario, clients: list[SimClient]) -> SeedRun:
    monkeypatch.setattr(runner, "draw_scenario", lambda _: scenario)
    monkeypatch.setattr(runner, "draw_clients", lambda *_: clients)
    return SeedRun(7)


def drain_where_it_runs(run: SeedRun, number: int) -> None:
    """Drain the worker that has the most sequences, as an operator would a host."""
    [router] = run.cluster.routers
    busy = max(router.core.status().workers, key=lambda w: (not w.is_draining, w.in_flight_count))
    slot = next(s for s in run.cluster.slots if s.worker and s.worker.worker_id == busy.worker_id)
    run.context.counts["drained while busy"] += busy.in_flight_count > 0
    run.cluster.drain(slot)
    if number > 1:
        run.context.clock.after(PERIOD_S, lambda: drain_where_it_runs(run, number - 1))


@pytest.mark.parametrize("pools", POOLS)
def test_a_stream_that_is_drained_twenty_times_ends_as_if_undisturbed(monkeypatch, pools):
    stream = client_of(0, max_tokens=450, arrives_s=0.5)
    run = seed_run(monkeypatch, scenario_of(POOLS[pools]), [stream])
    run.context.clock.at(1.0, lambda: drain_where_it_runs(run, DRAINS))
    run.play()  # the checkers compare every token, and let no attempt be lost
    assert stream.ending is Ending.FINISHED
    assert run.context.counts["drained while busy"] == DRAINS
    assert run.context.counts["note: migrated"] == DRAINS
    [sequence] = stream.sequences
    assert sequence.placements == DRAINS + 1


def make_one_sick(run: SeedRun, number: int) -> None:
    """Let the worker that has the fewest sequences fail what it gets for a moment."""
    well = min(
        run.cluster.workers, key=lambda w: (w.core.status().is_draining, w.core.status().attempt_count)
    )
    well.is_sick = True
    run.context.clock.after(0.3, lambda: setattr(well, "is_sick", False))
    if number > 1:
        run.context.clock.after(1.0, lambda: make_one_sick(run, number - 1))


def test_during_a_rolling_upgrade_unrelated_failures_find_the_budget(monkeypatch):
    """Workers fail a sequence now and then, while all workers are drained in turn under many streams."""
    stingy = scenario_of(POOLS["aggregated"] * 2, retry_floor=30, attempts_max=8, breaker_failures=0)
    scenario = replace(stingy, faults=frozenset({"sick_worker"}), strikes_max=1)
    streams = [client_of(i, max_tokens=100, arrives_s=0.5 + 0.2 * i) for i in range(60)]
    run = seed_run(monkeypatch, scenario, streams)
    run.context.clock.at(1.0, lambda: drain_where_it_runs(run, DRAINS))
    run.context.clock.at(1.3, lambda: make_one_sick(run, 9))
    run.play()
    counts = run.context.counts
    assert 5 < counts["retried: internal"] <= 30 < counts["note: migrated"]
    assert {stream.ending for stream in streams} == {Ending.FINISHED}
