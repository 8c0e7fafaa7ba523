"""The objectives of a request, and its verdict in the end."""

import pytest

from baton.config.router import SloConfig
from baton.core.errors import ClientError, QueueFull, SetupError
from baton.telemetry.catalogue import SLO_REQUESTS
from commands.settings import load_config
from router.http.observe import TENANT_LABELS_MAX
from router.openai.call import SloOptions
from router.tenants.keys import Tenant
from router.tenants.service_classes import (
    RequestObjectives,
    RequestVerdict,
    ServiceClasses,
    verdict_of_answer,
    verdict_of_error,
)
from tests.unit.router.http_fakes import MODEL, FakeWorker, cluster, make_folder

CONFIG = SloConfig.model_validate(
    {
        "classes": {
            "fast": {"ttft_s": 0.5, "tpot_s": 0.05, "priority": -1, "late": "refuse"},
            "slow": {"ttft_s": 60, "priority": 5},
            "flex": {},
            "free": {"late": "serve"},
        },
        "default": "slow",
        "models": {"sql": "fast"},
        "tenants": {"acme": "flex"},
    }
)
FAST = RequestObjectives("fast", 0.5, 0.05, -1, True)
ASK = {"model": MODEL, "prompt": "hi", "max_tokens": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(
    ("wish", "where", "name"),
    [
        (SloOptions(), {"model": "m"}, "slow"),
        (SloOptions(), {"model": "sql"}, "fast"),
        (SloOptions(), {"model": "sql", "tenant": "acme"}, "flex"),
        (SloOptions(), {"model": "sql", "tenant": "acme", "record": Tenant(slo_class="slow")}, "slow"),
        (SloOptions(), {"model": "sql", "tenant": "acme", "record": Tenant(slo_class="gone")}, "flex"),
        (SloOptions(service_tier="fast"), {"model": "m", "tenant": "acme"}, "fast"),
        (SloOptions(service_tier="auto"), {"model": "m", "tenant": "acme"}, "flex"),
        (SloOptions(service_tier="fast"), {"model": "m", "header": "slow"}, "slow"),
        (SloOptions(slo_class="free"), {"model": "sql", "header": "slow"}, "free"),
    ],
)
def test_what_is_said_nearer_to_the_request_counts(wish, where, name):
    assert ServiceClasses(CONFIG).of(wish, **where).slo_class == name


def test_a_request_replaces_single_objectives_and_keeps_the_rest():
    wish = SloOptions(slo_class="fast", ttft_s=2.0)
    assert ServiceClasses(CONFIG).of(wish, model="m") == RequestObjectives("fast", 2.0, 0.05, -1, True)
    assert ServiceClasses(SloConfig()).of(SloOptions(tpot_s=0.1), model="m") == RequestObjectives(
        "", 0.0, 0.1, 0, False
    )
    assert ServiceClasses(CONFIG).of(SloOptions(slo_class="fast"), model="m") == FAST


@pytest.mark.parametrize(
    ("wish", "header", "param"),
    [
        (SloOptions(slo_class="fats"), None, "baton.slo_class"),
        (SloOptions(slo_class=""), None, "baton.slo_class"),
        (SloOptions(), "fats", "x-baton-slo-class"),
    ],
)
def test_an_unknown_class_is_refused_with_the_known_ones(wish, header, param):
    with pytest.raises(ClientError) as caught:
        ServiceClasses(CONFIG).of(wish, header=header, model="m")
    assert caught.value.param == param
    assert "fast, flex, free, slow" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["slo.default=x", "slo.models.m=x", "slo.tenants.t=x", "slo.classes.a,b.ttft_s=1"]
)
def test_names_that_lead_nowhere_stop_the_start(text):
    with pytest.raises(SetupError, match="slo"):
        load_config([text])


def test_a_class_is_written_field_by_field_or_as_json():
    by_field = load_config(["slo.classes.a.ttft_s=0.5", "slo.classes.a.late=refuse", "slo.default=a"]).slo
    assert (
        by_field == load_config(['slo.classes={"a": {"ttft_s": 0.5, "late": "refuse"}}', "slo.default=a"]).slo
    )
    assert by_field.classes["a"].ttft_s == 0.5


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "verdict"),
    [
        (0.5, 0.05, RequestVerdict.MET),
        (0.51, 0.05, RequestVerdict.MISSED_TTFT),
        (0.5, 0.06, RequestVerdict.MISSED_TPOT),
        (9.0, 0.06, RequestVerdict.MISSED_BOTH),
    ],
)
def test_an_answer_is_judged_by_both_objectives(ttft_s, tpot_s, verdict):
    assert verdict_of_answer(FAST, ttft_s=ttft_s, tpot_s=tpot_s) is verdict
    assert verdict_of_answer(RequestObjectives(), ttft_s=ttft_s, tpot_s=tpot_s) is RequestVerdict.MET


def test_what_could_never_work_was_not_offered():
    assert verdict_of_error(ClientError("bad")) is None
    assert verdict_of_error(QueueFull("full")) is RequestVerdict.REFUSED_QUEUE


SLO = {"classes": {"fast": {"ttft_s": 15, "tpot_s": 5, "priority": 7}, "never": {"ttft_s": 1e-9}}}


def count(c, slo_class, outcome, tenant="default"):
    meter = c.router.models.first.observer.meter
    return meter.value(SLO_REQUESTS, model=MODEL, slo_class=slo_class, tenant=tenant, outcome=outcome)


async def test_objectives_reach_the_worker_and_the_outcome_is_counted(folder):
    async with cluster(folder, FakeWorker(reply=[9]), slo=SLO) as c, c.http() as http:
        answer = await http.post("/v1/completions", json=ASK, headers={"x-baton-slo-class": "fast"})
        assert answer.status_code == 200
        start = c.worker.started[-1]
        assert (start.tpot_slo_s, start.priority) == (5, 7)
        body = ASK | {"baton": {"slo_class": "fast", "tpot_ms": 20000}, "priority": -2}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        start = c.worker.started[-1]
        assert (start.tpot_slo_s, start.priority) == (20, -2)
        embedding = {"model": MODEL, "input": "hi", "baton": {"slo_class": "fast"}}
        assert (await http.post("/v1/embeddings", json=embedding)).status_code == 200
        assert count(c, "fast", "met") == 3
        assert (await http.post("/v1/completions", json=ASK | {"service_tier": "never"})).status_code == 200
        assert count(c, "never", "missed_ttft") == 1
        wrong = await http.post("/v1/completions", json=ASK, headers={"x-baton-slo-class": "quick"})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "x-baton-slo-class"
        assert "fast, never" in wrong.json()["error"]["message"]
        text = (await http.get("/metrics")).text
        assert text.count("baton_slo_requests_total{") == 2


async def test_a_refusal_counts_as_offered(folder):
    async with (
        cluster(folder, slo=SLO, queue_wait_s=0.01) as c,
        c.http() as http,
    ):  # There is no worker at all.
        answer = await http.post("/v1/completions", json=ASK | {"baton": {"slo_class": "fast"}})
        assert answer.status_code == 503
        assert count(c, "fast", "refused_capacity") == 1


async def test_tenants_beyond_a_bound_share_one_label(folder):
    async with cluster(folder, FakeWorker(reply=[9])) as c:
        observer = c.router.models.first.observer
        for i in range(TENANT_LABELS_MAX + 5):
            observer.on_verdict("", f"t{i}", RequestVerdict.MET)
        assert count(c, "none", "met", tenant="other") == 5
        assert count(c, "none", "met", tenant="t0") == 1
