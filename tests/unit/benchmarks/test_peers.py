"""Servers that are compared are started alike: the same cores, and the same number of ranks."""

from pathlib import Path

import pytest

from baton.core.errors import SetupError
from benchmarks.engine_cli import engine
from benchmarks.peers import baton_peer, vllm_peer


def option(command, name):
    return command[command.index(name) + 1]


def test_ranks_of_both_servers_have_a_core_each():
    baton, vllm = baton_peer(Path("m"), tensor=2), vllm_peer("vllm", Path("m"), tensor=2)
    assert option(baton.command, "--aggregated") == "1xtp2"
    assert "engine.threads=0" in baton.command  # the worker's ranks divide its cores
    assert option(vllm.command, "--tensor-parallel-size") == "2"
    assert vllm.env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"


def test_one_process_has_all_cores():
    baton, vllm = baton_peer(Path("m")), vllm_peer("vllm", Path("m"))
    assert option(baton.command, "--aggregated") == "1"
    assert "engine.threads={threads}" in baton.command
    assert "--tensor-parallel-size" not in vllm.command
    assert vllm.env["VLLM_CPU_OMP_THREADS_BIND"] == "{cores}"


def test_the_engine_alone_has_no_servers_of_ranks():
    with pytest.raises(SetupError, match="add --no-engine"):
        engine(tensor=2)
