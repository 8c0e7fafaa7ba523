"""Constraints on the next token: grammar, allowed tokens, stop tokens that must not come yet."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.core.sampling import Grammar, SamplingParams
from engine.sampling.masks import Mask, mask_of, mask_words


class Matcher(Protocol):
    """Follows a text through a compiled grammar. One per sequence."""

    def accept(self, token: int) -> bool:
        """False, and nothing changes: the grammar does not allow it here."""
        ...

    def rollback(self, count: int) -> None:
        """Forget the last so many accepted tokens."""
        ...

    def fill(self, mask: Mask) -> None:
        """Tokens allowed next; stop tokens where the text may end."""
        ...


class MatcherSource(Protocol):
    def matcher(self, grammar: Grammar, stop_token_ids: Sequence[int]) -> Matcher: ...


def forbid(logits: Tensor, rows: Sequence[int], masks: Sequence[Mask]) -> None:
    """Set logits [R, vocab] of the given rows to -inf where the mask says no."""
    forbidden = np.unpackbits(~np.stack(masks).view(np.uint8), axis=-1, bitorder="little")
    where = torch.from_numpy(forbidden.view(np.bool_)[:, : logits.shape[-1]]).to(logits.device)
    if len(rows) == logits.shape[0]:
        logits.masked_fill_(where, float("-inf"))
    else:
        logits[list(rows)] = logits[list(rows)].masked_fill(where, float("-inf"))


Mark = tuple[int, int, bool]


class GrammarState:
    """Position of a sequence's generated text in its grammar."""

    def __init__(self, grammar: Grammar, matcher: Matcher, stop_token_ids: Sequence[int]) -> None:
        self._matcher, self._stop = matcher, frozenset(stop_token_ids)
        self._start = grammar.after_token_ids
        self._matched = 0
        """Tokens of `_start` that the text ends with; all of them: the grammar holds from there on."""
        self._accepted = 0
        self._is_over = False

    @property
    def is_free(self) -> bool:
        return self._matched < len(self._start)

    @property
    def is_over(self) -> bool:
        """The text ended, or left the grammar (which no token sampled here does): only a stop token may
        follow, should anybody ask for more."""
        return self._is_over

    def advance(self, token: int) -> bool:
        """False: not allowed here."""
        if self.is_free:
            self._matched = _match(self._start, self._matched, token)
            return True
        if self._is_over or token in self._stop or not self._matcher.accept(token):
            is_allowed = token in self._stop
            self._is_over = True
            return is_allowed
        self._accepted += 1
        return True

    def mark(self) -> Mark:
        return self._matched, self._accepted, self._is_over

    def reset(self, mark: Mark) -> None:
        if self._accepted > mark[1]:
            self._matcher.rollback(self._accepted - mark[1])
        self._matched, self._accepted, self._is_over = mark

    def fill(self, mask: Mask) -> None:
        self._matcher.fill(mask)


def _match(wanted: Sequence[int], matched: int, token: int) -> int:
    """Number of tokens of `wanted` with which a text ends after `token`, if it ended with `matched` of them
    before."""
    seen = [*wanted[:matched], token]
    while seen and seen != list(wanted[: len(seen)]):
        del seen[0]
    return len(seen)


class Constraints:
    """The mask of one sequence's next token. Where grammar and allowed tokens leave none the text ends, by
    a stop token, and both come before `min_tokens`: there is always a token to choose."""

    def __init__(
        self, params: SamplingParams, vocab: int, grammar: GrammarState | None, stop_token_ids: Sequence[int]
    ) -> None:
        self._params, self._vocab, self._grammar = params, vocab, grammar
        self._stop = mask_of(stop_token_ids, vocab)
        self._allowed = mask_of(params.allowed_token_ids, vocab) if params.allowed_token_ids else None

    def mask(self, index: int) -> Mask | None:
        """Mask for generated token `index`; None if every token may come."""
        grammar = self._grammar
        is_bound = grammar is not None and not grammar.is_free
        avoids_stop = index < self._params.min_tokens or (is_bound and self._params.ignore_eos)
        if not (is_bound or avoids_stop or self._allowed is not None):
            return None
        mask = np.full(mask_words(self._vocab), -1, dtype=np.int32)
        if is_bound:
            assert grammar is not None
            if grammar.is_over:
                mask[:] = self._stop
            else:
                grammar.fill(mask)
        if self._allowed is not None:
            mask &= self._allowed
        # Never a token that somebody forbids: what cannot go on ends.
        mask = _if_any(mask, self._stop)
        if avoids_stop:
            mask = _if_any(mask & ~self._stop, mask)
        return mask if mask.any() else None


def _if_any(narrower: Mask, wider: Mask) -> Mask:
    return narrower if narrower.any() else wider
