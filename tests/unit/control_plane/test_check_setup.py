"""Errors in a setup are found before anything is started, in words that name them."""

import json
import shutil
import socket
from types import SimpleNamespace

import pytest

from baton.config import Config
from baton.core.errors import SetupError
from control_plane.launch import _pools_text, check_setup
from engine.model_files import check as model_check
from engine.model_files.check_experts import check_experts
from tests.models import make_model


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("m") / "good", "llama", shard=True)


@pytest.fixture
def model(good, tmp_path):
    return shutil.copytree(good, tmp_path / "m")


def config_of(path, *, router_port=0, **sections):
    model = {"path": str(path), **sections.pop("model", {})}
    return Config(model=model, router={"port": router_port}, **sections)


OWN_PORTS = (
    *(("cluster", name) for name in ("control_port", "control_metrics_port", "worker_port")),
    ("cluster", "worker_metrics_port"),
    ("store", "port"),
    ("store", "metrics_port"),
)


def refused(path, *, with_router=True, **sections):
    with pytest.raises(SetupError) as caught:
        check_setup(config_of(path, **sections), with_router=with_router)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_good_model_passes_in_both_forms(good, tmp_path):
    check_setup(config_of(good), with_router=True)
    check_setup(config_of(make_model(tmp_path / "one", "qwen3")), with_router=True)
    check_setup(config_of("org/on-the-hub"), with_router=True)


def test_config_json(model):
    (model / "config.json").write_text("{")
    assert "config.json" in refused(model)
    (model / "config.json").unlink()
    assert "no config.json" in refused(model)


def test_a_t5_folder_is_refused_for_its_architecture(model):
    t5 = {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "d_model": 512,
        "num_layers": 6,
    }
    (model / "config.json").write_text(json.dumps(t5))
    assert "architecture T5ForConditionalGeneration is not supported: it is no decoder that" in refused(model)


def test_no_architecture(model):
    edit(model, architectures=None)
    assert "architecture none is not supported" in refused(model)


