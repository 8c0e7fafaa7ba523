"""One step's tokens: from the logits of all sequences that sample to their tokens and logprobs.

A sequence with draft tokens has several rows, the first after its last known token and one after each
draft token. All rows are sampled at once, each as if the drafts before it were right; then tokens are taken
while they equal the drafts. Since a draw depends on (seed, index) and its logits alone, the tokens are
those that would have been sampled one at a time, greedy or not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from baton.core.ids import SeqKey
from baton.core.sampling import SamplingParams, finish_after
from baton.core.steps import TokenLogprobs
from engine.sampling.choose import Draw, choose
from engine.sampling.constraints import MatcherSource, forbid
from engine.sampling.logprobs import logprobs_of
from engine.sampling.masks import Mask
from engine.sampling.penalties import Ids, Numbers, RowCounts, add_bias, penalise
from engine.sampling.state import SequenceState, SequenceStates


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sequence that samples in this step."""

    key: SeqKey
    params: SamplingParams
    index: int
    """Generated index of the first token to sample."""
    drafts: tuple[int, ...] = ()
    history: tuple[int, ...] | None = None
    """All tokens before the first to sample; see `StepItem.history`."""
    prompt_token_count: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


class Sampler:
    def __init__(self, *, vocab: int, grammars: MatcherSource, eos_token_ids: Sequence[int]) -> None:
        self._states = SequenceStates(vocab=vocab, grammars=grammars, eos_token_ids=eos_token_ids)

    def end(self, keys: Iterable[SeqKey]) -> None:
        """Nothing remembered of these is needed any more."""
        self._states.drop(keys)

    def sample(self, logits: Tensor, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """logits float32 [R, vocab], may be overwritten: 1 + len(drafts) rows per request, in order."""
        states = [self._states.of(r.key, r.params, r.history, r.prompt_token_count) for r in requests]
        wanted = [r.params.logprobs for r in requests for _ in range(1 + len(r.drafts))]
        rows = [row for row, count in enumerate(wanted) if count is not None]
        raw = logits[rows] if rows else None
        _Changes.of(requests, states).apply(logits)
        draws = [Draw(r.params, r.index + i) for r in requests for i in range(1 + len(r.drafts))]
        tokens = choose(logits, draws)
        if raw is None:
            logprobs: list[TokenLogprobs] = []
        else:
            logprobs = logprobs_of(raw, [tokens[row] for row in rows], [wanted[row] or 0 for row in rows])
        return _collect(requests, states, tokens, logprobs)


def _collect(
    requests: Sequence[SampleRequest],
    states: Sequence[SequenceState | None],
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
) -> list[Sampled]:
    """Takes what was sampled into the states. tokens: of all rows; logprobs: of those that want them."""
    results: list[Sampled] = []
    row = place = 0
    for request, state in zip(requests, states, strict=True):
        row_count = 1 + len(request.drafts)
        taken = _accept(request, tokens[row : row + row_count])
        row += row_count
        if state is not None:
            for token in taken:
                state.advance(token)
        if request.params.logprobs is None:
            results.append(Sampled(taken))
        else:
            results.append(Sampled(taken, tuple(logprobs[place : place + len(taken)])))
            place += row_count
    return results


def _accept(request: SampleRequest, tokens: Sequence[int]) -> tuple[int, ...]:
    """The tokens up to the first draft token that was wrong, and not beyond a token that ends the
    sequence."""
    taken = [tokens[0]]
    for draft, token in zip(request.drafts, tokens[1:], strict=True):
        newest = taken[-1]
        if newest != draft or finish_after(request.params, newest, request.index + len(taken)):
            break
        taken.append(token)
    return tuple(taken)


class _Changes:
    """Changes that the states make to the logits, gathered over all rows."""

    def __init__(self) -> None:
        self._masked_rows: list[int] = []
        self._masks: list[Mask] = []
        self._bias: list[tuple[int, Ids, Numbers]] = []
        self._counts: list[RowCounts] = []

    @classmethod
    def of(cls, requests: Sequence[SampleRequest], states: Sequence[SequenceState | None]) -> "_Changes":
        changes = cls()
        row = 0
        for request, state in zip(requests, states, strict=True):
            if state is not None:
                changes._collect(row, request, state)
            row += 1 + len(request.drafts)
        return changes

    def _collect(self, row: int, request: SampleRequest, state: SequenceState) -> None:
        """Collect the changes for one row per draft token and one more, each as if the draft tokens before it
        were sampled."""
        if not request.drafts:
            self._collect_row(row, request.index, state, copies=False)
            return
        trial = state.trial()
        self._collect_row(row, request.index, state, copies=True)
        for number, draft in enumerate(request.drafts, start=1):
            if not trial.advance(draft):
                break  # the grammar forbids this draft token, so nobody asks for the rows after it
            self._collect_row(row + number, request.index + number, state, copies=True)
        trial.undo()

    def _collect_row(self, row: int, index: int, state: SequenceState, *, copies: bool) -> None:
        mask = state.mask(index)
        if mask is not None:
            self._masked_rows.append(row)
            self._masks.append(mask)
        if len(state.bias_ids):
            self._bias.append((row, state.bias_ids, state.bias))
        if state.counts is not None:
            ids, counts = state.counts.view()
            if copies:
                ids, counts = ids.copy(), counts.copy()
            self._counts.append(RowCounts(row, state.params, ids, counts))

    def apply(self, logits: Tensor) -> None:
        if self._masks:
            forbid(logits, self._masked_rows, self._masks)
        if self._bias:
            add_bias(logits, self._bias)
        if self._counts:
            penalise(logits, self._counts)
