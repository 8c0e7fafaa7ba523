"""llama.cpp's names of tensors, by Hugging Face's names. No torch here.

Source: llama.cpp's gguf-py/gguf/tensor_mapping.py and convert_hf_to_gguf.py.
"""

import re
from typing import Literal

import msgspec

Change = Literal["", "rope_rows", "minus_one", "row"]
"""The change that the converter made to the values. rope_rows: rows of q and k are in llama.cpp's order
(GPT-J pairs instead of GPT-NeoX halves). minus_one: Gemma's norms are stored plus one. row: [n] here is [1,
n] there."""


class GgufPlace(msgspec.Struct, frozen=True):
    name: str
    """Name in the GGUF file."""
    change: Change = ""
    expert: int = -1
    """Index into the matrices [experts, out, in]; -1 if the tensor is no stack of experts."""


_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERT = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT_NAME = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")


def place_of(name: str, architecture: str) -> GgufPlace | None:
    """GgufPlace of a Hugging Face checkpoint's tensor in a file whose general.architecture is `architecture`;
    None if the file has no such tensor."""
    is_gemma = architecture.startswith("gemma")
    if name in _TOP:
        return GgufPlace(_TOP[name], "minus_one" if is_gemma and "norm" in name else "")
    found = _LAYER_NAME.fullmatch(name)
    if found is None:
        return None
    layer, module, kind = found.groups()
    expert = _EXPERT_NAME.fullmatch(module)
    if expert is not None:
        stack = _EXPERT.get(expert[2])
        return None if stack is None else GgufPlace(f"blk.{layer}.{stack}.{kind}", expert=int(expert[1]))
    modules = _LAYER | _GEMMA_NORMS if is_gemma else _LAYER
    if module not in modules:
        return None
    return GgufPlace(f"blk.{layer}.{modules[module]}.{kind}", _change(module, architecture))


def _change(module: str, architecture: str) -> Change:
    if architecture == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
        return "rope_rows"
    if architecture.startswith("gemma") and module.endswith("norm"):
        return "minus_one"
    return "row" if module == "mlp.shared_expert_gate" else ""
