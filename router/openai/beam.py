"""Beam search over a model that answers with the logprobs of the next token. Pure.

The search is that of transformers (num_beams, early_stopping=False; generation/utils.py `_beam_search`). A
beam that ends is kept with its log probability over length ** length_penalty. The search ends when the best
running beam, scored so at its present length, cannot beat the worst of the kept ones.
"""

from collections.abc import Collection, Sequence
from heapq import nlargest

import msgspec


class Hypothesis(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]
    score: float
    """Sum of log probabilities while the beam runs; that sum over length ** length_penalty once it ended."""


class BeamSearch:
    def __init__(
        self, *, width: int, length_penalty: float, eos_token_ids: Collection[int], max_tokens: int
    ) -> None:
        self._width, self._length_penalty = width, length_penalty
        self._eos = frozenset(eos_token_ids)
        self._max_tokens = max_tokens
        self._keep = max(2, 1 + len(self._eos)) * width
        self.running: list[Hypothesis] = [Hypothesis((), 0.0)]
        self.ended: list[Hypothesis] = []
        """Ended beams, best first."""
        self.is_over = False

    @property
    def alternatives(self) -> int:
        """Number of most likely next tokens that a step must know of each running beam."""
        return self._keep

    def step(self, next_tokens: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Extend the beams. `next_tokens` has (token, logprob) pairs of each running beam's next token, at
        least `alternatives` of them."""
        length = len(self.running[0].tokens) + 1
        scored = [
            (beam.score + logprob, beam, token)
            for beam, tokens in zip(self.running, next_tokens, strict=True)
            for token, logprob in tokens
        ]
        best = nlargest(self._keep, scored, key=lambda one: one[0])
        candidates = [Hypothesis((*beam.tokens, token), score) for score, beam, token in best]
        for candidate in candidates[: self._width]:
            if self._ends(candidate):
                self.ended.append(Hypothesis(candidate.tokens, self._scored(candidate.score, length)))
        self.ended = sorted(self.ended, key=lambda h: -h.score)[: self._width]
        self.running = [c for c in candidates if not self._ends(c)][: self._width]
        self.is_over = not self.running or self._cannot_improve(length)

    def _ends(self, hypothesis: Hypothesis) -> bool:
        return len(hypothesis.tokens) >= self._max_tokens or hypothesis.tokens[-1] in self._eos

    def _scored(self, logprob: float, length: int) -> float:
        return logprob / length**self._length_penalty

    def _cannot_improve(self, length: int) -> bool:
        if len(self.ended) < self._width:
            return False
        return self._scored(self.running[0].score, length) <= self.ended[-1].score