def test_weights_that_are_missing_truncated_or_padded(model):
    shard = sorted(model.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    for content, says in (
        (whole[:-1], "truncated"),
        (whole[:100], "truncated"),
        (b"", "truncated"),
        (whole + b"\0", "damaged"),
    ):
        shard.write_bytes(content)
        said = refused(model)
        assert says in said
        assert shard.name in said
    shard.unlink()
    assert f"names {shard.name}, which is not in" in refused(model)
    (model / "model.safetensors.index.json").unlink()
    assert "no model.safetensors" in refused(model)


def test_no_tokenizer_matters_to_the_router_alone(model):
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer" in refused(model)
    check_setup(config_of(model), with_router=False)


def test_pools_too_small_and_too_large(good):
    assert "engine.kv_bytes=64 holds no KV block" in refused(good, engine={"kv_bytes": 64})
    said = refused(good, engine={"kv_bytes": 2**50})
    assert "engine.kv_bytes" in said
    assert "memory" in said


def test_a_pool_that_fits_once_but_not_for_every_worker(good):
    half = model_check.psutil.virtual_memory().total // 2
    assert "each of 3 workers" in refused(good, engine={"kv_bytes": half}, cluster={"decode_workers": 2})


def test_more_context_than_the_model_has(good):
    assert "context_tokens_max" in refused(good, model={"context_tokens_max": 10**6})


@pytest.mark.parametrize(
    ("build", "device", "says"),
    [
        ("cpu", "cuda", "torch is installed without CUDA"),
        ("cu130", "cuda", "shows 0 CUDA devices"),
        ("cu130", "cuda:x", "'cuda:x' does not exist"),
        ("cu130", "tpu", "use cpu, cuda or cuda:N"),
    ],
)
def test_devices(good, monkeypatch, build, device, says):
    monkeypatch.setattr(model_check, "_torch_build", lambda: build)
    monkeypatch.setattr(model_check, "_cuda_device_count", lambda: 0)
    assert says in refused(good, model={"device": device})
    # This machine cannot know whether another one has the device.
    check_setup(config_of(good, model={"device": device}, cluster={"ray_address": "h:1"}), with_router=True)


def test_cuda_devices_are_counted_from_zero(good, monkeypatch):
    monkeypatch.setattr(model_check, "_torch_build", lambda: "cu130")
    monkeypatch.setattr(model_check, "_cuda_device_count", lambda: 2)
    for device in ("cuda", "cuda:1"):
        check_setup(config_of(good, model={"device": device}), with_router=True)
    assert "2 CUDA devices" in refused(good, model={"device": "cuda:2"})


def test_paths_to_nothing(tmp_path):
    assert "no model" in refused("")
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "does not exist" in refused("nowhere")
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(tmp_path / "file")


def test_nobody_to_serve(good):
    assert "no workers" in refused(good, cluster={"prefill_workers": 0, "decode_workers": 0})


def test_ports_that_somebody_else_has(good):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refused(good, router_port=port)
        check_setup(config_of(good, router_port=port), with_router=False)
        for section, name in OWN_PORTS:
            said = refused(good, **{section: {name: port}})
            assert said.endswith(f"(choose another {section}.{name})"), said
        cluster = {"worker_port": port, "worker_metrics_port": port, "ray_address": "h:1"}
        check_setup(config_of(good, cluster=cluster), with_router=True)  # workers may be on other machines
        assert "cluster.control_port" in refused(good, cluster={"control_port": port})


def test_of_several_models_the_one_with_the_trouble_is_named(good):
    models = {
        "chat": {"model": {"path": str(good)}},
        "small": {"model": {"path": "/nowhere/at/all"}},
    }
    with pytest.raises(SetupError) as caught:
        check_setup(Config(models=models, router={"port": 0}), with_router=True)
    assert str(caught.value).startswith("models.small: ")
    assert "/nowhere/at/all does not exist" in str(caught.value)


def test_a_shape_that_does_not_divide_the_model_is_refused_with_the_role_and_the_widths(good):
    said = refused(good, cluster={"decode_workers": "1xtp3"})
    assert said.startswith("decode workers of shape tp3: tp3 is not possible: 4 attention heads do not")
    assert "possible are tp1, tp2" in said
    check_setup(config_of(good, cluster={"decode_workers": "1xtp2"}), with_router=True)


def test_the_shape_of_a_pool_without_workers_is_refused_as_such(good):
    pools = {"prefill_workers": 0, "decode_workers": 0, "aggregated_workers": "1xtp2"}
    said = refused(good, engine={"shape": "tp3"}, cluster=pools)
    assert said.endswith("(none is to start now, but one may later: set cluster.shapes.prefill)")
    assert "(none is to start" not in refused(good, engine={"shape": "tp3"}, cluster={"decode_workers": 1})


def test_ranks_that_are_not_executed_are_refused(good):
    cuda, shape = {"device": "cuda"}, {"decode_workers": "tp2cp2"}
    said = refused("org/on-the-hub", model=cuda, cluster=shape)
    assert said.startswith("decode workers of shape tp2cp2: context ranks share one KV pool")
    assert "model.device=cuda" in said
    said = refused(good, engine={"collectives": "torch"}, cluster={"decode_workers": "cp2"})
    assert "engine.collectives=torch" in said
    said = refused(
        good, model=cuda, engine={"collectives": "shared_memory"}, cluster={"decode_workers": "tp2"}
    )
    assert "needs tensors in host memory" in said
    said = refused(good, model={"device": "cuda:1"}, cluster={"decode_workers": "tp2"})
    assert "each rank needs its own" in said
    check_setup(config_of(good, engine={"shape": "tp2cp2"}), with_router=True)


def test_stages_that_are_more_than_layers_are_refused(good):
    check_setup(config_of(good, cluster={"decode_workers": "pp2"}), with_router=True)
    said = refused(good, cluster={"decode_workers": "pp9"})
    assert said.startswith("decode workers of shape pp9: pp9 has more stages than the model has layers")


def test_gpus_are_counted_for_all_ranks(good, monkeypatch):
    monkeypatch.setattr(model_check, "_torch_build", lambda: "cu130")
    monkeypatch.setattr(model_check, "_cuda_device_count", lambda: 2)
    cuda = {"device": "cuda"}
    check_setup(config_of(good, model=cuda, cluster={"decode_workers": 7}), with_router=True)
    check_setup(
        config_of(good, model=cuda, cluster={"aggregated_workers": "tp2", **NO_PAIR}), with_router=True
    )
    said = refused(good, model=cuda, cluster={"prefill_workers": "tp4"})
    assert "1 prefill of shape tp4, 1 decode of shape 1" in said
    assert "need 5 GPUs, and this machine shows 2 CUDA devices" in said
    assert "need 3 GPUs" in refused(good, model=cuda, cluster={"decode_workers": "tp2"})


NO_PAIR = {"prefill_workers": 0, "decode_workers": 0}


def test_more_streamed_layers_than_the_model_has_are_refused(good):
    assert "give a number up to 2, all or auto" in refused(good, model={"offload": "999"})
    assert "saves no memory" in refused(good, model={"offload": "1"})
    check_setup(config_of(good, model={"offload": "all"}), with_router=True)


def test_the_ready_text_names_shapes_of_several_ranks_alone():
    config = Config(
        cluster={"prefill_workers": "2xtp2", "decode_workers": 1, "shapes": {"aggregated": "tp4"}}
    )
    assert _pools_text(config) == "2 prefill of shape tp2, 1 decode, 0 aggregated"


def test_ranks_that_share_cores_are_told(good, monkeypatch, caplog):
    monkeypatch.setattr("control_plane.launch.usable_cores", lambda: [0, 1])
    check_setup(config_of(good, cluster={"decode_workers": 9}), with_router=True)
    check_setup(config_of(good, cluster={"aggregated_workers": "tp2", **NO_PAIR}), with_router=True)
    assert not caplog.records
    check_setup(config_of(good, cluster={"decode_workers": "2xtp2"}), with_router=True)
    assert "have 5 ranks in all, and this machine has 2 cores" in caplog.text
    assert "ranks of a worker wait for each other in every layer" in caplog.text
    caplog.clear()
    check_setup(config_of(good, cluster={"decode_workers": "2xpp2"}), with_router=True)
    assert "stages of a worker wait for each other in every step" in caplog.text


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("m") / "moe", "qwen3_moe")


