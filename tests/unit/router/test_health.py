"""When a router says that it is ready though there is no worker."""

import pytest

from baton.config import AutoscaleConfig
from baton.core.messages import Role
from baton.telemetry.metrics import Meter
from router.health import StatusGauges, health
from tests.unit.router.script import Script


def told(script, *, may_sleep=True, directory="current", is_draining=False):
    body = health(
        script.core.status(),
        model="m",
        is_draining=is_draining,
        directory=directory,
        tenants={},
        may_sleep=may_sleep,
    )
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
        ({"decode_min": 1, "both_min": 0}, True),
    ],
)
def test_workers_may_all_be_gone_only_where_the_autoscaler_stops_them(changes, may):
    fields = {"mode": "on", "zero_after_s": 60, "prefill_min": 0, "decode_min": 0, **changes}
    assert AutoscaleConfig(**fields).may_sleep is may


def test_an_empty_pool_is_nothing_to_tell_of_while_asleep():
    script, meter = Script(), Meter()
    gauges = StatusGauges(meter)
    gauges.update(script.core.status(), is_asleep=True)
    assert 'baton_router_degraded_ratio{pool="decode"} 0.0' in meter.render().decode()
    gauges.update(script.core.status())
    assert 'baton_router_degraded_ratio{pool="decode"} 1.0' in meter.render().decode()
