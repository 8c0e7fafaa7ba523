"""The examples of docs/examples/clients, run as a reader runs them, against a real cluster.

Each needs a package that is no dependency of this project. Those that are not installed are skipped; name an
interpreter that has them in CLIENTS_PYTHON (`pip install -e .[clients]`).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "clients"
PYTHON = os.environ.get("CLIENTS_PYTHON", sys.executable)
PACKAGES = {
    "openai_chat": ["openai"],
    "langchain_tools": ["langchain_openai"],
    "dspy_extract": ["dspy"],
    "guidance_grammar": ["guidance"],
    "outlines_types": ["outlines"],
    "instructor_modes": ["instructor"],
    "pydantic_ai_agent": ["pydantic_ai"],
    "openai_agents_tools": ["agents"],
    "smolagents_tools": ["smolagents"],
    "other_chats": ["litellm", "llama_index.llms.openai_like", "aisuite"],
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    path = make_model(tmp_path_factory.mktemp("m") / "tiny-llama", "llama", seed=5)
    with Cluster(path, model__dtype="float32", engine__block_tokens=16) as cluster:
        yield cluster


def is_installed(package):
    found = subprocess.run(
        [PYTHON, "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    return found.returncode == 0


def test_every_example_is_run_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(PACKAGES)


@pytest.mark.parametrize("name", PACKAGES)
def test_an_example_of_a_client_works(cluster, name):
    if missing := [package for package in PACKAGES[name] if not is_installed(package)]:
        pytest.skip(f"{', '.join(missing)} is not installed for {PYTHON}")
    own = {"BATON_URL": cluster.url, "MODEL": cluster.model, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [PYTHON, str(FOLDER / f"{name}.py")],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout
