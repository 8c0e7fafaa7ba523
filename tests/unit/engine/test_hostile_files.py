"""Model and adapter files that lie: each is refused in one line that names the file, and quickly."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.core.errors import SetupError
from engine.loading.checkpoint import Checkpoint
from engine.model_files.adapter_files import read_adapter
from engine.model_files.gguf.config import hugging_face_config
from engine.model_files.gguf.reader import read_gguf
from engine.model_files.read_spec import load_spec, parse_spec
from engine.model_files.resolve import local_folder
from engine.model_files.safetensors_files import read_header, weight_files
from tests.models import make_model

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
CPU = torch.device("cpu")


def refused(call, *args, **kwargs):
    with pytest.raises(SetupError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) <= 4000
    return message


# --- safetensors ----------------------------------------------------------------------------------


def entry(start, end, *, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def safetensors(tmp_path, header, *, data_bytes=64, header_bytes=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if header_bytes is None else header_bytes
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", size) + text + bytes(data_bytes))
    return file


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(0, 48), "b": entry(16, 64)},  # they overlap
        {"a": entry(0, 64), "b": entry(0, 64)},
        {"a": entry(0, 16), "b": entry(32, 64)},  # a hole between them
        {"a": entry(8, 64)},
        {"a": {"dtype": "U8", "shape": [64], "data_offsets": [0.0, 64.9]}},
        {"a": {"dtype": "U8", "shape": [64], "data_offsets": [0, "64"]}},
        {"a": {"dtype": "U8", "shape": [True] * 2 + [64], "data_offsets": [0, 64]}},
        {"a": {"dtype": ["U8"], "shape": [64], "data_offsets": [0, 64]}},
        {"a": {"dtype": "XX", "shape": [2**62, 2**62], "data_offsets": [0, 2**70]}},
        {"a": {"dtype": "U8", "shape": [1] * 1000 + [64], "data_offsets": [0, 64]}},
        b'{"a": {"dtype":"U8","shape":[64],"data_offsets":[0,64]}, "a": {"dtype":"I8","shape":[64],'
        b'"data_offsets":[0,64]}}',
        b"[" * 60_000,
        b'{"a": {"dtype":"U8","shape":[1e999],"data_offsets":[0,64]}}',
        b'{"evil\\nname\\u001b[31m": {"dtype":"U8","shape":[1],"data_offsets":[0,64]}}',
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header):
    assert "model.safetensors" in refused(read_header, safetensors(tmp_path, header))


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 2**40, 65])
def test_a_header_longer_than_its_file_is_refused(tmp_path, size):
    file = safetensors(tmp_path, b"{}", data_bytes=0, header_bytes=size)
    assert "truncated" in refused(read_header, file)


def test_a_tensor_without_values_may_stand_anywhere(tmp_path):
    header = {"a": entry(0, 64), "none": entry(64, 64), "also": entry(0, 0)}
    assert len(read_header(safetensors(tmp_path, header))[1]) == 3


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "..", ".", "", "a/b", "x" * 5000, "a\0b", "\n", "part"]
)
def test_an_index_leads_to_files_of_its_folder_only(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(b"")
    folder = tmp_path / "m"
    (folder / "part").mkdir(parents=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "index.json" in refused(weight_files, folder)


def test_an_index_without_end_is_refused_before_it_is_parsed(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    with index.open("wb") as file:
        file.write(b'{"weight_map": {')
        file.truncate(2**35)  # as if of a billion entries; it takes no space
    assert "more than" in refused(weight_files, tmp_path)


def test_links_of_the_hubs_cache_are_followed(tmp_path):
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    folder.mkdir()
    save_file({"a": torch.zeros(4)}, blobs / "0a1b")
    (folder / "part.safetensors").symlink_to("../blobs/0a1b")
    index = {"weight_map": {"a": "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Checkpoint(folder).names == {"a"}


def test_a_file_that_becomes_shorter_is_an_error_and_no_crash(tmp_path):
    folder = make_model(tmp_path / "m", "llama", with_tokenizer=False, num_hidden_layers=1)
    checkpoint = Checkpoint(folder)
    name = next(iter(checkpoint.names))
    os.truncate(folder / "model.safetensors", 4096)
    assert "became shorter" in refused(checkpoint.raw, name, device=CPU)
    assert "became shorter" in refused(checkpoint.digest)


# --- config.json ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**400},
        {"vocab_size": 10**18},
        {"max_position_embeddings": 2**40},
        {"head_dim": 0},
        {"head_dim": -2},
        {"head_dim": "16"},
        {"hidden_size": 1e999},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1.0},
        {"rope_theta": 0},
        {"rope_theta": -10_000.0},
        {"rope_theta": 10**400},
        {"partial_rotary_factor": float("nan")},
        {"partial_rotary_factor": float("inf")},
        {"rope_scaling": {"rope_type": "linear", "factor": 0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": -1}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        {"rope_scaling": {"rope_type": "x" * 10_000}},
        {"eos_token_id": [2**70]},
        {"eos_token_id": True},
        {"eos_token_id": list(range(100_000))},
        {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 0},
        {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": -4},
        {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 10**9},
        {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "num_hidden_layers": 10**9},
        {"architectures": [{"a": "b" * 100_000}]},
        {"hidden_act": "x" * 100_000},
        {"dtype": "x" * 100_000},
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes):
    assert "config.json" in refused(parse_spec, {**BASE, **changes})


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":' * 50_000, b'{"vocab_size": 1, "vocab_size": 2}', b"1" * 5000, b"\xff"]
)
def test_json_that_is_none_or_says_two_things_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    assert "config.json" in refused(load_spec, tmp_path)


def test_a_config_without_end_is_refused(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**35)
    assert "more than" in refused(load_spec, tmp_path)


def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert "no regular file" in refused(load_spec, tmp_path)
    os.mkfifo(tmp_path / "adapter_config.json")
    assert "no regular file" in refused(read_adapter, tmp_path, rank_max=8)
    os.mkfifo(tmp_path / "a.gguf")
    assert "no regular file" in refused(read_gguf, tmp_path / "a.gguf")


# --- GGUF -----------------------------------------------------------------------------------------

U32, F32, STRING, ARRAY = 4, 6, 8, 9


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def gguf_file(tmp_path, entries, tensors=(), *, counts=None, data_bytes=256):
    """entries: (key, type, packed value). tensors: (name, shape as in the file, type, offset)."""
    counted = counts or (len(tensors), len(entries))
    content = b"GGUF" + struct.pack("<IQQ", 3, *counted)
    for key, kind, value in entries:
        content += text(key) + struct.pack("<I", kind) + value
    for name, shape, kind, offset in tensors:
        content += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    file = tmp_path / "a.gguf"
    file.write_bytes(content + bytes(-len(content) % 32 + data_bytes))
    return file


def u32(key, value):
    return key, U32, struct.pack("<I", value)


@pytest.mark.parametrize(
    ("entries", "tensors", "counts"),
    [
        ([], [("a", (8,), 0, 0), ("b", (8,), 0, 16)], None),  # they overlap
        ([], [("a", (8,), 0, 0), ("a", (8,), 0, 32)], None),
        ([], [("a", (2**60, 2**60), 0, 0)], None),
        ([], [("a", (8,), 0, 2**63)], None),
        ([u32("x", 1), u32("x", 2)], [], None),
        ([], [], (2**63, 0)),
        ([], [], (0, 2**40)),
        ([("x", STRING, struct.pack("<Q", 2**63))], [], None),
        ([("x", ARRAY, struct.pack("<IQ", U32, 2**40))], [], None),
        ([("x", ARRAY, struct.pack("<IQ", STRING, 2**24))], [], None),
        ([u32("general.alignment", 0)], [], None),
        ([u32("general.alignment", 2**31)], [("a", (8,), 0, 0)], None),
    ],
)
def test_a_gguf_header_that_lies_is_refused(tmp_path, entries, tensors, counts):
    assert "a.gguf" in refused(read_gguf, gguf_file(tmp_path, entries, tensors, counts=counts))


LLAMA = [
    ("general.architecture", STRING, text("llama")),
    *(u32(f"llama.{name}", 2) for name in ("block_count", "context_length", "feed_forward_length")),
    u32("llama.embedding_length", 8),
    u32("llama.attention.head_count", 2),
    ("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)),
]
EMBEDDING = ("token_embd.weight", (8, 2), 0, 0)


def config_of(tmp_path, *changed, tensors=(EMBEDDING,)):
    names = {key for key, *_ in changed}
    kept = [one for one in LLAMA if one[0] not in names]
    return hugging_face_config(read_gguf(gguf_file(tmp_path, [*kept, *changed], tensors)))


def test_a_sound_gguf_file_of_these_tests_is_read(tmp_path):
    assert parse_spec(config_of(tmp_path)).layer_count == 2


@pytest.mark.parametrize(
    "changed",
    [
        u32("llama.attention.head_count", 0),
        u32("llama.embedding_length", 0),
        u32("llama.block_count", 2**31),
        ("general.architecture", ARRAY, struct.pack("<IQI", U32, 1, 1)),
        ("llama.rope.freq_base", F32, struct.pack("<f", -1.0)),
        ("llama.rope.freq_base", F32, struct.pack("<f", float("nan"))),
    ],
)
def test_gguf_metadata_that_makes_no_sense_is_refused(tmp_path, changed):
    factors = ("rope_freqs.weight", (2,), 0, 64)
    refused(lambda: parse_spec(config_of(tmp_path, changed, tensors=(EMBEDDING, factors))))


def test_gguf_rope_factors_of_no_or_too_many_values_are_refused(tmp_path):
    for count in (0, 2**20):
        factors = ("rope_freqs.weight", (count,), 0, 64)
        file = gguf_file(tmp_path, LLAMA, (EMBEDDING, factors), data_bytes=256 + 4 * count)
        refused(lambda file=file: hugging_face_config(read_gguf(file)))


# --- adapters and hub ids -------------------------------------------------------------------------


def adapter(tmp_path, **config):
    folder = tmp_path / "adapter"
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file(
        {name.format("A"): torch.zeros(2, 4), name.format("B"): torch.zeros(4, 2)},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, **config}))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {"r": 10**400},
        {"lora_alpha": 10**400},
        {"lora_alpha": float("nan")},
        {"alpha_pattern": {"q_proj": float("inf")}},
        {"peft_type": "x" * 100_000},
        {"bias": "x" * 100_000},
    ],
)
def test_an_adapters_config_that_makes_no_sense_is_refused(tmp_path, config):
    assert "adapter" in refused(read_adapter, adapter(tmp_path, **config), rank_max=8)


def test_pickled_weights_are_never_read(tmp_path):
    """A .bin or .pt file is a program. Only safetensors and GGUF files are read."""
    folder = adapter(tmp_path)
    (folder / "adapter_model.safetensors").unlink()
    ran = tmp_path / "ran"
    torch.save({"a": _Program(str(ran))}, folder / "adapter_model.bin")
    assert "has no adapter_model.safetensors" in refused(read_adapter, folder, rank_max=8)
    torch.save({"a": _Program(str(ran))}, folder / "pytorch_model.bin")
    assert "no model.safetensors" in refused(weight_files, folder)
    assert not ran.exists()


class _Program:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("name", ["a\0b", "~nobody-at-all/x", "../x/..", "/nowhere", "a/../b", "x" * 5000])
def test_names_of_models_that_lead_nowhere_are_refused(name, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # beside which there is no x
    refused(local_folder, name)


@pytest.mark.parametrize("name", ["a/..", "org/na me", "org/.name", "-a/b", "org/a\nb"])
def test_hub_ids_that_are_none_are_refused_without_a_call(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from engine.model_files.resolve import resolve_model

    refused(resolve_model, name)
