"""The cost model of one worker's steps, shared by worker, router and simulators.

seconds of a step ≈ base + a·prompt tokens + b·decodes + b'·min(decodes, 8) + c·context tokens + d·pairs;
at least its floor

The worker fits it from its own steps (`engine.scheduling.step_time`), the first of which it runs when it
starts. The simulators take it from a device's data sheet. It is linear, so it says little about a step that
is unlike all that ran, and its users correct it by what then happens.
"""

from collections.abc import Iterable
from math import ceil, sqrt
from statistics import median, median_low

import msgspec

STAGE_CHUNK_MIN = 64
"""Least tokens of a chunk that is made small for the sake of a pipeline. Kernels need so many rows."""
FEW_DECODES = 8
"""Number of sequences up to which one more has another cost than beyond it. Products with few rows read all
weights for few results, so that the second row is dearer than the thirtieth. In a pipeline it is cheaper:
one sequence leaves all stages but one idle."""
COST_MAX_S = 3600.0
STAGES_MAX = 1024
TIMING_MAX_S = 1e9


class StepCosts(msgspec.Struct, frozen=True):
    """Coefficients of the cost model in seconds, each zero or more but for `few_decode_s`."""

    base_s: float
    """Cost of any step, however little it does."""
    prompt_token_s: float
    """Cost per prompt token computed."""
    decode_s: float
    """Cost per sequence that decodes one token."""
    context_token_s: float
    """Cost per position of a decoding sequence, whose KV the step reads."""
    pair_s: float = 0.0
    """Cost per pair of a computed prompt token and a position before it. This is attention's part, which
    makes the end of a long prompt dearer than its beginning."""
    stages: int = 1
    """Pipeline stages. Several chunks of prompts are then under way at once: their costs are what each adds
    to the one before it. Steps with decodes are not: their costs are those of all stages together."""
    floor_s: float = 0.0
    """Least time of any step: that of reading the weights that are streamed (`model.offload`). Computing goes
    on beside it."""
    few_decode_s: float = 0.0
    """Cost that each of the first `FEW_DECODES` sequences that decode adds to `decode_s`. It is less than
    zero, by `decode_s` at most, where the first ones are cheaper than later ones."""

    @property
    def is_usable(self) -> bool:
        """False for what no step can cost: a NaN, an infinity, less than nothing or more than an hour. A
        worker that reports such costs must not spoil what others decide by them."""
        found = (self.base_s, self.prompt_token_s, self.decode_s, self.context_token_s, self.pair_s)
        found = (*found, self.floor_s, self.decode_s + self.few_decode_s)
        is_pipeline = self.stages <= STAGES_MAX
        return is_pipeline and all(0.0 <= cost_s <= COST_MAX_S for cost_s in found)

    def step_s(
        self, *, prompt_tokens: int = 0, decodes: float = 0, context_tokens: float = 0, pairs: float = 0
    ) -> float:
        compute_s = self.compute_s(
            prompt_tokens=prompt_tokens, decodes=decodes, context_tokens=context_tokens, pairs=pairs
        )
        return max(self.floor_s, compute_s)

    def compute_s(
        self, *, prompt_tokens: int = 0, decodes: float = 0, context_tokens: float = 0, pairs: float = 0
    ) -> float:
        """Return the time of a step without its floor."""
        return (
            self.base_s
            + self.prompt_token_s * prompt_tokens
            + self.decodes_s(decodes)
            + self.context_token_s * context_tokens
            + self.pair_s * pairs
        )

    def prompts_s(self, tokens: float, pairs: float) -> float:
        """Return what so many prompt tokens add to steps, with `pairs` of one of them and a position before
        it."""
        return self.prompt_token_s * tokens + self.pair_s * pairs

    def decodes_s(self, count: float) -> float:
        """Return what `count` sequences that decode add to a step, their contexts left out."""
        return self.decode_s * count + self.few_decode_s * min(count, FEW_DECODES)

    def one_more_s(self, count: float) -> float:
        """Return what one more sequence adds where `count` decode, its context left out."""
        return self.decodes_s(count + 1) - self.decodes_s(count)

    def prompt_s(self, start: int, end: int, *, chunk_tokens: int) -> float:
        """Return the seconds to compute positions [start, end) of one prompt in steps of `chunk_tokens` at
        most, alone. The last chunk passes the later stages when all others have."""
        count = max(0, end - start)
        if count == 0:
            return 0.0
        chunk = min(chunk_tokens, self.chunk_tokens(count))
        steps = -(-count // chunk)
        own_s = steps * self.base_s + self.prompt_token_s * count + self.pair_s * prompt_pairs(start, end)
        floor_s = (steps + self.stages - 1) * self.floor_s / max(1, self.stages)
        if self.stages <= 1:
            return max(floor_s, own_s)
        last = min(chunk, count)
        last_s = self.base_s + self.prompt_token_s * last + self.pair_s * prompt_pairs(end - last, end)
        return max(floor_s, own_s + (self.stages - 1) * last_s)

    def chunk_tokens(self, token_count: int) -> int:
        """Return the length of the chunks in which so many prompt tokens pass all stages soonest.

        In n chunks they take (n + stages - 1) · (base + a · tokens / n) seconds, which is least at
        n = sqrt((stages - 1) · a · tokens / base).
        """
        if self.stages <= 1:
            return max(1, token_count)
        chunks = round(sqrt((self.stages - 1) * self.prompt_token_s * token_count / max(self.base_s, 1e-9)))
        return max(STAGE_CHUNK_MIN, ceil(token_count / max(1, chunks)))


def prompt_pairs(start: int, end: int) -> int:
    """Return the number of pairs of a token at a position of [start, end) and a position before it."""
    return (end * (end - 1) - start * (start - 1)) // 2


def median_costs(all_costs: Iterable[StepCosts]) -> StepCosts | None:
    """The median of each coefficient; None: there are none."""
    listed = list(all_costs)
    if not listed:
        return None
    decode_s = median(c.decode_s for c in listed)
    return StepCosts(
        median(c.base_s for c in listed),
        median(c.prompt_token_s for c in listed),
        decode_s,
        median(c.context_token_s for c in listed),
        median(c.pair_s for c in listed),
        median_low(c.stages for c in listed),
        median(c.floor_s for c in listed),
        max(-decode_s, median(c.few_decode_s for c in listed)),
    )


class PhaseTimings(msgspec.Struct, frozen=True):
    """Seconds of one prefill or aggregated phase, on the worker's own clock."""

    wait_s: float
    """Time from the start message to the first step that computes some of its prompt, loading excluded."""
    load_s: float
    """Time spent waiting for blocks of the store before the last prompt token was computed."""
    compute_s: float
    """Time from that first step to the sampling of the first token, loading excluded."""

    @property
    def is_usable(self) -> bool:
        """False for a NaN, an infinity, or less than nothing."""
        return all(0.0 <= part_s <= TIMING_MAX_S for part_s in (self.wait_s, self.load_s, self.compute_s))
