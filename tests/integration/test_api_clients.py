"""Clients of other companies' APIs, unmodified, against a real cluster: the examples, as a stranger runs
them."""

import importlib.util
import subprocess
import sys

import pytest

from tests.integration.cluster import ROOT, Cluster
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}{{ eos_token }}{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    path = make_model(folder / "tiny-llama", "llama", seed=5)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    settings = {
        "model__dtype": "float32",
        "model__tool_parser": "hermes",
        "engine__block_tokens": 16,
        "router__files_dir": str(folder / "files"),
    }
    with Cluster(path, **settings) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("example", "packages"),
    [
        ("responses_api", ["openai"]),
        ("messages_api", ["anthropic"]),
        ("batches_api", ["openai"]),
        ("frameworks_api", ["litellm", "langchain_openai"]),
    ],
)
def test_an_example_runs_as_it_is(cluster, example, packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    command = [sys.executable, f"docs/examples/{example}.py", cluster.url, cluster.model]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    cluster.assert_idle()
