"""Counters of arrivals and results by service class, on which the autoscaler decides. Pure."""

from dataclasses import dataclass, field

from baton.core.demand import Bin, ClassLoad, bin_of


@dataclass(slots=True)
class _Sums:
    bins: dict[int, Bin] = field(default_factory=dict[int, Bin])
    started: int = 0
    started_prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_missed: int = 0
    ended: int = 0
    output_tokens: int = 0
    context_tokens: int = 0
    tpot_missed: int = 0

    def load(self) -> ClassLoad:
        return ClassLoad(
            dict(self.bins),
            self.started,
            self.started_prompt_tokens,
            self.cached_tokens,
            self.ttft_missed,
            self.ended,
            self.output_tokens,
            self.context_tokens,
            self.tpot_missed,
        )

    def add_prompt(self, tokens: int, *, is_first: bool) -> None:
        at = bin_of(tokens)
        known = self.bins.get(at, Bin(0, 0))
        self.bins[at] = Bin(
            known.requests + is_first, known.prompt_tokens + tokens, known.further_prompts + (not is_first)
        )


class ArrivalCounters:
    """Requests by the name of their class, which the operator's configuration bounds."""

    def __init__(self) -> None:
        self._classes: dict[str, _Sums] = {}

    def totals(self) -> dict[str, ClassLoad]:
        """Return the totals since the start."""
        return {name: sums.load() for name, sums in self._classes.items()}

    def _of(self, slo_class: str) -> _Sums:
        if (sums := self._classes.get(slo_class)) is None:
            sums = self._classes[slo_class] = _Sums()
        return sums

    def arrived(self, slo_class: str, prompt_tokens: int) -> None:
        """Count a request and its first prompt."""
        self._of(slo_class).add_prompt(prompt_tokens, is_first=True)

    def further_prompt(self, slo_class: str, prompt_tokens: int) -> None:
        """Count one more prompt of a request that was counted."""
        self._of(slo_class).add_prompt(prompt_tokens, is_first=False)

    def started(self, slo_class: str, *, ttft_s: float, objective_s: float) -> None:
        """Count a request that has its first token. `objective_s` is 0 if there is no objective."""
        sums = self._of(slo_class)
        sums.started += 1
        sums.ttft_missed += 0 < objective_s < ttft_s

    def prefilled(self, slo_class: str, *, prompt_tokens: int, cached_tokens: int) -> None:
        """Count a prompt that has its first token."""
        sums = self._of(slo_class)
        sums.started_prompt_tokens += prompt_tokens
        sums.cached_tokens += max(0, cached_tokens)

    def gave_up(self, slo_class: str) -> None:
        """Count a request that ended without a token for lack of capacity."""
        sums = self._of(slo_class)
        sums.started += 1
        sums.ttft_missed += 1

    def generated(self, slo_class: str, *, output_tokens: int, context_tokens: int) -> None:
        """Count the tokens of one answer. `context_tokens` are the positions before each of them, summed
        up."""
        sums = self._of(slo_class)
        sums.output_tokens += output_tokens
        sums.context_tokens += context_tokens

    def ended(self, slo_class: str, *, is_slow: bool) -> None:
        """Count a request whose tokens were counted as `generated`. `is_slow`: an answer of it missed the
        TPOT objective."""
        sums = self._of(slo_class)
        sums.ended += 1
        sums.tpot_missed += is_slow


def context_of(prompt_tokens: int, output_tokens: int) -> int:
    """Return the positions before each of the output tokens, summed up."""
    return output_tokens * prompt_tokens + output_tokens * (output_tokens - 1) // 2


def is_slow(output_tokens: int, *, span_s: float, objective_s: float) -> bool:
    """Whether an answer missed its TPOT objective (0: none). `span_s` is the time from its first token to its
    last."""
    return output_tokens > 1 and 0 < objective_s < span_s / (output_tokens - 1)
