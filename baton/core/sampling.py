"""How tokens are chosen. Travels with a sequence to whichever worker runs it."""

from enum import StrEnum, auto

import msgspec


class FinishReason(StrEnum):
    """OpenAI's finish reasons."""

    STOP = auto()
    LENGTH = auto()


class SamplingParams(msgspec.Struct, frozen=True):
    """Checked at the router; workers trust it.

    Randomness is counter based: the draw for generated token i depends only on (seed, i), so a
    sequence continues identically on another worker, in another batch, and after a crash.
    """

    max_tokens: int
    """Generated tokens of the whole sequence, those sent before a resume included. At least 1."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """End-of-sequence ids and the client's own; the sequence ends with STOP, the token is not text."""
    ignore_eos: bool = False
    """Do not stop at `stop_token_ids` (benchmarks)."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= 0.0


def finish_after(params: SamplingParams, token: int, generated_count: int) -> FinishReason | None:
    """Whether a sequence ends with `token`, the `generated_count`-th one (counted from 1)."""
    if token in params.stop_token_ids and not params.ignore_eos:
        return FinishReason.STOP
    if generated_count >= params.max_tokens:
        return FinishReason.LENGTH
    return None
