"""A language model small enough to check: its KV is a chain of hashes, its tokens follow from the KV.

The cell of position p is a hash of everything before it and of the token at p, as a real model's KV
is. A step reads *all earlier cells from the blocks its plan names* and samples from what it found
there: a block that was mixed up, overwritten or read stale gives other tokens than the oracle, whatever
the scheduler believes. Hashes of tuples of integers are the same in every Python process.
"""

from collections.abc import Sequence

from baton.core.sampling import FinishReason, SamplingParams, finish_after
from baton.core.steps import NOTHING_SAMPLED, ItemResult, StepItem, StepPlan
from baton.sim.world import Violation

VOCABULARY = 61
EOS = 0


def next_token(state: int, sampling: SamplingParams, index: int) -> int:
    """Greedy: of the state alone. Else of (state, seed, index): counter-based randomness."""
    if sampling.is_greedy:
        return hash((state, 1)) % VOCABULARY
    return hash((state, sampling.seed, index)) % VOCABULARY


class Expected:
    """One sequence as it runs when nothing disturbs it. It ends where `context_max` tokens are reached."""

    __slots__ = ("cells", "finish", "generated", "prompt", "salt", "sampling", "states")

    def __init__(
        self, prompt: Sequence[int], sampling: SamplingParams, salt: int, *, context_max: int
    ) -> None:
        self.prompt, self.sampling, self.salt = tuple(prompt), sampling, salt
        self.states = [hash((salt, 7))]
        self.cells: list[int] = []
        self.generated: list[int] = []
        self.finish = FinishReason.LENGTH
        for token in prompt:
            self._append(token)
        while True:
            index = len(self.generated)
            token = next_token(self.states[-1], sampling, index)
            self.generated.append(token)
            finish = finish_after(sampling, token, index + 1)
            if finish is not None or len(self.prompt) + index + 1 >= context_max:
                self.finish = finish or FinishReason.LENGTH
                return
            self._append(token)

    def _append(self, token: int) -> None:
        cell = hash((self.states[-1], token))
        self.cells.append(cell)
        self.states.append(hash((self.states[-1], cell)))


class Memory:
    """One worker's KV pool: cells per block, and who wrote them (for the story of a failure)."""

    __slots__ = ("block_tokens", "cells", "writers")

    def __init__(self, block_count: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.cells: list[list[int]] = [[-1] * block_tokens for _ in range(block_count)]
        self.writers: list[str] = ["nobody"] * block_count

    def copy_block(self, source: "Memory", source_block: int, local_block: int) -> None:
        self.cells[local_block] = list(source.cells[source_block])
        self.writers[local_block] = f"read of {source.writers[source_block]}"

    def read(self, block_ids: Sequence[int], position_count: int) -> list[int]:
        found: list[int] = []
        for block in block_ids[: -(-position_count // self.block_tokens)]:
            found += self.cells[block]
        del found[position_count:]
        return found


class Model:
    """Executes step plans against a `Memory`. Knows every sequence's expected run."""

    __slots__ = ("expected",)

    def __init__(self) -> None:
        self.expected: dict[str, Expected] = {}

    def execute(self, plan: StepPlan, memory: Memory, who: str) -> tuple[ItemResult, ...]:
        """What was sampled, per item. Raises Violation 2 or 7 where a block holds what it must not."""
        return tuple(self._run_item(item, memory, who) for item in plan.items)

    def _run_item(self, item: StepItem, memory: Memory, who: str) -> ItemResult:
        expected = self.expected[item.key.seq_id]
        first = item.first_position
        found = memory.read(item.block_ids, first)
        if found == expected.cells[:first]:
            state = expected.states[first]
        else:
            self._report(item, expected, found, memory, who)
            state = _fold(found, expected.states[0])
        for position, token in enumerate(item.tokens, first):
            cell = hash((state, token))
            block = item.block_ids[position // memory.block_tokens]
            memory.cells[block][position % memory.block_tokens] = cell
            memory.writers[block] = f"{item.key} on {who}"
            state = hash((state, cell))
        if item.sample_index is None:
            return NOTHING_SAMPLED
        return ItemResult((next_token(state, item.sampling, item.sample_index),))

    def _report(self, item: StepItem, expected: Expected, found: list[int], memory: Memory, who: str) -> None:
        wrong = next(
            (i for i, (a, b) in enumerate(zip(found, expected.cells, strict=False)) if a != b), len(found)
        )
        if wrong >= len(expected.cells):
            return  # runs past its expected end; the delivered tokens are compared elsewhere
        block = item.block_ids[wrong // memory.block_tokens]
        writer = memory.writers[block]
        owner = writer.rsplit("read of ", 1)[-1].split("@")[0]
        foreign = self.expected.get(owner)
        invariant = 7 if foreign is not None and foreign.salt != expected.salt else 2
        raise Violation(
            invariant,
            f"{who} computes {item.key} from position {first_text(item)} and finds foreign KV at position "
            f"{wrong}, block {block}, last written by: {writer}",
            seq_id=item.key.seq_id,
        )


def first_text(item: StepItem) -> str:
    return f"{item.first_position} (+{len(item.tokens)})"


def _fold(cells: Sequence[int], start: int) -> int:
    state = start
    for cell in cells:
        state = hash((state, cell))
    return state
