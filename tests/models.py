"""Tiny models with random weights, saved the way the hub has them: config, safetensors, tokenizer.

`make_model` is fast (well under two seconds) and gives the same bytes for the same arguments. Nothing
here is downloaded. As a command, `python -m tests.models PATH KIND` writes one folder.
"""

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

Kind = Literal[
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "olmo2",
    "granite",
    "gpt_neox",
    "cohere2",
    "olmoe",
]

CONTEXT_TOKENS = 8192
VOCAB_TOKENS = 512
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>")
BOS_ID, EOS_ID = 0, 1

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

CORPUS = (
    "The runner in front holds the baton until the runner behind has it, and both hold it for a moment.",
    "A request arrives, waits in a queue, is computed in chunks; its keys and values move to another worker.",
    "What is the capital of France? Paris is the capital of France. How many legs does a spider have? Eight.",
    "def add(left: int, right: int) -> int:\n    return left + right\n\nprint(add(1, 2))\n",
    "Once upon a time there was a small model that lived on one core and answered every question at once.",
    "Grüße aus Köln! Ça va très bien, señor. Привет, мир. 你好,世界。 こんにちは。 🙂🚀 naïve café.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 20 30 40 50 60 70 80 90 100 1000 3.14159 2.71828",
    '{"name": "baton", "tokens": [1, 2, 3], "stream": true, "temperature": 0.7}',
)


@lru_cache(maxsize=4)
def _tokenizer_json(vocab: int) -> str:
    """A byte-level BPE: every byte has a token, so every text can be encoded and decoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def save_tokenizer(path: Path, vocab: int = VOCAB_TOKENS) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json(vocab)),
        bos_token=SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_TOKENS,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
_GEMMA: dict[str, Any] = {"head_dim": 32, "tie_word_embeddings": True}
_QWEN_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ALTERNATING = ["sliding_attention", "full_attention"]
_PER_KIND: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"num_hidden_layers": 3, "sliding_window": 48}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_hidden_layers": 3, "head_dim": 32}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "gemma": ("Gemma", _GEMMA),
    "gemma2": ("Gemma2", {**_GEMMA, "sliding_window": 40, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3Text",
        {
            **_GEMMA,
            "num_hidden_layers": 3,
            "sliding_window": 40,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 48}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 32, "mlp_only_layers": [0]},
    ),
    "qwen3_moe": ("Qwen3Moe", {**_QWEN_EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "deepseek_v2": (
        "DeepseekV2",
        {**_MLA, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5, "n_shared_experts": 2},
    ),
    "deepseek_v3": ("DeepseekV3", {**_MLA, "n_shared_experts": 1}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "sliding_window": 40,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "granite": ("Granite", {"residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5, "num_key_value_heads": 4}),
    "cohere2": ("Cohere2", {"sliding_window": 40, "head_dim": 16, "layer_types": _ALTERNATING}),
}


def model_config(kind: Kind, *, vocab: int = VOCAB_TOKENS, **changes: Any) -> Any:
    """The transformers config of a tiny model; `changes` replace or add fields of its config.json."""
    import transformers

    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_TOKENS,
        # Wide weights make the largest logit stand clear of the second, so that greedy tokens do not depend
        # on the order of additions.
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    name, own = _PER_KIND[kind]
    fields["architectures"] = [f"{name.removesuffix('Text')}ForCausalLM"]
    return getattr(transformers, f"{name}Config")(**(fields | own | changes))


def _spread_constants(model: Any, seed: int) -> None:
    """Biases and sinks start as zeros and norms as ones. Other values reveal one that the engine forgets."""
    import torch

    random = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        tensors = [*model.named_parameters(), *model.named_buffers()]
        for name, tensor in tensors:
            noise = torch.randn(tensor.shape, generator=random)
            if "norm" in name and not name.endswith("bias"):
                # Gemma stores a norm's weight minus one.
                centre = 0.0 if tensor.abs().max() == 0 else 1.0
                tensor.copy_(centre + noise * 0.1)
            elif name.endswith(("bias", "sinks")):
                tensor.copy_(noise * 0.2)


def make_model(
    path: Path,
    kind: Kind = "llama",
    *,
    seed: int = 0,
    shard: bool = False,
    vocab: int = VOCAB_TOKENS,
    with_tokenizer: bool = True,
    dtype: Literal["float32", "bfloat16"] = "float32",
    **changes: Any,
) -> Path:
    """Write a Hugging Face folder at `path` (made if missing) and return it.

    llama: GQA, untied. mistral: sliding window of 48. qwen2: q/k/v biases, tied embeddings.
    qwen3: q/k norms, explicit head_dim. `shard` splits the weights into several safetensors files
    with an index. `changes` go into config.json.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    path.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(model_config(kind, vocab=vocab, **changes))
    _spread_constants(model, seed)
    model = model.to(getattr(torch, dtype))
    model.generation_config.eos_token_id = EOS_ID
    model.save_pretrained(path, **({"max_shard_size": "64KB"} if shard else {}))
    if with_tokenizer:
        save_tokenizer(path, vocab)
    return path


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), sys.argv[2])  # type: ignore[arg-type]
