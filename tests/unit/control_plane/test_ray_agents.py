"""Small processes in place of Ray's agents."""

import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from ray._private import services

from control_plane import ray_agents
from control_plane.ray_agents import (
    DASHBOARD,
    NODE_VARIABLE,
    PORTS,
    RUNTIME_ENV,
    RUNTIME_ENV_PORT,
    small_agents,
)

STANDS_IN_FOR_RAYLET = """
import os, subprocess, sys
environment = {**os.environ, "RAY_RAYLET_PID": str(os.getpid())}
agent = subprocess.Popen([sys.executable, "-I", "-S", *sys.argv[1:]], env=environment)
print(agent.pid, flush=True)
agent.wait()
"""
TELLS_ITS_OPTIONS = """
import os, sys
from pathlib import Path
unfinished = Path(sys.argv[0] + ".unfinished")
unfinished.write_text(" ".join([str(os.getpid()), *sys.argv[1:]]))
unfinished.rename(sys.argv[0] + ".started")
"""


@pytest.fixture
def agent(tmp_path):
    """Starts an agent as a Ray node does; returns the node's process and the agent's pid."""
    node: subprocess.Popen[str] | None = None

    def start(kind: str) -> tuple[subprocess.Popen[str], int]:
        nonlocal node
        script = tmp_path / "main.py"
        script.write_text(TELLS_ITS_OPTIONS)
        options = (f"--session-dir={tmp_path}", "--node-id=n1", "--node-ip-address=127.0.0.1")
        command = (
            ray_agents.__file__,
            kind,
            str(script),
            *options,
            "--runtime-env-agent-port=0",
            "--minimal",
        )
        node = subprocess.Popen(
            [sys.executable, "-c", STANDS_IN_FOR_RAYLET, *command], stdout=subprocess.PIPE, text=True
        )
        assert node.stdout is not None
        return node, int(node.stdout.readline())

    yield start
    if node is not None:
        node.kill()
        node.communicate()


def until(holds):
    ends_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < ends_s
        select.select((), (), (), 0.01)


def content(path: Path) -> str:
    until(path.exists)
    return path.read_text()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_dashboards_agent_has_no_ports_and_ends_with_its_node(agent, tmp_path):
    node, pid = agent(DASHBOARD)
    for name in PORTS[DASHBOARD]:
        assert content(tmp_path / f"{name}_n1") == "-1"
    node.kill()
    until(lambda: is_gone(pid))


def test_the_agent_of_environments_becomes_rays_when_somebody_connects(agent, tmp_path):
    _, pid = agent(RUNTIME_ENV)
    port = int(content(tmp_path / f"{RUNTIME_ENV_PORT}_n1"))
    assert not (tmp_path / "main.py.started").exists()
    socket.create_connection(("127.0.0.1", port)).close()
    started, *options = content(tmp_path / "main.py.started").split()
    assert int(started) == pid, "the node knows the process that it started"
    assert options[-1] == f"--runtime-env-agent-port={port}"
    assert "--node-id=n1" in options


def test_the_agent_of_environments_ends_with_its_node(agent, tmp_path):
    node, pid = agent(RUNTIME_ENV)
    content(tmp_path / f"{RUNTIME_ENV_PORT}_n1")
    node.kill()
    until(lambda: is_gone(pid))
    assert not (tmp_path / "main.py.started").exists()


def test_an_agent_whose_node_has_ended_already_ends(tmp_path):
    """It has another parent by then."""
    options = (f"--session-dir={tmp_path}", "--node-id=n1")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        done = subprocess.run(
            [sys.executable, "-I", "-S", ray_agents.__file__, DASHBOARD, "agent.py", *options],
            env={NODE_VARIABLE: str(other.pid)},
            timeout=30,
        )
        other.kill()
    assert (done.returncode, list(tmp_path.iterdir())) == (0, [])


def command_of(component: str) -> list[str]:
    return services._build_python_executable_command_memory_profileable(component, "/nowhere")


def test_other_processes_of_ray_start_as_they_did():
    before = command_of("gcs_server")
    with small_agents():
        assert command_of("gcs_server") == before
        assert command_of(RUNTIME_ENV)[-1] == RUNTIME_ENV
    assert command_of(RUNTIME_ENV) == before


@pytest.mark.parametrize("lacks", ["version", "default"])
def test_a_ray_that_is_not_known_or_has_a_dashboard_gets_its_own_agents(monkeypatch, lacks):
    if lacks == "version":
        monkeypatch.setattr(ray, "__version__", "3.0.0")
    else:
        monkeypatch.setattr(ray._private.utils, "get_dashboard_dependency_error", lambda: None)
    before = command_of(DASHBOARD)
    with small_agents():
        assert command_of(DASHBOARD) == before


def test_a_ray_that_is_not_known_may_have_other_names(monkeypatch):
    monkeypatch.setattr(ray, "__version__", "3.0.0")
    monkeypatch.delattr(services, "_build_python_executable_command_memory_profileable")
    monkeypatch.delattr(ray._private.utils, "get_dashboard_dependency_error")
    with small_agents():
        pass


ASKS_FOR_AN_ENVIRONMENT = """
import asyncio, os
from control_plane.ray_cluster import RayCluster

async def main():
    cluster = RayCluster("")
    await cluster.open()
    remote = cluster.ray.remote(num_cpus=0)(lambda: os.environ.get("ASKED_FOR"))
    told = [await remote.remote()]
    told.append(await remote.options(runtime_env={"env_vars": {"ASKED_FOR": "yes"}}).remote())
    await cluster.close()
    print(told)

asyncio.run(main())
"""


def test_an_actor_may_still_ask_for_an_environment():
    done = subprocess.run(
        [sys.executable, "-c", ASKS_FOR_AN_ENVIRONMENT], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[None, 'yes']\n", done.stderr
