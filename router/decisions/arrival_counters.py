"""Counters of arrivals and results by service class, on which the autoscaler decides. Pure."""

from dataclasses import dataclass, field

from baton.core.demand import Bin, ClassLoad, bin_of


@dataclass(slots=True)
class _Sums:
    bins: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
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
            {at: Bin(n, tokens) for at, (n, tokens) in self.bins.items()},
            self.started,
            self.started_prompt_tokens,
            self.cached_tokens,
            self.ttft_missed,
            self.ended,
            self.output_tokens,
            self.context_tokens,
            self.tpot_missed,
        )


class ArrivalCounters:
    """Sequences by the name of their class, which the operator's configuration bounds."""

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
        bins = self._of(slo_class).bins
        at = bin_of(prompt_tokens)
        n, tokens = bins.get(at, (0, 0))
        bins[at] = (n + 1, tokens + prompt_tokens)

    def started(
        self, slo_class: str, *, prompt_tokens: int, cached_tokens: int, ttft_s: float, objective_s: float
    ) -> None:
        """Count a sequence that has its first token. `objective_s` is 0 if there is no objective."""
        sums = self._of(slo_class)
        sums.started += 1
        sums.started_prompt_tokens += prompt_tokens
        sums.cached_tokens += max(0, cached_tokens)
        sums.ttft_missed += 0 < objective_s < ttft_s

    def gave_up(self, slo_class: str) -> None:
        """Count a sequence that ended without a token for lack of capacity."""
        sums = self._of(slo_class)
        sums.started += 1
        sums.ttft_missed += 1

    def ended(
        self, slo_class: str, *, prompt_tokens: int, output_tokens: int, span_s: float, objective_s: float
    ) -> None:
        """Count the decode phase of a sequence, which took `span_s` from its first token to its last.

        A single token says nothing about decoding and is not counted.
        """
        if output_tokens < 2:
            return
        sums = self._of(slo_class)
        sums.ended += 1
        sums.output_tokens += output_tokens
        sums.context_tokens += output_tokens * prompt_tokens + output_tokens * (output_tokens - 1) // 2
        sums.tpot_missed += 0 < objective_s < span_s / (output_tokens - 1)
