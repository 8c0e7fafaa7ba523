"""Parts of every kind of checkpoint: tensor ranks hold what one rank holds, each its shard, and read no
more."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.config import ModelConfig
from baton.core.errors import SetupError
from baton.core.messages import AdapterRef
from baton.core.sampling import SamplingParams
from engine.kernels.native import NativeExperts
from engine.kernels.native_matrices import NativeMatrix
from engine.kernels.weights import to_dense
from engine.loading import checkpoint as checkpoint_module
from engine.loading.divided_source import DividedSource
from engine.loading.parts import take
from engine.loading.sources import open_checkpoint, open_source
from engine.model_files.adapter_files import digest_adapter
from engine.model_files.division import Division
from engine.model_files.read_spec import load_spec
from tests import quantised as q
from tests.adapters import make_adapter
from tests.gguf_files import write_gguf
from tests.models import make_model
from tests.thread_ranks import ThreadGroup, run_ranks
from tests.unit.engine.driver import Driver, load
from tests.unit.engine.test_families import prompt

GENERATED = SamplingParams(max_tokens=8)
PROMPTS = [prompt(36), prompt(70)]
ON_CPU: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = tuple(f"self_attn.{name}" for name in ATTENTION) + tuple(
    f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")
)
FUSED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
W8A8 = q.compressed_config("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True)


def _packed(**weights: Any) -> dict[str, Any]:
    return q.compressed_config("pack-quantized", num_bits=4, type="int", strategy="group", **weights)


CHECKPOINTS: dict[str, tuple[str, q.Module, dict[str, Any]]] = {
    "gptq": ("llama", partial(q.gptq_module, group_size=16, symmetric=False), GPTQ),
    "gptq 8 bits": ("phi3", partial(q.gptq_module, group_size=16, bits=8), {**GPTQ, "bits": 8}),
    "gptq whole rows": ("llama", partial(q.gptq_module, group_size=-1), {**GPTQ, "group_size": -1}),
    "awq": ("llama", partial(q.awq_module, group_size=16), AWQ),
    "awq fused": ("phi3", partial(q.awq_module, group_size=16), AWQ),
    "packed": ("qwen2", partial(q.packed_module, group_size=16), _packed(symmetric=True, group_size=16)),
    "packed with zeros": (
        "phi3",
        partial(q.packed_module, group_size=16, symmetric=False),
        _packed(symmetric=False, group_size=16),
    ),
    "int8": ("qwen3", q.int8_module, W8A8),
    "fp8": ("phi3", q.fp8_module, {"quant_method": "fp8"}),
    "fp8 blocks": (
        "llama",
        partial(q.fp8_module, block=16),
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
    ),
}


def assert_parts_are_those_of_the_whole(
    folder: Path, modules: tuple[str, ...], tensor: int, **model: Any
) -> None:
    """Every rank's matrices mean exactly what their places in the whole model's mean."""
    spec = load_spec(folder)
    inner = open_source(open_checkpoint(folder), spec, ModelConfig(path=str(folder), **model), **ON_CPU)
    for module in [f"model.layers.1.{name}" for name in modules] + ["lm_head"] * inner.has("lm_head"):
        for rank in range(tensor):
            division = Division(spec, tensor, rank)
            cut = division.cut(module)
            places = cut.rows or cut.columns
            assert places is not None, module
            of_rank, total = sum(map(len, places.places)), places.total
            if cut.rows is not None:
                whole = inner.matrix(module, total, 64)
                part = DividedSource(inner, division).matrix(module, of_rank, 64)
                cuts = (cut.rows.places,)
            else:
                whole = inner.matrix(module, 64, total)
                part = DividedSource(inner, division).matrix(module, 64, of_rank)
                cuts = (None, places.places)
            expected = take(to_dense(whole, torch.float32).weight, cuts)
            assert torch.equal(to_dense(part, torch.float32).weight, expected), (module, rank)
            assert type(part) is type(whole)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_parts_of_quantised_checkpoints(tmp_path: Path, name: str) -> None:
    kind, module, config = CHECKPOINTS[name]
    dense = make_model(tmp_path / "m", kind, with_tokenizer=False)  # type: ignore[arg-type]
    q.quantise_folder(dense, tmp_path / "q", module=module, config=config)
    for tensor in (2, 4):
        assert_parts_are_those_of_the_whole(tmp_path / "q", FUSED if kind == "phi3" else DENSE, tensor)


@pytest.mark.parametrize("kind", ["int8", "int4", "w8a8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_parts_are_rounded_as_the_whole_is(tmp_path: Path, family: Any, kind: str) -> None:
    """Groups of 64 and 128 inputs are larger than what four ranks hold of them."""
    folder = make_model(tmp_path, family, with_tokenizer=False)
    _skew(folder)
    for tensor in (2, 4):
        modules = FUSED if family == "phi3" else DENSE
        assert_parts_are_those_of_the_whole(folder, modules, tensor, quantization=kind)


def _skew(folder: Path) -> None:
    """Rows that differ in whether zero points pay: those that a rank holds would say otherwise."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "layers" in name:
            tensor[: len(tensor) // 2] += 0.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def generate(folder: Path, size: int, **model: Any) -> list[list[int]]:
    """Tokens of all ranks, which are the same."""

    def work(group: ThreadGroup) -> list[list[int]]:
        driver = Driver(load(folder, group=group, kv_bytes=2**21, **model))
        running = [driver.start(tokens, GENERATED) for tokens in PROMPTS]
        driver.finish(*running, chunk=33)
        return [one.generated for one in running]

    first, *others = run_ranks(size, work)
    assert all(one == first for one in others)
    return first


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "int8"), ("qwen2", "int4"), ("deepseek_v2", "int8"), ("gpt_oss", "int4")]
)
def test_quantised_at_load_gives_the_tokens_of_one_rank(tmp_path: Path, family: Any, kind: str) -> None:
    folder = make_model(tmp_path, family, with_tokenizer=False)
    assert generate(folder, 2, quantization=kind) == generate(folder, 1, quantization=kind)


