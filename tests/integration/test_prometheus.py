"""A real Prometheus scrapes a running cluster: rules evaluate, and every panel has data."""

import contextlib
import os
import re
import shutil
import subprocess

import httpx
import pytest
import yaml

from baton.core.store_admin import AskStatus
from baton.telemetry.alerts import rules
from baton.telemetry.panels import DASHBOARDS
from baton.telemetry.render import rendered
from baton.wire.local import ask_store
from tests.integration.cluster import Cluster, eventually, loop
from tests.models import make_model
from tests.ports import free_port

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        shutil.which("prometheus") is None and not os.environ.get("CI"),
        reason="no prometheus: apt-get install prometheus",
    ),
]

WINDOW = "20s"
PROMPT = "The quick brown fox jumps over the lazy dog, and then it does so again and again. " * 4


def targets(cluster):
    """host:port of every process's metrics, from the log and from the processes themselves."""
    log = "\n".join(cluster.log)
    found = {
        f"127.0.0.1:{cluster.port}",
        *re.findall(r"metrics (?:of the control plane )?at http://(\S+)/metrics", log),
    }
    socket = re.search(r"store node of this host starts at (\S+)", log)[1]
    return sorted({*found, loop().run(ask_store(socket, AskStatus())).metrics_address})


@contextlib.contextmanager
def prometheus(folder, addresses):
    """The URL of a running Prometheus."""
    (folder / "rules.yaml").write_text(rendered()["rules/baton.yaml"])
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "baton", "static_configs": [{"targets": addresses}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(20)


def answer(url, path, **params):
    """None while it does not answer."""
    try:
        response = httpx.get(f"{url}/api/v1/{path}", params=params, timeout=10)
    except httpx.HTTPError:
        return None
    if response.status_code == 503:  # it reads its database first
        return None
    reply = response.json()
    assert reply["status"] == "success", reply
    return reply["data"]


def as_grafana_asks(expression):
    return expression.replace("$__rate_interval", WINDOW).replace("$namespace", ".*")


def without_data(url):
    """Panels without data, and the words for acceptable reasons."""
    missing = {}
    for dashboard in DASHBOARDS:
        for panel, query in dashboard.queries():
            data = answer(url, "query", query=as_grafana_asks(query.expression))
            numbers = [
                value for series in (data or {}).get("result", ()) if (value := series["value"][1]) != "NaN"
            ]
            if not numbers:
                missing[f"{dashboard.uid}: {panel.title} ({query.legend})"] = query.quiet
    return missing


def serve_some(cluster):
    """Send prompts that share a beginning, some new to every cache, with and without objectives."""
    for number in range(4):
        cluster.complete(f"{PROMPT} {number} times", max_tokens=12)
        cluster.complete(f"{number}: {PROMPT}", max_tokens=12)


def silent(url):
    """Panels without data that have no acceptable reason; this model has experts."""
    return sorted(name for name, quiet in without_data(url).items() if not quiet or "Busiest" in name)


def test_every_panel_and_rule_works_on_a_running_cluster(tmp_path):
    model = make_model(tmp_path / "tiny", "qwen3_moe", seed=3)
    objectives = {"slo.classes": '{"chat": {"ttft_s": 60, "tpot_s": 5}}', "slo.default": "chat"}
    settings = {name.replace(".", "__"): value for name, value in objectives.items()}
    with Cluster(model, **settings) as cluster, prometheus(tmp_path, targets(cluster)) as url:
        eventually("prometheus", lambda: answer(url, "query", query="count(up)"), timeout_s=30)

        def all_have_data():
            serve_some(cluster)
            return not silent(url)

        try:
            eventually("data in every panel", all_have_data, timeout_s=120)
        except AssertionError:
            raise AssertionError(
                f"no data: {silent(url)}\n{(tmp_path / 'log').read_text()[-2000:]}"
            ) from None

        def up():
            return [series["value"][1] for series in answer(url, "query", query="up")["result"]]

        # One reading of a busy process may take longer than Prometheus waits.
        eventually(
            "router, control plane, two workers and store are up", lambda: up() == ["1"] * 5, timeout_s=30
        )

        def evaluated():
            groups = answer(url, "rules")["groups"]
            states = [rule["health"] for group in groups for rule in group["rules"]]
            return states if states and "unknown" not in states else None

        states = eventually("rules evaluated", evaluated, timeout_s=60)
        assert set(states) == {"ok"}
        assert len(states) == sum(len(group["rules"]) for group in rules()["groups"])
        firing = [a for a in answer(url, "alerts")["alerts"] if a["state"] == "firing"]
        assert firing == [], "all is well"
