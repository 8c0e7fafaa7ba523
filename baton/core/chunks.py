"""How much of a prompt a step computes beside sequences that decode.

Workers plan their steps by it, and routers and simulators predict them.
"""

from math import inf, sqrt

from baton.core.costs import StepCosts, prompt_pairs

PLANNED_SHARE = 0.93
"""Part of the strictest TPOT objective that a step with prompts may take as planned. With all of it, an
answer whose every step is so full would miss its objective through whatever else happens to it: waiting for
its place, or a step that took longer than planned."""
TOKENS_MAX = 2**31
TOKEN_S_MIN = 1e-9
"""Least cost of a token, where a worker measured none."""


def room_s(slo_s: float, decoding_s: float, *, floor_s: float) -> float:
    """Return the seconds that prompts may take in a step, infinite without an objective (`slo_s` 0).

    The sequences that decode take `decoding_s` by themselves, and the step should take `PLANNED_SHARE` of
    their objective `slo_s` at most. Where they take longer than that, prompts get as much time as they do.
    What fits into `floor_s` costs nothing.
    """
    if slo_s <= 0.0:
        return inf
    left_s = max(slo_s * PLANNED_SHARE, floor_s) - decoding_s
    return left_s if left_s > 0.0 else decoding_s


def tokens_within(seconds: float, start: int, *, token_s: float, pair_s: float) -> int:
    """Return how many tokens of a prompt, from position `start` on, can be computed in so many seconds.

    n of them cost token_s · n + pair_s · (n · start + n · (n - 1) / 2).
    """
    if seconds <= 0.0:
        return 0
    if seconds == inf:
        return TOKENS_MAX
    linear_s = max(token_s, TOKEN_S_MIN) + pair_s * (start - 0.5)
    root_s = sqrt(linear_s * linear_s + 2.0 * pair_s * seconds)
    return int(min(2.0 * seconds / max(linear_s + root_s, TOKEN_S_MIN), TOKENS_MAX))


class PromptRoom:
    """What one step has left for prompts. Each chunk that is taken leaves less of it."""

    def __init__(self, tokens: int, costs: StepCosts, *, seconds: float = inf, least: int = 1) -> None:
        """`tokens` fit into the step. They may take `seconds`, by `costs`. The first `least` tokens fit
        whatever they take."""
        self._tokens, self._least, self._seconds, self._costs = tokens, least, seconds, costs

    @property
    def _token_s(self) -> float:
        return max(self._costs.prompt_token_s, TOKEN_S_MIN)

    @property
    def is_full(self) -> bool:
        """True if no more tokens fit."""
        return self._tokens <= 0 or (self._least <= 0 and self._seconds < self._token_s)

    def limit(self, tokens: int) -> None:
        """Leave room for so many tokens at most."""
        self._tokens = min(self._tokens, tokens)

    def take(self, start: int, count: int) -> int:
        """Take the room of up to `count` tokens of a prompt, from position `start` on, and return for how
        many there was room. That is at least one, unless the room is full or `count` is 0. A chunk that was
        cut short leaves no room: a few tokens of another prompt would be admitted for little."""
        if self.is_full:
            return 0
        in_time = tokens_within(self._seconds, start, token_s=self._token_s, pair_s=self._costs.pair_s)
        taken = min(count, self._tokens, max(in_time, self._least, 1))
        left_s = self._seconds - self._costs.prompts_s(taken, prompt_pairs(start, start + taken))
        self._seconds = left_s if taken == count else 0.0
        self._tokens -= taken
        self._least -= taken
        return taken
