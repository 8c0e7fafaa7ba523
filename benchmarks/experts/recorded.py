"""Counts recorded from text that a random Mixture-of-experts model reads."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from baton.core.errors import SetupError
from control_plane.experts.loads import DecayedCounts
from control_plane.experts.values import Loads
from engine.models.fallback_experts import count_experts

LAYERS, EXPERTS_PER_TOKEN, HIDDEN, VOCAB = 8, 8, 256, 4096
CHUNK_TOKENS = 512
HALF_LIFE_S, WINDOW_S = 60.0, 60.0
"""Text is read in equal parts, as if each took so long. An earlier part counts half as much as the next."""
DOCUMENTATION = Path(__file__).parents[2] / "docs"


def recorded(
    times: int, experts: int, *, text: Path, seed: int, progress: Callable[[str], None]
) -> list[Loads]:
    """Decayed counts as of the end of each of `times` parts of the text, as [LAYERS, E]."""
    pages = read_pages(text)
    tokens = _tokenizer(pages).encode("\n".join(pages)).ids
    if len(tokens) < times * CHUNK_TOKENS:
        raise SetupError(f"{text} has {len(tokens)} tokens; give at least {times * CHUNK_TOKENS}")
    torch.manual_seed(seed)
    model = _model(experts)
    counts = count_experts(model, torch.device("cpu"))
    assert counts is not None
    decayed = DecayedCounts(LAYERS, experts, half_life_s=HALF_LIFE_S)
    found: list[Loads] = []
    size = len(tokens) // times
    for part in range(times):
        progress(f"a random model reads part {part + 1} of {times}, {size} tokens")
        counts.reset()
        _read(model, tokens[part * size : (part + 1) * size])
        now_s = part * WINDOW_S
        taken = counts.read()
        assert taken is not None
        decayed.add(taken, now_s=now_s)
        found.append(decayed.loads(now_s=now_s))
    return found


def read_pages(text: Path) -> list[str]:
    """A text file, or the Markdown and text files in a folder."""
    if text.is_file():
        return [text.read_text(errors="replace")]
    files = sorted(path for path in text.rglob("*") if path.suffix in (".md", ".txt"))
    if not files:
        raise SetupError(f"{text} has no text: name a text file, or a folder of .md or .txt files")
    return [path.read_text(errors="replace") for path in files]


def _tokenizer(pages: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(pages, trainer)
    return tokenizer


def _model(experts: int) -> Any:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=HIDDEN,
        moe_intermediate_size=32,
        num_experts=experts,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        vocab_size=VOCAB,
        max_position_embeddings=CHUNK_TOKENS,
    )
    return Qwen3MoeForCausalLM(config).eval()


def _read(model: Any, tokens: Sequence[int]) -> None:
    with torch.inference_mode():
        for start in range(0, len(tokens), CHUNK_TOKENS):
            model(torch.tensor([tokens[start : start + CHUNK_TOKENS]]), use_cache=False, logits_to_keep=1)
