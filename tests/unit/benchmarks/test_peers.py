"""Servers that are compared are started alike: the same cores, and the same number of ranks."""

from pathlib import Path

import pytest
import torch

from baton.core.errors import SetupError
from benchmarks.engine import bare_products
from benchmarks.engine_cli import Others, Slots, engine, peers_of
from benchmarks.peers import baton_peer, vllm_peer
from benchmarks.transformers_prefill import transformers_prefill
from tests.gguf_files import write_gguf
from tests.models import make_model


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


@pytest.mark.parametrize(("tensor", "name"), [(1, "baton, TPOT 40 ms"), (2, "baton tp2, TPOT 40 ms")])
def test_an_objective_is_measured_beside_the_default(tmp_path, tensor, name):
    found = peers_of(tmp_path, ["none"], [], Slots(8, 1024), Others(False, tensor), tpot_slo_s=0.04)
    assert found[0].name == name
    assert "engine.tpot_slo_s=0.04" in found[0].command
    others = [peer for peer in found if peer is not found[0]]
    assert not any("engine.tpot_slo_s" in word for peer in others for word in peer.command)


def test_the_engine_alone_has_no_servers_of_ranks():
    with pytest.raises(SetupError, match="add --no-engine"):
        engine(tensor=2)


def test_llama_cpp_serves_the_same_gguf_file_with_room_for_the_prompts(tmp_path):
    """vLLM and transformers are no servers of such a file on a CPU, though they are installed."""
    for name in ("llama-server", "vllm", "transformers"):
        program = tmp_path / name
        program.touch(mode=0o755)
    given = [f"{name}={tmp_path}" for name in ("llama-server", "vllm", "transformers")]
    file = tmp_path / "m.Q4_1.gguf"
    found = peers_of(file, ["none"], given, Slots(2, 3000), Others(own_model=False))
    assert [peer.name for peer in found] == ["baton", "baton, speculation", "llama.cpp"]
    llama = found[-1].command
    assert (option(llama, "-m"), option(llama, "-c"), option(llama, "-np")) == (str(file), "6000", "2")


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_number_type_asked_for_is_that_of_the_other_servers(tmp_path, dtype, tensor):
    for name in ("vllm", "transformers"):
        (tmp_path / name).touch(mode=0o755)
    given = [f"{name}={tmp_path}" for name in ("vllm", "transformers")]
    found = peers_of(tmp_path, ["none"], given, Slots(8, 1024), Others(False, tensor, dtype))
    others = [peer for peer in found if not peer.name.startswith("baton")]
    assert [peer.name for peer in others] == (["vllm tp2"] if tensor > 1 else ["vllm", "transformers"])
    assert [option(peer.command, "--dtype") for peer in others] == [dtype] * len(others)


@pytest.mark.parametrize("faster", ["bfloat16", "float32"])
def test_bare_products_are_those_of_the_faster_number_type(monkeypatch, faster):
    multiplied = []

    def linear(x, weight):
        multiplied.append((weight.dtype, *weight.shape))
        clock[0] += 1.0 if weight.dtype == getattr(torch, faster) else 2.0

    clock = [0.0]
    monkeypatch.setattr("benchmarks.engine.F.linear", linear)
    monkeypatch.setattr("benchmarks.engine.time.perf_counter", lambda: clock[0])
    dtype, bare = bare_products([(64, 32, True), (128, 64, False)], 16)
    multiplied.clear()
    assert (dtype, bare()) == (faster, 2.0)
    kind = getattr(torch, faster)
    assert multiplied == [(kind, 64, 32), (kind, 128, 64)]


@pytest.mark.parametrize("is_gguf", [False, True])
def test_transformers_computes_the_prompt_of_a_folder_or_a_file(tmp_path, is_gguf):
    model = make_model(tmp_path / "model", "llama")
    path = write_gguf(model, tmp_path / "m.gguf", matrices="F16") if is_gguf else model
    assert transformers_prefill(path, range(3, 20))() > 0


def test_a_model_that_transformers_cannot_load_is_named(tmp_path):
    with pytest.raises(SetupError, match="transformers does not load"):
        transformers_prefill(tmp_path, [1])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"with_servers": False, "with_engine": False}, "nothing to measure"),
        ({"threads": "4096"}, "4096 cores are asked for"),
        ({"tensor": 4096, "with_engine": False}, "4096 cores are asked for"),
        ({"quantization": "int3"}, "int3"),
        ({"concurrency": "0"}, "--concurrency 0"),
        ({"peer": ["vllm=/nonexistent"]}, "no program vllm at /nonexistent"),
        ({"peer": ["foo=/bin/ls"]}, "NAME is one of vllm"),
        ({"peer_dtype": "float16"}, "--peer-dtype float16: choose bfloat16 or float32"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is(asked, said, monkeypatch):
    monkeypatch.setattr("benchmarks.engine_cli.make_bench_model", lambda folder: pytest.fail("it began"))
    with pytest.raises(SetupError, match=said):
        engine(**asked)
