"""Writes GGUF files of tiny models with llama.cpp's own library: its name map, its writer, its rounding."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
}
Arrays = dict[str, np.ndarray]


def write_gguf(
    folder: Path,
    out: Path,
    *,
    matrices: str = "F32",
    meaning: Path | None = None,
    part: tuple[int, int] | None = None,
    sampling: Mapping[str, float] | None = None,
) -> Path:
    """The model in `folder` as one file. `matrices` is the ggml type of all matrices but routers. `meaning`
    is a copy of `folder` that gets the weights as they are after rounding. `part` is (number from 0,
    count) of several files that each hold some tensors. `sampling` becomes `general.sampling.*`."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    weights = load_file(folder / "model.safetensors")
    if meaning is not None:
        save_file(
            {name: _meant(name, value, matrices) for name, value in weights.items()},
            meaning / "model.safetensors",
            metadata={"format": "pt"},
        )
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[architecture])
    _add_facts(writer, config, architecture)
    if (folder / "tokenizer.json").exists():
        _add_tokenizer(writer, folder)
    tensors = _tensors(weights, config, architecture)
    for name, value in (sampling or {}).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_int32
        add(f"general.sampling.{name}", value)
    if part is not None:
        number, count = part
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        tensors = {
            name: value for i, (name, value) in enumerate(sorted(tensors.items())) if i % count == number
        }
    for name, value in tensors.items():
        kind = matrices if _is_rounded(name, value) else "F32"
        quant_type = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(value, quant_type), raw_dtype=quant_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _is_rounded(name: str, value: np.ndarray) -> bool:
    return value.ndim >= 2 and "ffn_gate_inp" not in name


def _meant(name: str, value: torch.Tensor, matrices: str) -> torch.Tensor:
    if value.dim() < 2 or name.endswith(
        ("mlp.gate.weight", "block_sparse_moe.gate.weight", "expert_gate.weight")
    ):
        return value
    quant_type = gguf.GGMLQuantizationType[matrices]
    rounded = gguf.dequantize(gguf.quantize(value.float().numpy(), quant_type), quant_type)
    return torch.from_numpy(rounded).to(value.dtype)


def _tensors(
    weights: dict[str, torch.Tensor], config: dict[str, Any], architecture: gguf.MODEL_ARCH
) -> Arrays:
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    found: Arrays = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in weights.items():
        value = tensor.float().numpy()
        if architecture in (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3) and name.endswith("norm.weight"):
            value = value + 1
        if architecture is gguf.MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            # llama.cpp's LlamaModel.permute
            value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            number, _, projection = after.partition(".")
            stacks.setdefault(f"{before}.experts.{projection}", {})[int(number)] = value
            continue
        if name.endswith("shared_expert_gate.weight"):
            value = value.reshape(-1)
        found[_mapped(names, name)] = np.ascontiguousarray(value)
    for name, experts in stacks.items():
        found[_mapped(names, name)] = np.stack([experts[i] for i in range(len(experts))])
    return found


def _mapped(names: gguf.TensorNameMap, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _add_facts(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: gguf.MODEL_ARCH) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_rope_dimension_count(head_dim)
    if architecture is not gguf.MODEL_ARCH.LLAMA and architecture is not gguf.MODEL_ARCH.PHI3:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture is gguf.MODEL_ARCH.GEMMA2:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    if settings.get("bos_token"):
        writer.add_bos_token_id(vocab[settings["bos_token"]])
    writer.add_eos_token_id(vocab[settings["eos_token"]])
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())
