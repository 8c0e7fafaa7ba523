"""The autoscaler around a control plane: reports in, orders, log, metrics and memory out."""

import asyncio

import msgspec

from baton.config import ClusterConfig
from baton.core.ids import RouterId
from baton.core.messages import Role
from baton.core.operate import ClusterState, Outcome, Pool
from baton.core.sharing import RouterMember
from control_plane.autoscaler.values import PoolBounds
from control_plane.plane import ControlPlane
from control_plane.scaling import AT_ZERO_S, EVERY_S_MAX, AutoscalerRunner, room_for
from tests.unit.control_plane.simulated_cluster import settings
from tests.unit.control_plane.test_autoscale_live import R1, WORKERS, report
from tests.unit.control_plane.test_plane import Replicas, member

P, D = Role.PREFILL, Role.DECODE


class ScaledPlane:
    """A control plane whose workers serve, one router that watches, and a clock."""

    def __init__(self, counts, scales, *, record=None):
        self.replicas, self.records, self.now_s = Replicas(), [], 0.0
        self.plane = ControlPlane(
            ClusterConfig(),
            life="x",
            replicas=self.replicas,
            spawn=asyncio.create_task,
            remember=self.records.append,
        )
        self.plane.want([Pool("m", counts)], record=record)
        for worker_id, role in self.replicas.started:
            self.plane.renew(member(worker_id, role))
        self.scaling = AutoscalerRunner({"m": scales} if scales else {}, self.plane, clock=lambda: self.now_s)

    async def watched(self):
        self.watch = self.plane.watch(RouterMember(RouterId(R1), address="h:2"))
        await anext(self.watch)

    def step(self, requests, **more):
        self.now_s += 15.0
        answer = self.scaling.report(report(R1, requests, up_s=self.now_s, workers=WORKERS, **more))
        decisions = self.scaling.look()
        return answer, decisions[0] if decisions else None


async def test_orders_change_the_pool_and_are_in_the_log_with_their_reason():
    scaled = ScaledPlane({P: 1, D: 1}, settings())
    await scaled.watched()
    decision = None
    for step in range(1, 5):
        _, decision = scaled.step(150 * step)
        if decision is not None:
            break
    assert decision is not None
    assert (decision.who, decision.outcome) == ("autoscaler", Outcome.ACCEPTED)
    assert "forecast" in decision.reason
    assert scaled.plane.state().pools[0].count(P) > 1
    assert [(one.model, one.mode) for one in scaled.plane.state().autoscale] == [("m", "on")]
    rendered = scaled.plane.meter.render().decode()
    assert 'baton_autoscale_decisions_total{kind="ordered",model="m"} 1.0' in rendered
    assert 'baton_autoscale_needed_workers{model="m",role="prefill"}' in rendered
    scaled.plane.close()


async def test_advice_is_logged_and_changes_nothing():
    scaled = ScaledPlane({P: 1, D: 1}, settings(is_advice=True))
    await scaled.watched()
    found = [scaled.step(150 * step)[1] for step in range(1, 9)]
    advice = [decision for decision in found if decision is not None]
    assert advice
    assert {d.outcome for d in advice} == {Outcome.ADVISED}
    assert advice[0].text.startswith("would resize")
    assert scaled.plane.state().pools[0].counts == {P: 1, D: 1}
    assert len(scaled.replicas.started) == 2
    scaled.plane.close()


async def test_what_it_learnt_is_remembered_for_the_next_life():
    scaled = ScaledPlane({P: 1, D: 1}, settings())
    await scaled.watched()
    for step in range(1, 6):
        scaled.step(10 * step)
    memory = scaled.records[-1].memories["m"]
    assert memory.traits.keys() == {P, D}
    again = ScaledPlane({P: 1, D: 1}, settings(), record=scaled.records[-1])
    assert again.plane.memories == {"m": memory}
    for one in (scaled, again):
        one.plane.close()


async def test_at_zero_reports_come_often_and_one_that_waits_wakes_it_at_once():
    scaled = ScaledPlane({}, settings(bounds={P: PoolBounds(0, 8), D: PoolBounds(0, 8)}))
    await scaled.watched()
    task = asyncio.create_task(scaled.scaling.run())
    await asyncio.sleep(0)
    scaled.now_s = 15.0
    answer = scaled.scaling.report(report(R1, 1, up_s=1.0, queued=1))
    assert answer.every_s == AT_ZERO_S
    changes = scaled.plane.changes()
    async with asyncio.timeout(5):
        async for state in changes:
            if state.decisions:
                break
    assert state.pools[0].counts == {P: 1, D: 1}
    assert "back from zero" in state.decisions[-1].reason
    task.cancel()
    scaled.plane.close()


