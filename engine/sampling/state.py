"""Values that the executor remembers of a sequence to choose its next token.

All of them are functions of the request and the sequence's tokens, so they are built anew from those wherever
a sequence goes on: after the hand-over, a preemption or a crash.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from baton.core.ids import SeqKey
from baton.core.sampling import SamplingParams
from engine.sampling.constraints import Constraints, GrammarState, MatcherSource
from engine.sampling.masks import Mask
from engine.sampling.penalties import Ids, Numbers, TokenCounts


def needs_state(params: SamplingParams) -> bool:
    """True if anything but temperature and the filters after it changes the logits."""
    return (
        params.needs_history or params.min_tokens > 0 or bool(params.logit_bias or params.allowed_token_ids)
    )


class SequenceState:
    def __init__(
        self,
        params: SamplingParams,
        tokens: Sequence[int],
        prompt_token_count: int,
        *,
        vocab: int,
        grammars: MatcherSource,
        eos_token_ids: Sequence[int],
    ) -> None:
        """`tokens`: prompt and generated; needed only if `params.needs_history`."""
        self.params = params
        prompt, generated = tokens[:prompt_token_count], tokens[prompt_token_count:]
        self.counts: TokenCounts | None = None
        if params.has_penalties:
            counted = prompt if params.repetition_penalty != 1.0 else ()
            self.counts = TokenCounts((t for t in counted if 0 <= t < vocab), generated)
        self._grammar: GrammarState | None = None
        stops = params.stop_token_ids or tuple(eos_token_ids)
        if params.grammar is not None:
            self._grammar = GrammarState(params.grammar, grammars.matcher(params.grammar, stops), stops)
            for token in generated:
                self._grammar.advance(token)
        self._constraints: Constraints | None = None
        if params.grammar is not None or params.allowed_token_ids or params.min_tokens:
            self._constraints = Constraints(params, vocab, self._grammar, stops)
        bias = [(token, value) for token, value in params.logit_bias if 0 <= token < vocab]
        self.bias_ids: Ids = np.array([token for token, _ in bias], dtype=np.int64)
        self.bias: Numbers = np.array([value for _, value in bias], dtype=np.float32)

    def mask(self, index: int) -> Mask | None:
        return None if self._constraints is None else self._constraints.mask(index)

    def advance(self, token: int) -> bool:
        """`token` was generated. False: the grammar does not allow it."""
        if self.counts is not None:
            self.counts.add(token)
        return self._grammar is None or self._grammar.advance(token)

    def trial(self) -> "SequenceTrial":
        return SequenceTrial(self, self.counts, self._grammar)


class SequenceTrial:
    """Tokens added on trial; `undo` restores the state from before."""

    def __init__(
        self, state: SequenceState, counts: TokenCounts | None, grammar: GrammarState | None
    ) -> None:
        self._state, self._counts, self._grammar = state, counts, grammar
        self._mark = None if counts is None else counts.mark()
        self._grammar_mark = None if grammar is None else grammar.mark()
        self._added: list[int] = []

    def advance(self, token: int) -> bool:
        self._added.append(token)
        return self._state.advance(token)

    def undo(self) -> None:
        if self._counts is not None and self._mark is not None:
            self._counts.reset(self._mark, self._added)
        if self._grammar is not None and self._grammar_mark is not None:
            self._grammar.reset(self._grammar_mark)


class SequenceStates:
    """States by attempt, for those whose request needs one."""

    def __init__(self, *, vocab: int, grammars: MatcherSource, eos_token_ids: Sequence[int]) -> None:
        self._vocab, self._grammars, self._eos = vocab, grammars, tuple(eos_token_ids)
        self._by_key: dict[SeqKey, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def of(
        self, key: SeqKey, params: SamplingParams, history: Sequence[int] | None, prompt_token_count: int
    ) -> SequenceState | None:
        """`history`: all the sequence's tokens so far, where the caller starts the sequence (again)."""
        if not needs_state(params):
            return None
        known = self._by_key.get(key)
        if known is not None and (history is None or not params.needs_history):
            return known
        assert history is not None or not params.needs_history, f"{key} starts without its history"
        state = SequenceState(
            params,
            history or (),
            prompt_token_count,
            vocab=self._vocab,
            grammars=self._grammars,
            eos_token_ids=self._eos,
        )
        self._by_key[key] = state
        return state

    def drop(self, keys: Iterable[SeqKey]) -> None:
        for key in keys:
            self._by_key.pop(key, None)
