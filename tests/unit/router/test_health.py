"""A router may be ready though there is no worker."""

import pytest

from baton.config import AutoscaleConfig
from baton.core.messages import Role
from baton.telemetry.metrics import Meter
from router.http.health import ModelHealth, RouterFacts, StatusGauges, health
from tests.unit.router.script import Script


def told(script, *, may_sleep=True, directory="current", is_draining=False):
    body = health([ModelHealth("m", script.core.status(), may_sleep)], RouterFacts(is_draining, directory))
    return body["status"], body["ready"]


def test_asleep_is_ready_only_while_somebody_would_wake_the_workers():
    script = Script()
    assert told(script) == ("asleep", True)
    assert told(script, may_sleep=False) == ("unavailable", False)
    assert told(script, directory="away") == ("unavailable", False)
    assert told(script, is_draining=True) == ("unavailable", False)
    script.join("p", Role.PREFILL)
    assert told(script) == ("degraded", True)
    script.join("d", Role.DECODE)
    assert told(script) == ("ok", True)


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({}, True),
        ({"mode": "advise"}, False),
        ({"zero_after_s": 0}, False),
        ({"decode_min": 1}, False),
        ({"decode_min": 1, "aggregated_min": 0}, True),
    ],
)
def test_workers_may_all_be_gone_only_where_the_autoscaler_stops_them(changes, may):
    fields = {"mode": "on", "zero_after_s": 60, "prefill_min": 0, "decode_min": 0, **changes}
    assert AutoscaleConfig(**fields).may_sleep is may


def test_an_empty_pool_is_nothing_to_tell_of_while_asleep():
    script, meter = Script(), Meter()
    gauges = StatusGauges(meter, "m")
    gauges.update(script.core.status(), is_asleep=True)
    assert 'baton_router_degraded_ratio{model="m",pool="decode"} 0.0' in meter.render().decode()
    gauges.update(script.core.status())
    assert 'baton_router_degraded_ratio{model="m",pool="decode"} 1.0' in meter.render().decode()


def test_one_model_that_is_down_leaves_the_router_ready_for_the_other_and_says_which():
    up, down = Script(), Script()
    up.join("p", Role.PREFILL)
    up.join("d", Role.DECODE)
    models = [ModelHealth("a", up.core.status()), ModelHealth("b", down.core.status())]
    body = health(models, RouterFacts(is_draining=False, directory="current"))
    assert (body["status"], body["ready"]) == ("degraded", True)
    assert {name: one["ready"] for name, one in body["models"].items()} == {"a": True, "b": False}
    assert body["models"]["b"]["status"] == "unavailable"
    assert [w["id"] for w in body["workers"]["prefill"]] == ["p"]
    assert not health(models[1:], RouterFacts(is_draining=False, directory="current"))["ready"]
    draining = health(models, RouterFacts(is_draining=True, directory="current"))
    assert (draining["status"], draining["ready"]) == ("unavailable", False)
