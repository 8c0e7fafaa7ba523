"""GGUF files as models, against transformers on what they mean."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.config import EngineConfig, ModelConfig
from baton.config.served_models import default_name
from baton.core.errors import SetupError
from baton.core.sampling import SamplingParams
from engine.loading.load import load_model
from engine.model_files.check import check_model, check_tokenizer
from engine.model_files.gguf.config import llama3_divisor
from engine.model_files.gguf.reader import read_gguf
from engine.model_files.read_spec import load_spec
from engine.model_files.resolve import resolve_model
from router.text.sampling_defaults import SamplingDefaults, read_sampling_defaults
from router.text.tokenizer import Tokenizer
from tests.gguf_files import write_gguf
from tests.models import make_model
from tests.unit.engine.driver import Driver, load

PROMPT = list(range(5, 60))
COUNT = 10


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _expected(folder: Path) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    model.generation_config.eos_token_id = None
    tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False, pad_token_id=0)
    return tokens[0, len(PROMPT) :].tolist()


CASES = {
    "llama": ("llama", "Q8_0", {}),
    "llama F32": ("llama", "F32", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", "Q4_0", {}),
    "qwen3": ("qwen3", "Q5_1", {}),
    "gemma2": ("gemma2", "F32", {"query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3", "Q8_0", {"query_pre_attn_scalar": 32, "layer_types": ["sliding_attention"] * 3}),
    "phi3": ("phi3", "Q8_0", {}),
    "mixtral": ("mixtral", "Q8_0", {"intermediate_size": 64}),
    "qwen2_moe": ("qwen2_moe", "Q8_0", {"mlp_only_layers": [], "moe_intermediate_size": 64}),
    "qwen3_moe": ("qwen3_moe", "Q4_1", {"moe_intermediate_size": 64}),
}


@pytest.mark.parametrize("case", CASES)
def test_file_generates_what_its_weights_mean(tmp_path: Path, case: str) -> None:
    kind, matrices, changes = CASES[case]
    folder = make_model(tmp_path / "m", kind, with_tokenizer=False, **changes)
    same = shutil.copytree(folder, tmp_path / "same")
    file = write_gguf(folder, tmp_path / "tiny.gguf", matrices=matrices, meaning=same)
    executor = load(file, dtype="float32")
    assert executor.model_name == "tiny"
    assert Driver(executor).generate(PROMPT, SamplingParams(max_tokens=COUNT), chunk=16) == _expected(same)


def test_a_type_that_is_made_dense_is_told(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama", with_tokenizer=False)
    file = write_gguf(folder, tmp_path / "m.gguf", matrices="Q4_0")
    assert not [note for note in load(file).notes if note.startswith("weights: ")]
    _retype(file, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.IQ4_NL)
    (note,) = (note for note in load(file).notes if note.startswith("weights: "))
    assert "IQ4_NL matrices are made dense" in note
    rounded = load_model(ModelConfig(path=str(file), quantization="int8"), EngineConfig(kv_bytes=2**20))
    assert not [note for note in rounded.notes if note.startswith("weights: ")]


def _retype(file: Path, old: int, new: int) -> None:
    """Types whose blocks are of one size."""
    reader = gguf.GGUFReader(file, "r+")
    for tensor in reader.tensors:
        dtype = tensor.field.parts[4]
        if dtype[0] == old:
            dtype[0] = new
    reader.data.flush()


def test_parts_are_one_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama", with_tokenizer=False)
    parts = tmp_path / "parts"
    parts.mkdir()
    for number in range(2):
        write_gguf(folder, parts / f"m-{number + 1:05}-of-00002.gguf", part=(number, 2))
    whole = write_gguf(folder, tmp_path / "m.gguf")
    params = SamplingParams(max_tokens=4)
    assert Driver(load(parts)).generate(PROMPT, params) == Driver(load(whole)).generate(PROMPT, params)
    with pytest.raises(SetupError, match="name the first"):
        resolve_model(str(parts / "m-00002-of-00002.gguf"))
    (parts / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(SetupError, match="00002-of-00002"):
        load(parts)


def test_tokenizer_and_template_come_from_the_file(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama")
    file = write_gguf(folder, tmp_path / "tiny.gguf")
    unpacked = resolve_model(str(file))
    assert unpacked == resolve_model(str(file)), "made once"
    check_model(unpacked, ModelConfig(path=str(file)), EngineConfig())
    check_tokenizer(unpacked)
    ours, theirs = (AutoTokenizer.from_pretrained(f) for f in (unpacked, folder))
    for text in (
        "Paris is the capital.",
        "def f(x):\n    return x + 1\n",
        "Grüße 你好 🙂",
        "<|user|>hi<|eos|>",
    ):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text, add_special_tokens=False)) == text
    at_the_router = Tokenizer.load(str(file))
    assert at_the_router.card.eos_token_ids == (1,)
    assert at_the_router.card.context_tokens == 8192
    assert at_the_router.has_chat_template
    chat = [{"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    assert load_spec(unpacked).eos_token_ids == (1,)


def test_the_sampling_that_a_file_recommends_is_a_models_own(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama")
    sampling = {"temp": 0.5, "top_k": 40, "penalty_repeat": 1.25, "mirostat": 2}
    file = write_gguf(folder, tmp_path / "m.gguf", sampling=sampling)
    found = read_sampling_defaults(resolve_model(str(file)), "auto", {})
    assert found == SamplingDefaults(temperature=0.5, top_k=40, repetition_penalty=1.25)


def test_tokenizer_beside_the_file_comes_first(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama")
    file = write_gguf(folder, tmp_path / "tiny.gguf")
    before = resolve_model(str(file))
    shutil.copyfile(folder / "tokenizer.json", tmp_path / "tokenizer.json")
    after = resolve_model(str(file))
    assert after != before
    assert (after / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()


def test_llama3_rope_scaling_is_recognised(tmp_path: Path) -> None:
    """llama.cpp stores its effect: checked against transformers' own computation of it."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, head_dim=128, rope_parameters=scaling)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** (-torch.arange(0, 128, 2) / 128)
    divisors = [llama3_divisor(float(f), 8.0) for f in plain]
    torch.testing.assert_close(torch.tensor(divisors), plain / stretched, rtol=1e-5, atol=0)
    folder = make_model(
        tmp_path / "m", "llama", with_tokenizer=False, hidden_size=128, num_attention_heads=1,
        num_key_value_heads=1, head_dim=128, rope_parameters=scaling,
    )  # fmt: skip
    file = write_gguf(folder, tmp_path / "a.gguf")
    _add_tensor(file, "rope_freqs.weight", np.array(divisors, np.float32))
    executor = load(file, dtype="float32")
    assert Driver(executor).generate(PROMPT, SamplingParams(max_tokens=COUNT)) == _expected(folder)
    other = write_gguf(folder, tmp_path / "b.gguf")
    _add_tensor(other, "rope_freqs.weight", np.linspace(1, 3, 64, dtype=np.float32))
    with pytest.raises(SetupError, match="not Llama 3's scaling"):
        load(other)


