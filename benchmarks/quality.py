"""Measures what quantisation costs: the same text through the engine, unquantised and quantised.

Perplexity shows how well the text is predicted, top-1 agreement how often the most likely token is the same,
and the Kullback-Leibler divergence how far the distributions are apart, which shows damage that the other two
miss (arXiv 2407.09141).
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from benchmarks.demo_model.text import conversations
from engine.execution.executor import Executor

VARIANTS: dict[str, dict[str, str]] = {
    "as-is": {},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "w8a8": {"quantization": "w8a8"},
    "fp8": {"quantization": "fp8"},
    "int8-kv": {"kv_dtype": "int8"},
    "fp8-kv": {"kv_dtype": "fp8"},
    "int8+int8-kv": {"quantization": "int8", "kv_dtype": "int8"},
    "int4+int8-kv": {"quantization": "int4", "kv_dtype": "int8"},
}
BASE_DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


class Quality(msgspec.Struct, frozen=True):
    """One variant compared with the base; the base is compared with itself."""

    variant: str
    perplexity: float
    perplexity_ratio: float
    top1_agreement: float
    """Share of positions."""
    kl_mean_nats: float
    """Divergence of the variant's distribution from the base's."""
    kl_p99_nats: float
    token_count: int
    """Number of predicted tokens."""


class QualityPlan(msgspec.Struct, frozen=True):
    tokens_max: int = 4096
    context_tokens: int = 512
    """The text is cut into pieces of this many tokens, each predicted from its own beginning."""
    chunk_tokens: int = 64
    """Tokens computed at once. All keys but the chunk's own come out of the (quantised) KV pool."""


def measure(
    base: ModelConfig,
    variants: Sequence[tuple[str, ModelConfig]],
    engine: EngineConfig,
    tokens: Sequence[int],
    plan: QualityPlan,
    progress: Callable[[str], None],
) -> list[Quality]:
    """Measure `variants`: (label, model). The base and one variant are in memory at a time.

    Raises SetupError if a model does not load or has another vocabulary than the base, or if there is too
    little text.
    """
    pieces = _pieces(tokens, plan)
    progress("loading the base")
    reference = Executor.load(base, engine)
    try:
        results = [_compare("base", reference, reference, pieces, plan)]
        for label, model in variants:
            progress(f"measuring {label}")
            executor = Executor.load(model, engine)
            if executor.vocab_size != reference.vocab_size:
                raise SetupError(f"{label} has {executor.vocab_size} tokens, the base {reference.vocab_size}")
            found = _compare(label, reference, executor, pieces, plan)
            ratio = found.perplexity / results[0].perplexity
            results.append(msgspec.structs.replace(found, perplexity_ratio=ratio))
            executor.close()
        return results
    finally:
        reference.close()


def variant_model(name: str, model: ModelConfig) -> ModelConfig:
    """Raises SetupError for an unknown variant."""
    if name not in VARIANTS:
        raise SetupError(f"no variant {name}: choose from {', '.join(VARIANTS)}")
    return model.model_copy(update=VARIANTS[name])


def text_tokens(folder: Path, text_file: Path | None, tokens_max: int) -> list[int]:
    """Token ids of a file, or of generated conversations in the model's chat template. Raises SetupError."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        if text_file is not None:
            text = text_file.read_text(encoding="utf-8", errors="replace")
            return list(tokenizer.encode(text))[:tokens_max]
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise SetupError(f"no text to measure with: {error}") from error
    tokens: list[int] = []
    for conversation in _conversations(tokenizer):
        tokens += conversation
        if len(tokens) >= tokens_max:
            break
    return tokens[:tokens_max]


def _conversations(tokenizer: Any) -> Iterator[list[int]]:
    """Conversations of the demo model's kind with another seed, so that it was not trained on a series of
    them."""
    for turns in conversations(random.Random(977)):
        if tokenizer.chat_template:
            messages = [{"role": role, "content": text} for role, text in turns]
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        else:
            text = "".join(f"{text}\n" for _, text in turns)
        yield list(tokenizer.encode(text, add_special_tokens=False))


def _pieces(tokens: Sequence[int], plan: QualityPlan) -> list[list[int]]:
    used = list(tokens[: plan.tokens_max])
    pieces = [used[i : i + plan.context_tokens] for i in range(0, len(used), plan.context_tokens)]
    found = [piece for piece in pieces if len(piece) > 1]
    if not found:
        raise SetupError(f"a text of {len(used)} tokens is too short to measure with")
    return found


def _compare(
    label: str, base: Executor, variant: Executor, pieces: Sequence[list[int]], plan: QualityPlan
) -> Quality:
    losses: list[Tensor] = []
    agreements: list[Tensor] = []
    divergences: list[Tensor] = []
    for piece in pieces:
        targets = torch.tensor([*piece[1:], 0])
        start = 0
        chunk = plan.chunk_tokens
        for ours, theirs in zip(
            variant.logits_of(piece, chunk_tokens=chunk),
            base.logits_of(piece, chunk_tokens=chunk),
            strict=True,
        ):
            log_q, log_p = (logits.float().log_softmax(dim=-1).cpu() for logits in (ours, theirs))
            ids = targets[start : start + len(log_q)]
            losses.append(-log_q.gather(1, ids[:, None]).squeeze(1))
            agreements.append(log_q.argmax(dim=-1) == log_p.argmax(dim=-1))
            divergences.append((log_p.exp() * (log_p - log_q)).sum(dim=-1))
            start += len(log_q)
        losses[-1] = losses[-1][:-1]  # the token after the last one is unknown
    loss = torch.cat(losses)
    kl = torch.cat(divergences).clamp(min=0.0)
    return Quality(
        variant=label,
        perplexity=math.exp(min(700.0, float(loss.mean()))),
        perplexity_ratio=1.0,
        top1_agreement=float(torch.cat(agreements).float().mean()),
        kl_mean_nats=float(kl.mean()),
        kl_p99_nats=float(kl.quantile(0.99)) if len(kl) < 2**24 else float(kl.max()),
        token_count=len(loss),
    )