@pytest.mark.parametrize("name", ["gptq", "awq", "packed with zeros"])
def test_int4_checkpoint_gives_the_tokens_of_one_rank(tmp_path: Path, name: str) -> None:
    kind, module, config = CHECKPOINTS[name]
    dense = make_model(tmp_path / "m", kind, with_tokenizer=False)  # type: ignore[arg-type]
    q.quantise_folder(dense, tmp_path / "q", module=module, config=config)
    one = generate(tmp_path / "q", 1)
    assert generate(tmp_path / "q", 2) == generate(tmp_path / "q", 4) == one


def test_act_order_divides_outputs_only(tmp_path: Path) -> None:
    dense = make_model(tmp_path / "m", "llama", with_tokenizer=False)
    module = partial(q.gptq_module, group_size=16, act_order=True)
    q.quantise_folder(dense, tmp_path / "q", module=module, config={**GPTQ, "desc_act": True})
    outputs = tuple(name for name in DENSE if not name.endswith(("o_proj", "down_proj")))
    assert_parts_are_those_of_the_whole(tmp_path / "q", outputs, 2)
    with pytest.raises(SetupError, match=r"o_proj: its inputs are ordered by activation .* or tp1"):
        generate(tmp_path / "q", 2)


# --- gguf -----------------------------------------------------------------------------------------


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize(
    ("kind", "matrices", "changes"),
    [
        ("llama", "Q8_0", {}),
        ("phi3", "Q5_1", {}),
        ("qwen2", "Q8_0", {}),
        ("mixtral", "Q8_0", {"intermediate_size": 64}),
        ("llama", "F32", {"tie_word_embeddings": True}),
    ],
)
def test_gguf_gives_the_tokens_of_one_rank(tmp_path: Path, kind: Any, matrices: str, changes: Any) -> None:
    folder = make_model(tmp_path / "m", kind, with_tokenizer=False, **changes)
    file = write_gguf(folder, tmp_path / "m.gguf", matrices=matrices)
    assert generate(file, 2, dtype="float32") == generate(file, 1, dtype="float32")


@pytest.mark.usefixtures("_own_cache")
def test_k_blocks_of_gguf_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "vocab": 260}
    folder = make_model(tmp_path / "m", "qwen3", with_tokenizer=False, **sizes)
    monkeypatch.setattr(gguf, "quantize", _random_blocks)
    file = write_gguf(folder, tmp_path / "m.gguf", matrices="Q4_K")
    prompts = [[token % 260 for token in tokens] for tokens in PROMPTS]
    monkeypatch.setattr("tests.unit.engine.test_divided_weights.PROMPTS", prompts)
    assert generate(file, 2, dtype="float32") == generate(file, 1, dtype="float32")
    message = r"512 inputs of blk\.0\.attn_output\.weight cannot be divided: 0 to 128.* Q4_K blocks of 256"
    with pytest.raises(SetupError, match=message):
        load(file, dtype="float32", group=ThreadGroup(0, 4, None, [], {}))  # type: ignore[arg-type]