def _add_tensor(file: Path, name: str, value: np.ndarray) -> None:
    """Written anew with one more tensor; its metadata must be numbers."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(file.with_suffix(".new"), "llama")
    for field in reader.fields.values():
        if field.name.startswith("llama."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.with_suffix(".new").replace(file)


def test_damaged_and_unknown_files_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama", with_tokenizer=False, num_hidden_layers=1)
    file = write_gguf(folder, tmp_path / "a.gguf")
    content = file.read_bytes()
    for cut in (0, 3, 20, 200, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:cut])
        with pytest.raises(SetupError):
            load(file)
    file.write_bytes(b"GGML" + content[4:])
    with pytest.raises(SetupError, match="not a GGUF file"):
        read_gguf(file)
    file.write_bytes(content[:4] + b"\x01\x00\x00\x00" + content[8:])
    with pytest.raises(SetupError, match="GGUF version 1"):
        read_gguf(file)
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SetupError, match="GGUF files of bert are not supported"):
        resolve_model(str(tmp_path / "bert.gguf"))


def test_random_damage_never_raises_anything_else(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama", num_hidden_layers=1, vocab=300)
    content = write_gguf(folder, tmp_path / "a.gguf").read_bytes()
    random = np.random.default_rng(3)
    damaged = tmp_path / "b.gguf"
    header_bytes = content.index(b"blk.0.attn_k") + 400
    for _ in range(150):
        changed = bytearray(content)
        for at in random.integers(0, header_bytes, 3):
            changed[at] = random.integers(0, 256)
        damaged.write_bytes(changed)
        try:
            read_gguf(damaged)
        except SetupError:
            continue


def test_names_of_gguf_models(tmp_path: Path) -> None:
    assert default_name("/models/tiny-Q8_0.gguf") == "tiny-Q8_0"
    assert default_name("org/model") == "model"
    two = tmp_path / "two"
    two.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (two / name).write_bytes(b"")
    with pytest.raises(SetupError, match=r"several GGUF files \(a\.gguf, b\.gguf\)"):
        resolve_model(str(two))
