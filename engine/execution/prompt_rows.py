"""Logprobs of a prompt's own tokens."""

from collections.abc import Callable, Iterator

from torch import Tensor

from baton.core.steps import TokenLogprobs
from engine.execution.step_batch import PromptRows
from engine.sampling.logprobs import logprobs_of

PROMPT_LOGITS_MAX = 2**24
"""Logits of a prompt that are in memory at once, 64 MiB."""


def prompt_logprobs(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, prompt: PromptRows, vocab_size: int
) -> tuple[TokenLogprobs, ...]:
    """hidden: the rows of the prompt, [n, hidden]."""
    found: list[TokenLogprobs] = []
    for rows in pieces(len(prompt.tokens), vocab_size):
        tokens = prompt.tokens[rows.start : rows.stop]
        logits = logits_of(hidden[rows.start : rows.stop])
        found += logprobs_of(logits, tokens, [prompt.top_count] * len(tokens))
    return tuple(found)


def pieces(row_count: int, vocab_size: int) -> Iterator[range]:
    """Rows of a prompt in pieces: a prompt's logits are many times larger than its hidden states."""
    piece = max(1, PROMPT_LOGITS_MAX // vocab_size)
    for start in range(0, row_count, piece):
        yield range(start, min(row_count, start + piece))
