"""How tokens are chosen. These values travel with a sequence to whichever worker runs it."""

from enum import StrEnum, auto
from typing import Annotated

import msgspec

from baton.core.wire_types import Columns, UInt64


class FinishReason(StrEnum):
    """OpenAI's finish reasons."""

    STOP = auto()
    LENGTH = auto()


class GrammarKind(StrEnum):
    """The language that `Grammar.text` is written in."""

    JSON_SCHEMA = auto()
    """A JSON schema, in the form in which `engine.structured` writes it."""
    REGEX = auto()
    EBNF = auto()
    """GBNF as llama.cpp and xgrammar read it."""
    CHOICE = auto()
    """A JSON array of strings; the text is exactly one of them."""
    STRUCTURAL_TAG = auto()
    """xgrammar's structural tag as JSON, which is free text with constrained segments (tool calls)."""


class Grammar(msgspec.Struct, frozen=True):
    """What the generated text must match, from its first token on.

    The state of the matcher is a function of the grammar and the generated tokens alone, so it needs
    no field of its own: another worker replays the tokens it was given.
    """

    kind: GrammarKind
    text: str
    after_token_ids: tuple[int, ...] = ()
    """The text is free until these ids were generated in this order, which is the end of a reasoning segment;
    empty: the text is constrained from the start."""


class SamplingParams(msgspec.Struct, frozen=True):
    """How the tokens of one sequence are chosen. The router checks the values; workers trust them.

    Randomness is counter based: the draw for generated token i depends only on (seed, i), so a
    sequence continues identically on another worker, in another batch, and after a crash.

    A row of logits is changed in this order: grammar and allowed tokens, `min_tokens`, `logit_bias`,
    repetition, then presence and frequency penalties, temperature, top-k, top-p, min-p.
    """

    max_tokens: int
    """The most generated tokens of the whole sequence, those sent before a resume included; at least 1."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: UInt64 = 0
    stop_token_ids: tuple[int, ...] = ()
    """End-of-sequence ids and the client's own. One of them ends the sequence with STOP and is not text."""
    ignore_eos: bool = False
    """Do not stop at `stop_token_ids` (benchmarks)."""
    min_p: float = 0.0
    """Tokens less likely than this fraction of the most likely one's probability are left out."""
    repetition_penalty: float = 1.0
    """A factor over prompt and generated tokens (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """What is subtracted once for each generated token id (OpenAI)."""
    frequency_penalty: float = 0.0
    """What is subtracted for each occurrence of a generated token id (OpenAI)."""
    logit_bias: Annotated[tuple[tuple[int, float], ...], Columns("ids", "values")] = ()
    """Pairs of a token id and what is added to its logit, sorted by id."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only token ids that may be sampled; empty: all may."""
    min_tokens: int = 0
    """No id of `stop_token_ids` is sampled before this many tokens are generated."""
    logprobs: int | None = None
    """None: not wanted. k: those of the chosen token and the k most likely ones are, by the model's own
    distribution before any of the changes above (vLLM's `raw_logprobs`)."""
    prompt_logprobs: int | None = None
    """The same for each prompt token from the second on. Then nothing of the prompt is taken from a cache."""
    grammar: Grammar | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        """The choice of a token depends on the sequence's earlier tokens beyond the logits."""
        return self.has_penalties or self.grammar is not None


def finish_after(params: SamplingParams, token: int, generated_count: int) -> FinishReason | None:
    """Why a sequence ends with `token`, its `generated_count`-th one, counted from 1; None: it goes on."""
    if token in params.stop_token_ids and not params.ignore_eos:
        return FinishReason.STOP
    if generated_count >= params.max_tokens:
        return FinishReason.LENGTH
    return None
