"""Counts of the engine become what a worker shows of its experts."""

import asyncio
import threading

import numpy as np
import pytest

from baton.core.ids import WorkerId
from baton.telemetry import catalogue as c
from worker.engine_thread import EngineThread
from worker.expert_load import SPAN_MAX_S, SPAN_MIN_S, TOKENS_MIN, ExpertLoad, balances
from worker.expert_watch import ExpertWatch
from worker.metrics import COUNTERS, EXPERT_COUNTERS, WorkerMetrics


def counts(*layers):
    return np.array(layers, dtype=np.int64)


def test_a_layers_balance_is_the_mean_over_the_most():
    many = TOKENS_MIN
    found = balances(counts([many] * 4, [4 * many, 0, 0, 0], [2 * many, many, many, 0], [many - 1] * 4))
    assert found[:3].tolist() == [1.0, 0.25, 0.5]
    assert np.isnan(found[3]), "of few tokens nothing is said"
    assert np.isnan(balances(counts([0] * 4))).all()


def test_balance_is_of_the_latest_span_and_not_of_all_time():
    load = ExpertLoad((3, 7), 4)
    first = counts([9000, 0, 0, 0], [9000, 0, 0, 0])
    load.observe(first, now_s=100.0)
    assert load.balance is None
    after = first + counts([256, 256, 256, 256], [512, 512, 0, 0])
    load.observe(after, now_s=100.0 + SPAN_MIN_S)
    assert (load.balance, load.worst, load.worst_layer) == (0.75, 0.5, 7)
    assert load.totals.tolist() == after.sum(axis=0).tolist()
    load.observe(after + counts([0, 0, 0, 4000], [0, 0, 0, 4000]), now_s=101.0 + SPAN_MIN_S)
    assert load.balance == 0.75, "too soon for another"
    load.observe(after + counts([0, 0, 0, 4000], [0, 0, 0, 4000]), now_s=100.0 + 2 * SPAN_MIN_S)
    assert load.balance == 0.25


def test_of_few_tokens_a_span_grows_until_there_are_enough_or_it_is_given_up():
    load = ExpertLoad((0,), 4)
    total = counts([0] * 4)
    load.observe(total, now_s=0.0)
    for at_s in range(1, 201):
        total = total + counts([1, 2, 1, 0])
        load.observe(total, now_s=float(at_s))
    assert load.balance is None
    for at_s in range(201, 260):
        total = total + counts([1, 2, 1, 0])
        load.observe(total, now_s=float(at_s))
    assert load.balance == 0.5
    load.observe(total, now_s=257.0 + SPAN_MAX_S)
    assert load.balance is None
    assert "experts.balance" not in load.accounts()


def test_a_layer_that_computes_few_rows_is_no_worst_layer():
    """The last one of a model that only prefills."""
    load = ExpertLoad((0, 1), 4)
    load.observe(counts([0] * 4, [0] * 4), now_s=0.0)
    load.observe(counts([512, 256, 128, 128], [9, 0, 0, 0]), now_s=SPAN_MIN_S)
    assert (load.balance, load.worst, load.worst_layer) == (0.5, 0.5, 0)


def test_metrics_are_as_many_as_experts_and_balance_goes_when_it_is_not_known():
    metrics, load = WorkerMetrics(WorkerId("decode-0.1f")), ExpertLoad((0, 1), 3)

    def values():
        labels = {"worker": "decode-0"}
        value = metrics.meter.value
        return [value(c.EXPERT_TOKENS, **labels, expert=str(e)) for e in range(3)]

    metrics.experts(load)
    text = metrics.meter.render().decode()
    assert text.count("baton_moe_expert_tokens_total{") == 3, "also those that nobody was sent to"
    assert "baton_moe_expert_balance_ratio{" not in text
    load.observe(counts([1, 0, 2], [1, 0, 0]), now_s=0.0)
    metrics.experts(load)
    assert values() == [2, 0, 2]
    load.observe(counts([1000, 500, 0], [500, 500, 500]), now_s=SPAN_MIN_S)
    metrics.experts(load)
    metrics.experts(load)
    assert values() == [1500, 1000, 500]
    worst = metrics.meter.value(c.EXPERT_BALANCE, worker="decode-0", layers="worst")
    assert worst == pytest.approx(0.5, rel=0.01)
    load.observe(counts([1000, 500, 0], [500, 500, 500]), now_s=SPAN_MIN_S + SPAN_MAX_S)
    metrics.experts(load)
    assert "baton_moe_expert_balance_ratio{" not in metrics.meter.render().decode()
    assert values() == [1500, 1000, 500]


def test_rows_for_expert_ranks_are_counted_where_there_are_any():
    metrics = WorkerMetrics(WorkerId("decode-0.1f"))
    core = dict.fromkeys(COUNTERS, 0.0)
    metrics.accounts(core, {})
    assert "baton_expert_" not in metrics.meter.render().decode(), "this worker holds all experts"
    for total in (3.0, 10.0):
        metrics.accounts(core | dict.fromkeys(EXPERT_COUNTERS, total), {})
    assert {metrics.meter.value(m, worker="decode-0") for m in EXPERT_COUNTERS.values()} == {10.0}
    metrics.expert_wait(0.001)
    metrics.expert_wait(0.5)
    text = metrics.meter.render().decode()
    assert 'baton_expert_wait_seconds_count{worker="decode-0"} 2.0' in text
    assert 'baton_expert_wait_seconds_sum{worker="decode-0"} 0.501' in text


class Counted:
    """An engine's counts; the device is late at the first look."""

    layers, expert_count = (1,), 2

    def __init__(self):
        self.threads, self.looks, self.third = set(), 0, threading.Event()

    def read(self):
        self.threads.add(threading.current_thread().name.split("_")[0])
        self.looks += 1
        if self.looks == 3:
            self.third.set()
        return None if self.looks == 1 else counts([3, 4])


async def test_counts_are_read_on_the_engines_thread_and_again_and_again(monkeypatch):
    monkeypatch.setattr("worker.expert_watch.EVERY_S", 0.0)
    engine, counted = EngineThread(), Counted()
    watch = ExpertWatch(counted, engine)
    task = asyncio.create_task(watch.run())
    assert await asyncio.to_thread(counted.third.wait, 20)
    task.cancel()
    await engine.close(timeout_s=5)
    assert counted.threads == {"engine"}
    assert watch.load.accounts()["experts.routed_tokens"] == 7
