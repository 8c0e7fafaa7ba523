"""What computing costs on one worker, as it measured it itself: the one cost model that worker, router and
simulator share.

seconds of a step ≈ base + a·prompt tokens + b·decodes + c·context tokens + d·pairs

The worker fits it from its own steps (`engine.scheduling.step_time`), the first of which it runs when
it starts; the simulator takes it from a device's data sheet. It is linear, so it says little about a step
that is unlike all that ran; whoever uses it corrects it by what then happens.
"""

import msgspec

PLANNED_SHARE = 0.9
"""Of the strictest objective for the time per token, what a step with prompts in it is planned to take at
most. Were it all of it, an answer whose every step is so full would miss its objective by whatever else
happens to it: the wait for its seat, a step that took longer than planned."""


class StepCosts(msgspec.Struct, frozen=True):
    """Seconds. All are zero or more."""

    base_s: float
    """Of any step, however little it does."""
    prompt_token_s: float
    """Per prompt token computed."""
    decode_s: float
    """Per sequence that decodes one token."""
    context_token_s: float
    """Per position of a decoding sequence, whose KV the step reads."""
    pair_s: float = 0.0
    """Per pair of a prompt token computed and a position before it: attention's share, which makes the end of
    a long prompt dearer than its beginning."""

    def step_s(
        self, *, prompt_tokens: int = 0, decodes: float = 0, context_tokens: float = 0, pairs: float = 0
    ) -> float:
        return (
            self.base_s
            + self.prompt_token_s * prompt_tokens
            + self.decode_s * decodes
            + self.context_token_s * context_tokens
            + self.pair_s * pairs
        )

    def prompt_s(self, start: int, end: int, *, chunk_tokens: int) -> float:
        """Computing positions [start, end) of one prompt in steps of `chunk_tokens`, nobody beside it."""
        count = max(0, end - start)
        if count == 0:
            return 0.0
        steps = -(-count // chunk_tokens)
        return steps * self.base_s + self.prompt_token_s * count + self.pair_s * prompt_pairs(start, end)


def prompt_pairs(start: int, end: int) -> int:
    """Pairs of a token at a position of [start, end) and one before it."""
    return (end * (end - 1) - start * (start - 1)) // 2


class PhaseTimings(msgspec.Struct, frozen=True):
    """Where the time of one prefill or whole phase went, on the worker's own clock; seconds."""

    wait_s: float
    """From the start message to the first step that computes some of its prompt, loading excluded."""
    load_s: float
    """Of the time before its last prompt token was computed: waiting for blocks of the store."""
    compute_s: float
    """From that first step to the sampling of the first token, loading excluded."""
