"""Where a worker's memory went, in one line, and the size of a pool that nobody chose."""

import mmap

import numpy as np
import pytest

from baton.config import Config, EngineConfig, ModelConfig
from baton.core.geometry import KVGeometry
from baton.core.shape import Shape
from engine.loading.load import load_model, with_kv_bytes
from engine.model_files.host_memory import memory_limit, own_bytes, resident_at
from engine.model_files.sizes import KV_BYTES_MIN, automatic_kv_bytes, device_kv_bytes
from tests.models import make_model
from worker.memory_note import memory_text, runtime_bytes, with_pool_size

SMOLLM2 = KVGeometry(layer_count=30, kv_head_count=3, head_dim=64, block_tokens=32, dtype="bfloat16")
MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "llama", seed=1)


def size(context_tokens, *, memory_bytes=64 * 1024 * MIB, workers=2):
    return automatic_kv_bytes(SMOLLM2, context_tokens, memory_bytes=memory_bytes, worker_count=workers)


def test_a_pool_holds_a_whole_context_and_a_quarter():
    tokens = size(8192) // (SMOLLM2.block_bytes // 32)
    assert tokens == 8192 * 5 // 4


def test_small_contexts_get_the_least_and_large_ones_a_share_of_the_memory():
    assert size(512) == KV_BYTES_MIN
    assert size(131_072, memory_bytes=4 * 1024 * MIB, workers=2) == 1024 * MIB
    assert size(131_072, memory_bytes=4 * 1024 * MIB, workers=4) == 512 * MIB
    assert size(131_072, memory_bytes=MIB, workers=4) == SMOLLM2.block_bytes


GIB = 1024 * MIB
LLAMA_8B = KVGeometry(layer_count=32, kv_head_count=8, head_dim=128, block_tokens=32, dtype="bfloat16")
LATENT = KVGeometry(4, 1, 576, 32, "bfloat16", planes=1, value_dim=512)


def test_a_pool_on_a_gpu_takes_what_weights_leave():
    def left(shape: str, geometry=LLAMA_8B, workers=1, weights=16 * GIB):
        found = device_kv_bytes(
            geometry,
            Shape.parse(shape),
            memory_bytes=80 * GIB,
            worker_count=workers,
            weights_bytes=weights,
        )
        return found / GIB

    assert left("1") == 72 - 2 - 16
    assert left("1", workers=2) == 36 - 2 - 16
    assert left("tp2") == 2 * (72 - 2 - 8)
    assert left("pp2") == 2 * (72 - 2 - 8)
    assert left("tp16") == 8 * (72 - 2 - 1)  # two ranks have the same head
    assert left("tp2", LATENT) == 72 - 2 - 8
    assert left("1", weights=100 * GIB) == 0


def test_workers_of_one_gpu_share_it_and_others_do_not(monkeypatch):
    seen = []

    def sized(model, engine, *, worker_count, knows_share):
        seen.append((worker_count, knows_share))
        return engine

    monkeypatch.setattr("worker.memory_note.with_kv_bytes", sized)
    config = Config(model={"path": "x"}, cluster={"prefill_workers": 3, "decode_workers": 2})
    for gpus in (0.5, 1.0, 4.0, 0.0):
        with_pool_size(config, gpus)
    assert seen == [(2, True), (1, True), (1, True), (5, False)]


def test_a_size_that_was_chosen_stays(model):
    config = Config(model={"path": str(model)}, engine={"kv_bytes": 3 * MIB})
    assert with_pool_size(config) == config


def test_a_model_loads_with_a_pool_that_nobody_sized(model):
    asked = ModelConfig(path=str(model))
    sized = with_kv_bytes(asked, EngineConfig(), worker_count=2)
    assert sized.kv_bytes == KV_BYTES_MIN <= memory_limit()
    loaded = load_model(asked, EngineConfig(kernels="torch"))
    kv = loaded.kv
    assert kv.block_count == sized.kv_bytes // kv.block_bytes
    assert loaded.weights_bytes >= 0


def test_resident_memory_is_that_of_the_mapping():
    # The C library might give memory that something else has used and freed.
    memory = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block = np.frombuffer(memory, np.uint8)
    address = block.ctypes.data + 4 * MIB
    before = resident_at(address)
    block[: 32 * MIB] = 1
    assert resident_at(address) - before >= 31 * MIB
    assert resident_at(1) == 0
    assert own_bytes()["RssAnon"] >= 32 * MIB


def test_the_note_adds_up():
    own = {"RssAnon": 700_000_000, "RssFile": 100_000_000, "RssShmem": 1_000_000_000}
    assert runtime_bytes(own, weights_bytes=200_000_000, pool_bytes=236_000_000) == 364_000_000
    assert runtime_bytes({}, weights_bytes=1, pool_bytes=1) == 0
    text = memory_text(
        weights_bytes=200_000_000, pool_bytes=236_000_000, pool_tokens=10_240, runtime_bytes=364_000_000
    )
    assert "weights 200 MB, KV pool 236 MB (10,240 tokens), libraries and working memory 364 MB" in text
    text = memory_text(weights_bytes=1, pool_bytes=1, pool_tokens=1, runtime_bytes=1, ranks=3)
    assert "of the first of 3 ranks: weights" in text
