"""What the counts of an engine's experts tell: which are busy, and how evenly the load is spread. Pure.

A layer's balance is its tokens per expert, the mean over the most: 1 if all experts get as many, 1/E if one
of E gets them all. It is the share of the time that devices would work if each had one expert and all waited
for the busiest.
"""

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
"""Tokens as [L, E]: layers with experts, experts."""

SPAN_MIN_S, SPAN_MAX_S = 10.0, 300.0
"""A balance covers at least this long, and at least TOKENS_MIN tokens. If they do not come within the longer
time there is no balance: a few tokens tell more about chance than about experts."""
TOKENS_MIN = 256
"""Tokens per expert in a layer, in the mean. Among 256 experts that are equally likely, the busiest then has
some 2.8 standard deviations of a Poisson count more than the mean: chance alone makes the balance 0.85."""


class ExpertLoad:
    """The load of one worker's experts. Observe the totals now and then."""

    def __init__(self, layers: tuple[int, ...], expert_count: int) -> None:
        """`layers` are the numbers of the layers that have experts."""
        self.totals: Counts = np.zeros(expert_count, dtype=np.int64)
        """Tokens as [E], summed over layers."""
        self.balance: float | None = None
        """The mean over layers; None if there were too few tokens lately."""
        self.worst: float | None = None
        """The balance of the layer with the least."""
        self.worst_layer: int | None = None
        self._layers = layers
        self._since_s: float | None = None
        self._then: Counts = np.zeros((len(layers), expert_count), dtype=np.int64)

    def observe(self, counts: Counts, *, now_s: float) -> None:
        """Take in counts since the engine started. The array must not change afterwards."""
        self.totals = counts.sum(axis=0)
        if self._since_s is None:
            self._since_s, self._then = now_s, counts
            return
        span_s = now_s - self._since_s
        if span_s < SPAN_MIN_S:
            return
        found = balances(counts - self._then)
        if np.isnan(found).all() and span_s < SPAN_MAX_S:
            return
        self._since_s, self._then = now_s, counts
        self._judge(found)

    def _judge(self, found: npt.NDArray[np.float64]) -> None:
        if np.isnan(found).all():
            self.balance = self.worst = self.worst_layer = None
            return
        worst = int(np.nanargmin(found))
        self.balance, self.worst = float(np.nanmean(found)), float(found[worst])
        self.worst_layer = self._layers[worst]

    def accounts(self) -> dict[str, float]:
        """The accounts for `WorkerStatusReply.accounts`."""
        accounts = {
            "experts.count": float(len(self.totals)),
            "experts.layers": float(len(self._layers)),
            "experts.routed_tokens": float(self.totals.sum()),
        }
        if self.balance is not None and self.worst is not None and self.worst_layer is not None:
            accounts["experts.balance"] = self.balance
            accounts["experts.worst_balance"] = self.worst
            accounts["experts.worst_layer"] = float(self.worst_layer)
        return accounts


def balances(counts: Counts) -> npt.NDArray[np.float64]:
    """Balances as [L]; nan for a layer with fewer than TOKENS_MIN tokens per expert."""
    mean, most = counts.mean(axis=1), counts.max(axis=1)
    return np.where(mean >= TOKENS_MIN, mean / np.maximum(most, 1), np.nan)
