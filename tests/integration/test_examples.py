"""The examples of docs/examples/clients, run as a reader runs them, against a real cluster.

Each needs a package that is no dependency of this project. Those that are not installed are skipped; name
interpreters that have them in CLIENTS_PYTHON, separated as in PATH (`pip install -e .[clients]`; the load
generators and vLLM contradict each other and need environments of their own).
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
PYTHONS = os.environ.get("CLIENTS_PYTHON", sys.executable).split(os.pathsep)
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
    "unconstrained_modes": ["instructor", "pydantic_ai", "smolagents"],
    "lm_eval_scores": ["lm_eval", "torch"],
    "aiperf_load": ["aiperf"],
    "guidellm_load": ["guidellm"],
    "vllm_bench": ["vllm"],
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("m") / "tiny-llama", "llama", seed=5)


@pytest.fixture(scope="module")
def cluster(weights):
    with Cluster(weights, model__dtype="float32", engine__block_tokens=16) as cluster:
        yield cluster


def missing_in(python, packages):
    """Return the packages that an interpreter lacks. A parent that is missing is an error of `find_spec`."""
    program = """
import importlib.util, sys
for name in sys.argv[1:]:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        print(name)
"""
    command = [python, "-c", program, *packages]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()


def test_every_example_is_run_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(PACKAGES)


@pytest.mark.parametrize("name", PACKAGES)
def test_an_example_of_a_client_works(cluster, weights, tmp_path, name):
    missing = {python: missing_in(python, PACKAGES[name]) for python in PYTHONS}
    having = [python for python, packages in missing.items() if not packages]
    if not having:
        pytest.skip(f"not installed: {missing}")
    own = {"BATON_URL": cluster.url, "MODEL": cluster.model, "HF_HUB_OFFLINE": "1"}
    own |= {"TOKENIZER": str(weights)}
    done = subprocess.run(
        [having[0], str(FOLDER / f"{name}.py")],
        cwd=tmp_path,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout
