"""Every family gives the tokens of transformers, on all kernels of this machine, however it is batched."""

import functools
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.sampling import SamplingParams
from engine.kernels.interface import BatchLayout, Span
from engine.loading.stacked_experts import dequantize_mxfp4
from tests.models import Kind, make_model
from tests.unit.engine.driver import Driver, load

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
    "partial_rotary_factor": 0.25,
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 1024,
    "mscale": 0.7,
    "mscale_all_dim": 1.1,
}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
MODELS: dict[str, tuple[Kind, dict]] = {
    "phi3": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {"rope_parameters": TWO_ROPES}),
    "mixtral": ("mixtral", {}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen3-moe": ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 2}),
    "deepseek-v2": ("deepseek_v2", {}),
    "deepseek-v2-lite": ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek-v3": ("deepseek_v3", {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek-v3-plain-rope": ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False}),
    "gpt-oss": ("gpt_oss", {}),
}
KERNELS = ("torch", "native")
PROMPT_LENGTHS = (36, 47, 70, 130)
GENERATED = SamplingParams(max_tokens=16)


class Family:
    """A folder, what transformers generates from it, and our engine over each kind of kernels."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.path = path
        self.reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        self.reference.generation_config.eos_token_id = None
        self.driver = functools.cache(lambda kernels: Driver(load(path, kernels=kernels)))
        self.expected = functools.cache(self._expected)

    def _expected(self, prompt: tuple[int, ...]) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": GENERATED.max_tokens, "do_sample": False, "pad_token_id": 0}
        made = self.reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return made[0, len(prompt) :].tolist()


def prompt(length: int) -> tuple[int, ...]:
    return tuple(random.Random(length).choices(range(5, 512), k=length))


@pytest.fixture(scope="module", params=MODELS)
def family(request, tmp_path_factory) -> Family:
    kind, changes = MODELS[request.param]
    return Family(make_model(tmp_path_factory.mktemp("model"), kind, with_tokenizer=False, **changes))


@pytest.mark.parametrize("kernels", KERNELS)
def test_tokens_equal_transformers_in_any_batch(family: Family, kernels: str) -> None:
    driver, rng = family.driver(kernels), random.Random(3)
    sequences = [driver.start(prompt(length), GENERATED) for length in PROMPT_LENGTHS]
    while going := [s for s in sequences if len(s.generated) < GENERATED.max_tokens]:
        chosen = rng.sample(going, rng.randint(1, len(going)))
        driver.step(*((s, 1 if s.is_prefilled else rng.choice((1, 5, 33, 100))) for s in chosen))
    for sequence in sequences:
        assert sequence.generated == family.expected(tuple(sequence.prompt))
    kept = (*prompt(130)[:100], *prompt(36))
    follower = driver.start(kept, GENERATED, like=sequences[-1])
    assert follower.computed == 96
    driver.finish(follower, chunk=10)
    assert follower.generated == family.expected(kept)


def logits(driver: Driver, *prompts: tuple[int, ...], chunk: int = 1000) -> list[torch.Tensor]:
    """After each token, all prompts in one batch, their last `chunk` tokens in a step of their own."""
    executor = driver.executor
    free = iter(range(executor.kv.block_count))
    tables = [
        tuple(next(free) for _ in range(executor.geometry.blocks_for(len(tokens)))) for tokens in prompts
    ]

    def run(starts: list[int], ends: list[int]) -> dict[int, torch.Tensor]:
        ranges = [
            (i, start, end) for i, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start
        ]
        spans = [
            Span(start, end - start, tables[i][: executor.geometry.blocks_for(end)])
            for i, start, end in ranges
        ]
        if not spans:
            return {}
        layout = BatchLayout.of(spans)
        order = [ranges[i] for i in layout.order]
        tokens = torch.tensor([token for i, start, end in order for token in prompts[i][start:end]])
        with torch.inference_mode():
            hidden = executor._model.forward(tokens, layout, torch.arange(len(tokens)))
            rows = executor._model.logits(hidden).split([end - start for _, start, end in order])
        return {i: part for (i, _, _), part in zip(order, rows, strict=True)}

    lengths = [len(tokens) for tokens in prompts]
    cuts = [max(0, length - chunk) for length in lengths]
    first, second = run([0] * len(prompts), cuts), run(cuts, lengths)
    return [torch.cat([part[i] for part in (first, second) if i in part]) for i in range(len(prompts))]


def test_bfloat16_is_close_to_float32(family: Family) -> None:
    exact = logits(family.driver("torch"), prompt(70))[0]
    for kernels in KERNELS:
        rounded = logits(Driver(load(family.path, kernels=kernels, dtype="bfloat16")), prompt(70))[0]
        # Rounding may choose another expert: most positions must be close, not each.
        errors = (rounded - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert errors.median() < 0.06


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_logits_do_not_depend_on_batch_or_chunks(family: Family, dtype: str) -> None:
    driver = Driver(load(family.path, kernels="native", dtype=dtype))
    prompts = [prompt(length) for length in (36, 70, 47)]
    together = logits(driver, *prompts, chunk=13)
    for tokens, batched in zip(prompts, together, strict=True):
        (alone,) = logits(driver, tokens)
        assert torch.equal(alone, batched)


def test_longrope_is_short_where_the_context_is_kept_short(tmp_path: Path) -> None:
    family = Family(make_model(tmp_path, "phi3", with_tokenizer=False, rope_parameters=LONGROPE))
    driver = Driver(load(tmp_path, context_tokens_max=4096))
    assert driver.generate(prompt(130), GENERATED) == family.expected(prompt(130))
    stretched = load(tmp_path)
    assert stretched.fingerprint != driver.executor.fingerprint


def test_the_text_part_of_a_model_that_sees(tmp_path: Path) -> None:
    plain, nested = make_model(tmp_path / "plain", "gemma3", with_tokenizer=False), tmp_path / "nested"
    nested.mkdir()
    config = json.loads((plain / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "dtype": config.pop("dtype")}
    (nested / "config.json").write_text(json.dumps({**outer, "vision_config": {}, "text_config": config}))
    tensors = load_file(plain / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    renamed["vision_tower.patch.weight"] = torch.zeros(3)
    save_file(renamed, nested / "model.safetensors")
    expected = Driver(load(plain)).generate(prompt(70), GENERATED)
    assert Driver(load(nested)).generate(prompt(70), GENERATED) == expected


def test_a_short_gemma3_config_means_the_classs_defaults(tmp_path: Path) -> None:
    """The published ones say little more than the sizes."""
    from transformers import Gemma3TextConfig

    from engine.model_files.read_spec import parse_spec

    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    scaling = {"rope_type": "linear", "factor": 8.0}
    whole = Gemma3TextConfig(**sizes, rope_scaling=scaling)
    spec = parse_spec(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {**sizes, "rope_scaling": scaling},
        }
    )
    assert (spec.vocab_size, spec.head_count, spec.kv_head_count, spec.head_dim) == (
        whole.vocab_size,
        whole.num_attention_heads,
        whole.num_key_value_heads,
        whole.head_dim,
    )
    assert (spec.context_tokens, spec.tie_embeddings) == (whole.max_position_embeddings, True)
    windowed = tuple(kind == "sliding_attention" for kind in whole.layer_types)
    assert tuple(window == 1024 for window in spec.windows) == windowed
    assert sum(windowed) == 29
    full, sliding = spec.ropes
    assert (full.kind, full.factor, full.theta) == ("linear", 8.0, 1e6)
    assert (sliding.kind, sliding.theta) == ("default", 1e4)


def test_mxfp4_experts_mean_what_transformers_says(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain, packed = tmp_path / "plain", tmp_path / "packed"
    make_model(plain, "gpt_oss", with_tokenizer=False, num_hidden_layers=1)
    packed.mkdir()
    config = json.loads((plain / "config.json").read_text())
    quantized = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    (packed / "config.json").write_text(json.dumps(quantized))
    tensors = load_file(plain / "model.safetensors")
    stored, random_bits = dict(tensors), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, in_size, out_size = tensors[name].shape
        shape = (count, out_size, in_size // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=random_bits, dtype=torch.uint8)
        scales = torch.randint(121, 126, shape, generator=random_bits, dtype=torch.uint8)
        dense = convert_moe_packed_tensors(blocks.clone(), scales, dtype=torch.float32)
        ours = dequantize_mxfp4(blocks, scales, torch.float32)
        assert torch.equal(ours, dense.transpose(1, 2))
        tensors[name] = dense.contiguous()
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, packed / "model.safetensors")
    expected = logits(Driver(load(plain)), prompt(70))[0]
    assert torch.equal(logits(Driver(load(packed)), prompt(70))[0], expected)
