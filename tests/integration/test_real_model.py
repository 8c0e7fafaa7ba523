"""The model that is fetched, whose weights have four bits: its distributions beside transformers'."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from baton.config import EngineConfig, ModelConfig
from benchmarks.quality import text_tokens
from engine.execution.executor import Executor
from engine.model_files.gguf.folder import unpack_gguf
from tests.integration.cluster import ROOT
from tests.integration.fetched_model import FETCHED, fetched_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

TEXT = ROOT / "docs/architecture.md"
TOKENS = 700
CHUNK_TOKENS = 300
"""Three chunks of which the last is short."""


def _transformers(tokens: list[int], dtype: torch.dtype) -> Tensor:
    """Log probabilities [tokens, vocab] of weights that were decoded to float32."""
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    model = load(str(FETCHED.parent), gguf_file=FETCHED.name, dtype=dtype)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def _baton(tokens: list[int]) -> Tensor:
    executor = Executor.load(ModelConfig(path=str(FETCHED)), EngineConfig(threads=2))
    try:
        chunks = list(executor.logits_of(tokens, chunk_tokens=CHUNK_TOKENS))
    finally:
        executor.close()
    return torch.cat(chunks).float().log_softmax(-1)


def _divergence(reference: Tensor, found: Tensor) -> Tensor:
    """The Kullback-Leibler divergence at each position, in nats."""
    return (reference.exp() * (reference - found)).sum(-1)


def test_distributions_are_nearer_to_float32_than_those_of_transformers_in_bfloat16() -> None:
    """A single answer proves little: after some questions two tokens are a hundredth of a nat apart."""
    tokens = text_tokens(unpack_gguf(fetched_model()), TEXT, TOKENS)
    assert len(tokens) == TOKENS
    exact = _transformers(tokens, torch.float32)
    found = _baton(tokens)
    theirs = _divergence(exact, _transformers(tokens, torch.bfloat16))
    ours = _divergence(exact, found)
    assert 0 < ours.mean() <= theirs.mean()
    assert ours.median() <= theirs.median()
    assert (found.argmax(-1) == exact.argmax(-1)).float().mean() >= 0.95
