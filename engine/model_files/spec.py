"""A model as its forward pass needs to know it. No torch here: the control plane reads model folders too.

`read` makes a `ModelSpec` from a folder, by the families in `families`. What is left at its default is as
in Llama.
"""

from typing import Literal

import msgspec

from baton.core.geometry import DTypeName
from engine.model_files.quant_scheme import QuantScheme
from engine.model_files.rope_spec import RopeSpec

ActivationName = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai"]
"""`engine.kernels.interface.Activation`"""

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]
"""Function that turns a router's logits into weights. softmax_of_chosen: over the chosen experts only
(gpt-oss)."""
GroupScore = Literal["max", "sum_of_two"]
"""Score by which groups of experts are ranked: the best expert (DeepSeek-V2), or the best two (V3)."""
ExpertNames = Literal["mlp.experts", "block_sparse_moe", "gpt_oss"]
"""Naming of the experts' tensors in a checkpoint. mlp.experts: mlp.experts.N.gate_proj …; block_sparse_moe:
block_sparse_moe.experts.N.w1 …; gpt_oss: all experts of a layer in one tensor, gate and up interleaved."""


class MoeSpec(msgspec.Struct, frozen=True):
    """Mixture of experts in place of the MLP of some layers."""

    layers: tuple[int, ...]
    """Indices of the layers that have experts."""
    expert_count: int
    experts_per_token: int
    intermediate_size: int
    scoring: Scoring = "softmax"
    is_normalized: bool = False
    """Weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """… and then multiplied with this."""
    group_count: int = 1
    """Experts are chosen from the best `groups_kept` of so many groups of equal size."""
    groups_kept: int = 1
    group_score: GroupScore = "max"
    has_correction_bias: bool = False
    """Added to the scores for the choice, not for the weights (arXiv 2408.15664)."""
    router_bias: bool = False
    expert_bias: bool = False
    shared_intermediate_size: int = 0
    """Intermediate size of the expert that every token passes; 0 if there is none."""
    shared_gate: bool = False
    """The shared expert's output is weighted with the sigmoid of a linear function (Qwen2-MoE)."""
    expert_names: ExpertNames = "mlp.experts"
    is_mxfp4: bool = False
    """The experts' matrices are MXFP4 in the checkpoint."""


class MlaSpec(msgspec.Struct, frozen=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""

    q_lora_rank: int
    """0: queries are not compressed."""
    kv_lora_rank: int
    nope_dim: int
    """Dimensions of a head that are not rotated."""
    rope_dim: int
    value_dim: int
    is_interleaved: bool = True
    """True if the checkpoint rotates dimension 2i with 2i + 1 (instead of i with i + rope_dim / 2)."""

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim


class ModelSpec(msgspec.Struct, frozen=True):
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    norm_eps: float
    context_tokens: int
    """Prompt plus generated tokens the model is declared for."""
    context_tokens_limit: int
    """The most an operator may ask for: `context_tokens`, or more where rope scaling stretches it."""
    tie_embeddings: bool
    dtype: DTypeName
    eos_token_ids: tuple[int, ...]
    windows: tuple[int, ...]
    """Positions that a token of each layer attends to, its own included; 0 means all before it."""
    ropes: tuple[RopeSpec, ...]
    layer_ropes: tuple[int, ...]
    """Index into `ropes`, per layer."""
    attention_scale: float
    activation: ActivationName = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each query and key head, before the rotation."""
    sinks: bool = False
    """A learnt score per head in the softmax's denominator (gpt-oss)."""
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    norm_offset: float = 0.0
    """Added to all norms' weights (Gemma: 1)."""
    post_norms: bool = False
    """Norms after attention and MLP too, before the sum with the residual (Gemma 2 and 3)."""
    embedding_scale: float = 1.0
    fused_projections: bool = False
    """True if the checkpoint has q, k, v in one matrix, and gate and up in another (Phi-3)."""
    mla: MlaSpec | None = None
    moe: MoeSpec | None = None
    is_native: bool = True
    """False: computed by transformers' own modules with our attention (`fallback`)."""
    config_digest: str = ""
    """Digest of all of config.json, where transformers computes the model."""
    quantization: QuantScheme | None = None
    """Quantisation of the checkpoint."""
