"""The tokens of one sequence in order, whoever brings them: each once, none missing."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from baton.core.messages import SequenceOutput
from baton.core.sampling import FinishReason, SamplingParams, finish_after
from baton.core.steps import TokenLogprobs

HELD_TOKENS_MAX = 1024
"""Largest number of tokens kept of one sequence while earlier ones are missing. Beyond it the attempt counts
as lost."""


class Extras(NamedTuple):
    """What goes to the client beside tokens."""

    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None


class TokenOrder:
    """Puts the tokens of all attempts of a sequence in order. Outputs may repeat tokens, and may be ahead of
    missing ones."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._stops = frozenset() if sampling.ignore_eos else frozenset(sampling.stop_token_ids)
        self.generated: list[int] = []
        """The tokens the client has."""
        self.has_prompt_logprobs = False
        """The client has them: a later attempt does not compute them again."""
        self.embedding: tuple[float, ...] = ()
        self._held: dict[int, int] = {}
        self._held_logprobs: dict[int, TokenLogprobs] = {}
        """Extras of tokens that the client does not have yet."""
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._ends: tuple[int, FinishReason] | None = None
        """(token count, reason), as a worker said it."""

    @property
    def sampling(self) -> SamplingParams:
        """The sampling of an attempt that begins now."""
        if self._sampling.prompt_logprobs is None or not self.has_prompt_logprobs:
            return self._sampling
        return msgspec.structs.replace(self._sampling, prompt_logprobs=None)

    @property
    def holds_too_many(self) -> bool:
        """Whether too many tokens wait for earlier ones."""
        return len(self._held) > HELD_TOKENS_MAX

    def accept(self, output: SequenceOutput) -> FinishReason | None:
        """Take in the tokens that are new; returns why the sequence ends, if it does."""
        generated, held = self.generated, self._held
        end = output.first_index + len(output.tokens)
        if output.finish is not None:
            self._ends = (end, output.finish)
        if output.logprobs or output.prompt_logprobs is not None or output.embedding:
            self._keep_extras(output)
        if not held and output.first_index == len(generated) and self._none_ends_early(output.tokens, end):
            generated += output.tokens
            if self._ends is not None and self._ends[0] == end:
                return self._ends[1]
            return FinishReason.LENGTH if end == self._sampling.max_tokens else None
        for index, token in enumerate(output.tokens, output.first_index):
            if index >= len(generated):
                held.setdefault(index, token)
        while len(generated) in held:
            token = held.pop(len(generated))
            generated.append(token)
            if self._ends is not None and self._ends[0] == len(generated):
                return self._ends[1]
            if (reason := finish_after(self._sampling, token, len(generated))) is not None:
                return reason
        if self._ends is not None and self._ends[0] <= len(generated):
            return self._ends[1]
        return None

    def accept_next(self, output: SequenceOutput) -> bool:
        """Take in an output's tokens if they come right after those before, end nothing and bring nothing
        else, as nearly all do. Returns False if not: then nothing was taken in."""
        tokens, generated = output.tokens, self.generated
        is_next = (
            output.is_plain
            and output.first_index == len(generated)
            and not self._held
            and self._prompt_logprobs is None
            and self._ends is None
            and len(generated) + len(tokens) < self._sampling.max_tokens
            and self._stops.isdisjoint(tokens)
        )
        if not tokens or not is_next:
            return False
        generated += tokens
        return True

    def _none_ends_early(self, tokens: Sequence[int], end: int) -> bool:
        """Whether none of these can be the sequence's last but the `end`-th, for its number."""
        in_bounds = end <= self._sampling.max_tokens and (self._ends is None or self._ends[0] >= end)
        return in_bounds and self._stops.isdisjoint(tokens)

    def take_extras(self, first_index: int) -> Extras:
        """Logprobs of the tokens from `first_index` on, and of the prompt if the client lacks them."""
        of_prompt, self._prompt_logprobs = self._prompt_logprobs, None
        if of_prompt is not None:
            self.has_prompt_logprobs = True
        held = self._held_logprobs
        if not held:
            return Extras((), of_prompt)
        indices = range(first_index, len(self.generated))
        return Extras(tuple(held.pop(index) for index in indices if index in held), of_prompt)

    def attempt_over(self) -> None:
        """What its attempt said of tokens that did not come is forgotten."""
        self._held.clear()
        self._held_logprobs.clear()
        self._ends = None

    def _keep_extras(self, output: SequenceOutput) -> None:
        known = len(self.generated)
        for index, entry in enumerate(output.logprobs, output.first_index):
            if index >= known:
                self._held_logprobs.setdefault(index, entry)
        if output.prompt_logprobs is not None and not self.has_prompt_logprobs:
            self._prompt_logprobs = output.prompt_logprobs
        if output.embedding:
            self.embedding = output.embedding