def _random_blocks(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The library reads K types and does not write them."""
    if kind is gguf.GGMLQuantizationType.F32:
        return values.astype(np.float32)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(values.size)
    shape = (*values.shape[:-1], values.shape[-1] // per_block, block_bytes)
    blocks = random.integers(0, 256, shape, dtype=np.uint8)
    for at in (0, 2):
        floats = random.uniform(0.001, 0.004, shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = floats[..., None].view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


# --- gpt-oss --------------------------------------------------------------------------------------


def test_mxfp4_blocks_are_divided_unevenly(tmp_path: Path) -> None:
    """Three blocks for two ranks: one holds two of them."""
    plain = make_model(tmp_path / "m", "gpt_oss", with_tokenizer=False, intermediate_size=96)
    packed = Path(shutil.copytree(plain, tmp_path / "packed"))
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (packed / "config.json").write_text(json.dumps(config))
    tensors, random = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, in_size, out_size = tensors.pop(name).shape
        shape = (count, out_size, in_size // 32)
        codes = torch.randint(0, 256, (*shape, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(121, 126, shape, generator=random, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    sizes = [Division(load_spec(packed), 2, r).rank_spec().moe.intermediate_size for r in range(2)]  # type: ignore[union-attr]
    assert sizes == [64, 32]
    assert generate(packed, 2) == generate(packed, 1)


# --- adapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "deepseek_v2"])
def test_adapters_give_the_tokens_of_one_rank(tmp_path: Path, kind: Any) -> None:
    base = make_model(tmp_path / "base", kind, with_tokenizer=False)
    targets = DENSE if kind == "llama" else ("o_proj",)
    names = tuple(name.rpartition(".")[2] for name in targets)
    folder = make_adapter(base, tmp_path / "a", seed=1, rank=8, targets=names)
    ref = AdapterRef("a", str(folder), digest_adapter(folder))

    def work(group: ThreadGroup) -> list[list[int]]:
        executor = load(base, group=group, kv_bytes=2**21)
        executor.adapters.install(executor.adapters.read(ref))
        driver = Driver(executor)
        running = [driver.start(PROMPTS[0], GENERATED, adapter=key) for key in ("", ref.key)]
        driver.finish(*running, chunk=17)
        return [one.generated for one in running]

    (one,) = run_ranks(1, work)
    assert one[0] != one[1]
    assert run_ranks(2, work) == [one] * 2


def test_an_adapter_of_another_model_is_refused_on_every_rank(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", "llama", with_tokenizer=False)
    wider = make_model(tmp_path / "wider", "llama", with_tokenizer=False, intermediate_size=256)
    folder = make_adapter(wider, tmp_path / "a", seed=1, targets=("down_proj",))
    executor = load(base, group=ThreadGroup(1, 2, None, [], {}))  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=r"down_proj is \[64, 256\] there, \[64, 128\] here"):
        executor.adapters.read(AdapterRef("a", str(folder), digest_adapter(folder)))


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "replicated"), [("llama", 0.01), ("phi3", 0.01), ("gpt_oss", 0.05)])
def test_a_rank_reads_and_holds_its_shard_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, replicated: float
) -> None:
    """replicated: the fraction of the model that all ranks hold, norms and routers."""
    folder = make_model(tmp_path, kind, with_tokenizer=False)
    whole = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    read = 0

    def counting(tensor: torch.Tensor, cuts: Any) -> torch.Tensor:
        nonlocal read
        part = take(tensor, cuts)
        read += part.nbytes
        # Nothing may keep more of the file alive, or in memory, than the part.
        assert part.is_contiguous()
        return part

    monkeypatch.setattr(checkpoint_module, "take", counting)
    for rank in range(2):
        read = 0
        executor = load(folder, group=ThreadGroup(rank, 2, None, [], {}), kernels="native")  # type: ignore[arg-type]
        assert read <= (0.5 + replicated) * whole
        held = _packed_bytes(executor._model)
        assert held <= (0.5 + replicated) * _packed_bytes(load(folder, kernels="native")._model)


def _packed_bytes(part: object) -> int:
    """Bytes of native matrices and of tensors that an object of the engine refers to."""
    seen: set[int] = set()

    def count(one: Any) -> int:
        if id(one) in seen:
            return 0
        seen.add(id(one))
        if isinstance(one, NativeMatrix):
            return one.memory_bytes
        if isinstance(one, torch.Tensor):
            return one.nbytes
        if isinstance(one, NativeExperts):
            return sum(map(count, (*one.gate_up, *one.down)))
        if isinstance(one, list | tuple):
            return sum(map(count, one))
        if type(one).__module__.startswith("engine.models"):
            return sum(map(count, vars(one).values())) if hasattr(one, "__dict__") else 0
        return 0

    return count(part)