async def test_without_settings_reports_are_heard_and_nothing_is_decided():
    scaled = ScaledPlane({P: 1, D: 1}, None)
    assert not scaled.scaling.is_on
    assert scaled.scaling.report(report(R1, 9)).every_s == EVERY_S_MAX
    assert scaled.plane.state().autoscale == ()
    scaled.plane.close()


async def test_models_are_scaled_each_by_its_own_reports():
    scaled = ScaledPlane({P: 1, D: 1}, settings())
    scaled.plane.want([Pool("m", {P: 1, D: 1}), Pool("n", {P: 1, D: 1})])
    scaled.scaling = AutoscalerRunner(
        {"m": settings(), "n": settings()}, scaled.plane, clock=lambda: scaled.now_s
    )
    await scaled.watched()
    for step in range(1, 6):
        scaled.now_s += 15.0
        for model, requests in (("m", 2 * step), ("n", 150 * step)):
            demand = report(R1, requests, up_s=scaled.now_s, workers=WORKERS)
            scaled.scaling.report(msgspec.structs.replace(demand, model=model))
        scaled.scaling.look()
    counts = {pool.model: pool.count(P) for pool in scaled.plane.state().pools}
    assert counts["m"] == 1
    assert counts["n"] > 1
    assert [one.model for one in scaled.plane.state().autoscale] == ["m", "n"]
    assert set(scaled.plane.memories) == {"m", "n"}
    unknown = msgspec.structs.replace(report(R1, 1), model="gone")
    assert scaled.scaling.report(unknown).every_s == EVERY_S_MAX
    scaled.plane.close()


async def test_a_bound_on_all_models_is_what_the_others_leave():
    scaled = ScaledPlane({P: 1, D: 1}, settings())
    scaled.plane.want([Pool("m", {P: 1, D: 1}), Pool("n", {P: 1, D: 1})])
    scales = {"m": settings(), "n": settings()}
    scaled.scaling = AutoscalerRunner(scales, scaled.plane, ranks_max=5, clock=lambda: scaled.now_s)
    await scaled.watched()
    for step in range(1, 9):
        scaled.now_s += 15.0
        for model in scales:
            demand = report(R1, 150 * step, up_s=scaled.now_s, workers=WORKERS)
            scaled.scaling.report(msgspec.structs.replace(demand, model=model))
        scaled.scaling.look()
        pools = scaled.plane.state().pools
        assert sum(sum(pool.counts.values()) for pool in pools) <= 5
    assert sum(sum(pool.counts.values()) for pool in pools) == 5
    scaled.plane.close()


async def test_a_rollout_to_another_shape_changes_what_workers_cost():
    """Workers of four ranks leave no room under a limit that workers of one rank would not reach."""
    scaled, ranks = ScaledPlane({P: 1, D: 1}, None), {P: 1, D: 1}
    scaled.scaling = AutoscalerRunner(
        {"m": settings(ranks_max=8)}, scaled.plane, ranks_of=lambda pool: ranks, clock=lambda: scaled.now_s
    )
    await scaled.watched()

    def looked(step):
        scaled.now_s += 15.0
        demand = report(R1, 150 * step, up_s=scaled.now_s, workers=WORKERS)
        scaled.scaling.report(msgspec.structs.replace(demand, model="m"))
        scaled.scaling.look()
        return scaled.plane.state().pools[0].counts

    ranks.update({P: 4, D: 4})
    assert [looked(step) for step in range(1, 6)][-1] == {P: 1, D: 1}
    ranks.update({P: 1, D: 1})
    assert [looked(step) for step in range(6, 11)][-1][P] > 1
    scaled.plane.close()


def test_room_is_never_nothing_and_never_more_than_a_models_own_bound():
    state = ClusterState("x", (Pool("m", {P: 1, D: 2}), Pool("n", {P: 4})), ())

    def room(model, ranks_max, *, own_max=0, ranks=1):
        costs = {"m": settings(), "n": settings(ranks={P: ranks})}
        return room_for(
            model, state, ranks_max, own_max=own_max, cost=lambda pool: costs[pool.model].cost(pool.counts)
        )

    assert room("m", 10) == 6
    assert room("m", 10, own_max=4) == 4
    assert room("n", 10) == 7
    assert room("m", 3) == 1
    assert room("m", 10, ranks=2) == 2, "the other model's four workers have two ranks each"
