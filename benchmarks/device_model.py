"""A random bf16 Llama for measurements on a GPU, made there: on a host's cores 8 B parameters take minutes.

It is a Hugging Face folder with one file per layer. Its tokenizer has one word per id, as `bench_model`'s.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.bench_model import word_tokenizer

WRITERS = 8
STD = 0.02
_MADE = "made"


class DeviceModelSizes(NamedTuple):
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int

    @property
    def matrix_parameters(self) -> int:
        """Parameters that a step reads for each of its tokens: all but the embedding."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.vocab * self.hidden


SIZES = {
    "1b": DeviceModelSizes(2048, 16, 32, 8, 64, 8192, 128_256),
    "8b": DeviceModelSizes(4096, 32, 32, 8, 128, 14_336, 128_256),
}
"""Shapes of Llama 3.2 1B (with a head of its own) and Llama 3.1 8B."""
CONTEXT_TOKENS = 131_072


def make_device_model(folder: Path, sizes: DeviceModelSizes, device: torch.device) -> Path:
    """Make the model unless it exists, and return its folder."""
    if (folder / _MADE).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(sizes)))
    word_tokenizer(sizes.vocab).save_pretrained(folder)
    places: dict[str, str] = {}

    def write(number: int) -> list[str]:
        tensors = dict(_outer(sizes, device) if number == sizes.layers else _layer(sizes, number, device))
        save_file(tensors, folder / _file_name(number), metadata={"format": "pt"})
        return list(tensors)

    with ThreadPoolExecutor(WRITERS) as writers:
        for number, names in enumerate(writers.map(write, range(sizes.layers + 1))):
            places |= dict.fromkeys(names, _file_name(number))
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / _MADE).touch()
    return folder


def _file_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _config(sizes: DeviceModelSizes) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.inner,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def _random(device: torch.device, *shape: int) -> Tensor:
    return (torch.randn(*shape, device=device, dtype=torch.bfloat16) * STD).cpu()


def _layer(s: DeviceModelSizes, number: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    at = f"model.layers.{number}."
    q_size, kv_size = s.heads * s.head_dim, s.kv_heads * s.head_dim
    for name, rows, columns in (
        ("self_attn.q_proj", q_size, s.hidden),
        ("self_attn.k_proj", kv_size, s.hidden),
        ("self_attn.v_proj", kv_size, s.hidden),
        ("self_attn.o_proj", s.hidden, q_size),
        ("mlp.gate_proj", s.inner, s.hidden),
        ("mlp.up_proj", s.inner, s.hidden),
        ("mlp.down_proj", s.hidden, s.inner),
    ):
        yield f"{at}{name}.weight", _random(device, rows, columns)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}{name}.weight", torch.ones(s.hidden, dtype=torch.bfloat16)


def _outer(s: DeviceModelSizes, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    yield "model.embed_tokens.weight", _random(device, s.vocab, s.hidden)
    yield "lm_head.weight", _random(device, s.vocab, s.hidden)
    yield "model.norm.weight", torch.ones(s.hidden, dtype=torch.bfloat16)
