"""The logits of a whole text, for measurements of a model's quality."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from baton.core.errors import SetupError
from engine.kernels.interface import BatchLayout, Span
from engine.kv.pool import KVPool
from engine.models.model import LanguageModel


@torch.inference_mode()
def text_logits(
    model: LanguageModel, kv: KVPool, tokens: Sequence[int], *, chunk_tokens: int
) -> Iterator[Tensor]:
    """Logits after each token of one text: float32 [n, vocab] per chunk. They are computed as a prompt is, in
    chunks and through the KV pool.

    Raises SetupError if the pool does not hold the text.
    """
    needed = kv.geometry.blocks_for(len(tokens))
    if needed > kv.block_count:
        raise SetupError(f"{len(tokens)} tokens need {needed} blocks of KV, there are {kv.block_count}")
    blocks = tuple(range(needed))
    for block in blocks:
        kv.clear(block)
    for start in range(0, len(tokens), chunk_tokens):
        chunk = list(tokens[start : start + chunk_tokens])
        end = start + len(chunk)
        layout = BatchLayout.of([Span(start, len(chunk), blocks[: kv.geometry.blocks_for(end)])])
        ids = torch.tensor(chunk, dtype=torch.int64, device=kv.device)
        hidden = model.forward(ids, layout, torch.arange(len(chunk), device=kv.device))
        yield model.logits(hidden)
