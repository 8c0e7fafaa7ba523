"""Small processes in place of the two agents that Ray starts on every node, each an interpreter that imports
Ray.

Without `ray[default]` the agent of Ray's dashboard only says that it has no ports. The one of runtime
environments has work when an actor asks for such an environment, which ours do not: it is started when
somebody first connects to its port. Ray ends a node whose agents end, and so these stay until Ray does.

This file runs as `python -I -S ray_agents.py KIND SCRIPT OPTION...`, where SCRIPT and its options are those
of Ray's agent. It uses only the standard library, since that is the point of it.
"""

import contextlib
import importlib
import os
import select
import socket
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

DASHBOARD, RUNTIME_ENV = "dashboard_agent", "runtime_env_agent"
"""What Ray calls the two."""

RUNTIME_ENV_PORT = "runtime_env_agent_port"
PORTS = {
    DASHBOARD: ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"),
    RUNTIME_ENV: (RUNTIME_ENV_PORT,),
}
"""Files in which a Ray node waits to read the ports of an agent, the node's id added to each name."""

NO_PORT = -1

NODE_VARIABLE = "RAY_RAYLET_PID"
"""Environment variable by which an agent of Ray knows its node's process."""

TESTED_VERSIONS = ("2.60.",)
"""Beginnings of the versions of Ray whose nodes wait for these files. Others get their own agents."""


@contextlib.contextmanager
def small_agents() -> Generator[None]:
    """A Ray of this machine that starts within this context starts these processes as agents, if it is of a
    version that is known and has no `ray[default]`."""
    services: Any = importlib.import_module("ray._private.services")
    if not _are_enough(services):
        yield
        return
    theirs = services._build_python_executable_command_memory_profileable

    def command(component: str, *args: Any, **fields: Any) -> list[str]:
        if component not in PORTS:
            return theirs(component, *args, **fields)
        return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), component]

    services._build_python_executable_command_memory_profileable = command
    try:
        yield
    finally:
        services._build_python_executable_command_memory_profileable = theirs


def _are_enough(services: Any) -> bool:
    """Whether these processes do. Of a version that is not known nothing else is looked at."""
    version: str = services.ray.__version__
    if not version.startswith(TESTED_VERSIONS) or not hasattr(os, "pidfd_open"):
        return False
    return services.ray._private.utils.get_dashboard_dependency_error() is not None


# --- the process of an agent -----------------------------------------------------------------------


def option(options: Sequence[str], name: str) -> str:
    """Return the value of `--NAME=VALUE`. Raises KeyError."""
    values = dict(one.removeprefix("--").split("=", 1) for one in options if "=" in one)
    return values[name]


def tell_ports(kind: str, options: Sequence[str], port: int) -> None:
    """Write the files that the node waits for, each at once."""
    folder, node = Path(option(options, "session-dir")), option(options, "node-id")
    for name in PORTS[kind]:
        unfinished = folder / f".{name}_{node}"
        unfinished.write_text(str(port))
        unfinished.replace(folder / f"{name}_{node}")


def await_call(parent_fd: int, listener: socket.socket) -> bool:
    """Wait until somebody connects: True; or until the parent has ended: False."""
    ready, _, _ = select.select([parent_fd, listener], (), ())
    return parent_fd not in ready


def main(kind: str, *command: str) -> None:
    node = int(os.environ[NODE_VARIABLE])
    parent_fd = os.pidfd_open(node)
    if os.getppid() != node:
        return  # it has ended already
    options = command[1:]
    if kind == DASHBOARD:
        tell_ports(kind, options, NO_PORT)
        select.select([parent_fd], (), ())
        return
    host, asked = option(options, "node-ip-address"), int(option(options, "runtime-env-agent-port"))
    family, *_, address = socket.getaddrinfo(host, asked, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        port = listener.getsockname()[1]
        tell_ports(kind, options, port)
        is_called = await_call(parent_fd, listener)
    if is_called:  # the node connects again until Ray's agent answers
        os.execv(sys.executable, [sys.executable, "-u", *command, f"--runtime-env-agent-port={port}"])


if __name__ == "__main__":
    main(*sys.argv[1:])
