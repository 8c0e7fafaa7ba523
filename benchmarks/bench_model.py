"""The model that servers are compared with: a random bf16 Llama of 82 M parameters, as a Hugging Face folder
and as GGUF files of the same weights.

Its tokenizer has one word per id, so that every sampled token is visible text in every server.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, VOCAB = 768, 12, 12, 4, 2048, 8192
CONTEXT_TOKENS = 16_384


class LayerSizes(NamedTuple):
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int


BENCH_82M = LayerSizes(HIDDEN, LAYERS, HEADS, KV_HEADS, INNER)
WIDE = LayerSizes(hidden=2048, layers=6, heads=16, kv_heads=8, inner=5632)
"""316 M parameters. It has no GGUF file."""
FIRST_TOKEN = 100
"""Lower ids are special tokens or bytes."""
_MADE = "made"


def make_bench_model(folder: Path, sizes: LayerSizes = BENCH_82M) -> Path:
    """Make the model unless it exists, and return its folder."""
    if (folder / _MADE).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        intermediate_size=sizes.inner,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    word_tokenizer(VOCAB).save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.exists():
            path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}, indent=2))
    (folder / _MADE).touch()
    return folder


def _words(vocab: int) -> list[str]:
    special = ["<unk>", "<s>", "</s>"]
    return special + [f"w{i}" for i in range(len(special), vocab)]


def word_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """One word per id: w3, w4, …"""
    words = {word: i for i, word in enumerate(_words(vocab))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def write_gguf(folder: Path, kind: str) -> Path:
    """Write the same weights for llama.cpp; `kind` is bf16 or q8_0."""
    path = folder / f"bench-{kind}.gguf"
    if path.exists():
        return path
    weights = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    types = gguf.GGMLQuantizationType
    matrix_type = types.Q8_0 if kind == "q8_0" else types.BF16
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    _metadata(writer, matrix_type)
    for name, tensor in weights.items():
        values = _permuted(name, tensor.float()).numpy()
        if values.ndim == 1:
            writer.add_tensor(_gguf_name(name), values.astype(np.float32))
            continue
        packed = gguf.quantize(values, matrix_type)
        writer.add_tensor(_gguf_name(name), packed, raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)
    return path


def _metadata(writer: gguf.GGUFWriter, matrix_type: gguf.GGMLQuantizationType) -> None:
    quantized = matrix_type is gguf.GGMLQuantizationType.Q8_0
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantized else gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("llama")
    words = _words(VOCAB)
    writer.add_token_list([f"▁{word}" if i > 2 else word for i, word in enumerate(words)])
    writer.add_token_scores([0.0] * len(words))
    kinds = gguf.TokenType
    writer.add_token_types([kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL] + [kinds.NORMAL] * (VOCAB - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _gguf_name(name: str) -> str:
    plain = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in plain:
        return f"{plain[stem]}.weight"
    _, _, layer, *rest = stem.split(".")
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    return f"blk.{layer}.{parts[rest[-1]]}.weight"


def _permuted(name: str, weight: torch.Tensor) -> torch.Tensor:
    """llama.cpp rotates neighbouring dimensions in pairs, transformers the two halves of a head."""
    heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
    if not heads:
        return weight
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