@pytest.mark.parametrize(
    "experts", [{"parallel": "workers"}, {"parallel": "ranks", "ranks": 3, "replicas": 2}, {}]
)
def test_experts_may_be_on_ranks_of_their_own(moe, experts):
    check_setup(config_of(moe, experts=experts), with_router=True)
    check_setup(config_of("org/on-the-hub", experts=experts), with_router=True)


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        ({"parallel": "ranks"}, "experts.ranks is 0: say how many with --experts N"),
        ({"ranks": 2}, "experts.ranks=2 is for experts.parallel=ranks, and experts.parallel is off"),
        ({"parallel": "workers", "ranks": 2}, "experts.parallel is workers"),
        (
            {"parallel": "ranks", "ranks": 2, "replicas": 2.5},
            "experts.replicas=2.5 needs as many expert ranks, and the prefill pool has 2",
        ),
        ({"parallel": "workers", "replicas": 2}, "the prefill pool has 1"),
    ],
)
def test_settings_of_experts_that_contradict_each_other_are_named(moe, experts, says):
    assert says in refused(moe, experts=experts)


@pytest.mark.parametrize(
    ("experts", "is_warned"),
    [
        ({"parallel": "workers"}, True),
        ({"parallel": "ranks", "ranks": 1}, True),
        ({"parallel": "ranks", "ranks": 2}, False),
        ({}, False),
    ],
)
def test_a_group_of_one_rank_is_warned_of(moe, caplog, experts, is_warned):
    check_setup(config_of(moe, experts=experts), with_router=True)
    lines = [record.getMessage() for record in caplog.records if "on one rank" in record.getMessage()]
    assert bool(lines) == is_warned
    assert all("use --experts 2 or more with experts.replicas=2" in line for line in lines)
    assert any("add workers to the pool" in line for line in lines) == (experts.get("parallel") == "workers")


def test_a_model_without_experts_has_none_on_ranks(good):
    assert "no routed experts" in refused(good, experts={"parallel": "workers"})


def test_experts_that_do_not_fit_are_counted(moe, monkeypatch):
    monkeypatch.setattr(
        "engine.model_files.check_experts.psutil.virtual_memory", lambda: SimpleNamespace(total=2**10)
    )
    settings = {"experts": {"parallel": "ranks", "ranks": 2}, "engine": {"kv_bytes": 1}}
    text = refused_experts(moe, **settings)
    assert "the experts do not fit: 2 layers of 8 experts" in text
    assert "for each of 2 pools" in text


def refused_experts(path, **sections):
    with pytest.raises(SetupError) as caught:
        check_experts(config_of(path, **sections), path)
    return str(caught.value)


def test_one_of_several_models_may_keep_its_experts(moe, good):
    models = {
        "a": {"model": {"path": str(moe)}},
        "b": {"model": {"path": str(good)}, "experts": {"parallel": "off"}},
    }
    config = Config(models=models, experts={"parallel": "ranks", "ranks": 2}, router={"port": 0})
    check_setup(config, with_router=True)
    models["b"]["experts"] = {}
    with pytest.raises(SetupError, match=r"models\.b: experts\.parallel: this model has no routed"):
        check_setup(
            Config(models=models, experts={"parallel": "ranks", "ranks": 2}, router={"port": 0}),
            with_router=True,
        )


def test_more_expert_ranks_than_replicas_are_refused(moe):
    said = refused(moe, experts={"parallel": "ranks", "ranks": 40, "replicas": 2})
    assert "more than 16 ranks would have nothing to hold" in said
