"""A language model small enough to check: its KV is a chain of hashes, and its tokens follow from the KV.

The cell of position p is a hash of everything before it and of the token at p, as a real model's KV is. A
step reads *all earlier cells from the blocks its plan names* and samples from what it found there: a block
that was mixed up, overwritten or read stale gives other tokens than the oracle, whatever the scheduler
believes. Hashes of tuples of integers are the same in every Python process.
"""

from collections.abc import Sequence

import numpy as np

from baton.core.messages import Task
from baton.core.sampling import FinishReason, SamplingParams, finish_after
from baton.core.steps import PENDING_TOKEN, ItemResult, StepItem, StepPlan, TokenLogprobs
from router.decisions.hedging import submitted_name
from simulator.faults.memory import Cells, DeviceMemory
from simulator.faults.run_context import Violation

VOCABULARY = 61
EOS = 0


LOOP_TOKENS = 5


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of tokens: one character each, and nothing for end-of-sequence."""
    return "".join([chr(ord("A") + token) for token in tokens if token != EOS])


def next_token(
    state: int, sampling: SamplingParams, index: int, tokens: Sequence[int], *, loops: bool
) -> int:
    """Return the token that follows.

    A greedy choice depends on the state alone, any other on (state, seed, index), which is counter-based
    randomness; a penalty adds the tokens before it. A sequence that `loops` mostly repeats what it said
    `LOOP_TOKENS` before, so that draft tokens are often right, and sometimes wrong.
    """
    if loops and len(tokens) > LOOP_TOKENS and hash((state, 3)) % 8:
        return tokens[-LOOP_TOKENS]
    extra = hash(tuple(tokens)) if sampling.needs_history else 1
    if sampling.is_greedy:
        return hash((state, extra)) % VOCABULARY
    return hash((state, extra, sampling.seed, index)) % VOCABULARY


class Expected:
    """One sequence as it runs when nothing disturbs it. It ends where `context_max` tokens are reached.

    `owner` is a number for tenant and adapter. The cells depend on it as a real model's KV depends on the
    adapter, so a block that was computed for another owner shows, whatever the hashes of blocks say.
    """

    __slots__ = (
        "_cell_array",
        "cells",
        "embedding",
        "finish",
        "generated",
        "loops",
        "owner",
        "prompt",
        "sampling",
        "states",
        "tokens",
    )

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        owner: int,
        *,
        context_max: int,
        loops: bool = False,
        task: Task = Task.GENERATE,
    ) -> None:
        self.embedding: tuple[float, ...] = ()
        self.prompt, self.sampling, self.owner, self.loops = tuple(prompt), sampling, owner, loops
        self.tokens = list(prompt)
        self.states = [hash((owner, 7))]
        self.cells: list[int] = []
        self._cell_array: Cells | None = None
        self.generated: list[int] = []
        self.finish = FinishReason.LENGTH
        for token in prompt:
            self._append(token)
        if task is Task.EMBED:
            self.embedding, self.finish = embedding_of(self.states[-1]), FinishReason.STOP
            return
        while True:
            index = len(self.generated)
            token = next_token(self.states[-1], sampling, index, self.tokens, loops=loops)
            self.generated.append(token)
            self.tokens.append(token)
            finish = finish_after(sampling, token, index + 1)
            if finish is not None or len(self.prompt) + index + 1 >= context_max:
                self.finish = finish or FinishReason.LENGTH
                return
            self._append(token)

    @staticmethod
    def state_after(tokens: Sequence[int], owner: int) -> int:
        """Return the state after these tokens, from which the next one follows."""
        state = hash((owner, 7))
        for token in tokens:
            state = hash((state, hash((state, token))))
        return state

    def first_cells(self, count: int) -> Cells:
        """Return the cells of the first positions, or of all if those are fewer."""
        if self._cell_array is None:
            self._cell_array = np.array(self.cells, np.int64)
        return self._cell_array[:count]

    def logprobs_at(self, index: int, token: int) -> TokenLogprobs:
        """Return the log probabilities that belong to generated token `index`."""
        return fake_logprob(token, self.states[len(self.prompt) + index], self.sampling.logprobs or 0)

    def _append(self, token: int) -> None:
        cell = hash((self.states[-1], token))
        self.cells.append(cell)
        self.states.append(hash((self.states[-1], cell)))


class Model:
    """The executor of step plans against a `DeviceMemory`. It knows the expected run of every sequence."""

    __slots__ = ("expected",)

    def __init__(self) -> None:
        self.expected: dict[str, Expected] = {}

    def execute(
        self, plan: StepPlan, memory: DeviceMemory, who: str, *, followed: Sequence[StepPlan] = ()
    ) -> tuple[ItemResult, ...]:
        """Return what was sampled, per item. Raises Violation 2 or 7 where a block holds what it must not.

        followed: the plan as each follower of the worker has it, by rank. Each rank uses the blocks that its
        own plan names.
        """
        plans = (plan, *followed)
        if plan.step_number != memory.step_number + 1:
            raise Violation(0, f"{who}: step {plan.step_number} after step {memory.step_number}")
        for part, own in enumerate(plans):
            self._move(own, memory, part)
        for key in plan.ended:
            memory.histories.pop(key, None)
        by_item = zip(*(own.items for own in plans), strict=True)
        results = tuple(self._run_item(by_rank, memory, who) for by_rank in by_item)
        memory.step_number = plan.step_number
        memory.sampled = {
            item.key: result.tokens[-1]
            for item, result in zip(plan.items, results, strict=True)
            if result.tokens
        }
        return results

    def is_last(self, item: StepItem) -> bool:
        """Return whether a step samples the last token of a sequence."""
        expected = self.expected[submitted_name(item.key.seq_id)]
        return item.sample_index == len(expected.generated) - 1

    def _move(self, plan: StepPlan, memory: DeviceMemory, part: int) -> None:
        for block, slot in plan.swap_out:
            if part == 0:
                memory.save(slot, block)
        for slot, block in plan.swap_in:
            memory.bring_back(slot, block, part)
        for source, block in plan.copies:
            memory.move(source, block, part)
            memory.writers[block] = memory.writers[source]

    def _run_item(self, by_rank: Sequence[StepItem], memory: DeviceMemory, who: str) -> ItemResult:
        item = by_rank[0]
        expected = self.expected[submitted_name(item.key.seq_id)]
        first = item.first_position
        tokens = self._tokens_of(item, memory, who)
        if item.history is not None:
            memory.histories[item.key] = list(item.history)
        state = self._state_before(by_rank, expected, memory, who)
        states: list[int] = []
        for position, token in enumerate(tokens, first):
            cell = hash((state, token))
            index, offset = divmod(position, memory.block_tokens)
            for part, own in enumerate(by_rank):
                memory.write(part, own.block_ids[index], offset, cell)
                memory.writers[own.block_ids[index]] = f"{item.key} on {who}"
            state = hash((state, cell))
            states.append(state)
        if item.wants_embedding:
            return ItemResult(embedding=embedding_of(state))
        wants_prompt = item.sampling.prompt_logprobs is not None
        prompt_logprobs = _prompt_logprobs(item, tokens) if wants_prompt else ()
        if item.sample_index is None:
            return ItemResult(prompt_logprobs=prompt_logprobs)
        sampled, before = self._sample(item, tokens, states, memory, who)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if (top := item.sampling.logprobs) is not None:
            logprobs = tuple(fake_logprob(token, s, top) for token, s in zip(sampled, before, strict=True))
        return ItemResult(sampled, logprobs, prompt_logprobs)

    def _state_before(
        self, by_rank: Sequence[StepItem], expected: Expected, memory: DeviceMemory, who: str
    ) -> int:
        """Return the state that follows from what the blocks of every rank hold before the item."""
        first = by_rank[0].first_position
        cells = expected.first_cells(first)
        for part, own in enumerate(by_rank):
            if len(cells) < first or not memory.holds(part, own.block_ids, cells):
                found = memory.read(part, own.block_ids, expected.cells, first)
                self._report(own, expected, found, memory, who if not part else f"rank {part} of {who}")
                return _fold(found, expected.states[0])
        return expected.states[first]

    def _tokens_of(self, item: StepItem, memory: DeviceMemory, who: str) -> tuple[int, ...]:
        if item.tokens != (PENDING_TOKEN,):
            return item.tokens
        token = memory.sampled.get(item.key)
        if token is None:
            raise Violation(0, f"{who}: the step before samples nothing for {item.key}")
        return (token,)

    def _sample(
        self, item: StepItem, tokens: tuple[int, ...], states: list[int], memory: DeviceMemory, who: str
    ) -> tuple[tuple[int, ...], list[int]]:
        """Sample after the last token that is no draft, and after each draft token that was right.

        Returns the tokens and the state before each."""
        expected = self.expected[submitted_name(item.key.seq_id)]
        assert item.sample_index is not None
        history = self._known(item, memory, who)
        sampled: list[int] = []
        before: list[int] = []
        for end in range(len(tokens) - item.draft_count, len(tokens) + 1):
            index = item.sample_index + len(sampled)
            token = next_token(states[end - 1], item.sampling, index, history, loops=expected.loops)
            sampled.append(token)
            before.append(states[end - 1])
            history.append(token)
            is_over = finish_after(item.sampling, token, index + 1) is not None
            if is_over or end == len(tokens) or tokens[end] != token:
                break
        return tuple(sampled), before

    def _known(self, item: StepItem, memory: DeviceMemory, who: str) -> list[int]:
        """Return the tokens before, as the executor keeps them for sequences that need them."""
        if not item.sampling.needs_history:
            expected = self.expected[submitted_name(item.key.seq_id)]
            assert item.sample_index is not None
            return expected.tokens[: len(expected.prompt) + item.sample_index]
        history = memory.histories.get(item.key)
        if history is None:
            raise Violation(2, f"{who} samples {item.key} without its history", seq_id=item.key.seq_id)
        return history

    def _report(
        self, item: StepItem, expected: Expected, found: list[int], memory: DeviceMemory, who: str
    ) -> None:
        wrong = next(
            (i for i, (a, b) in enumerate(zip(found, expected.cells, strict=False)) if a != b), len(found)
        )
        if wrong >= len(expected.cells):
            return  # The sequence runs past its expected end; the delivered tokens are compared elsewhere.
        block = item.block_ids[wrong // memory.block_tokens]
        writer = memory.writers[block]
        owner = writer.rsplit("read of ", 1)[-1].split("@")[0]
        foreign = self.expected.get(owner)
        invariant = 7 if foreign is not None and foreign.owner != expected.owner else 2
        raise Violation(
            invariant,
            f"{who} computes {item.key} from position {first_text(item)} and finds foreign KV at position "
            f"{wrong}, block {block}, last written by: {writer}",
            seq_id=item.key.seq_id,
        )


def embedding_of(state: int) -> tuple[float, ...]:
    return (float(state % 1000), float(state // 1000 % 1000), 1000.0)


def fake_logprob(token: int, state: int = 0, top: int = 0) -> TokenLogprobs:
    """Return the log probabilities of one position. Those of the `top` most likely tokens follow from the
    state before it, so that a beam search finds its own way through every prompt."""
    if not top:
        return TokenLogprobs(token, -float(token), 1)
    first = hash((state, 11)) % VOCABULARY
    step = 1 + hash((state, 13)) % (VOCABULARY - 1)
    likely = [((first + step * i) % VOCABULARY, -0.1 - 0.01 * (first % 7) - 0.3 * i) for i in range(top)]
    return TokenLogprobs(token, -float(token), 1, tuple(likely))


def _prompt_logprobs(item: StepItem, tokens: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    """Return one log probability per position after the first, as far as the prompt goes."""
    count = min(len(tokens), item.prompt_token_count - item.first_position - 1)
    following = [*tokens[1:], item.next_prompt_token]
    return tuple(fake_logprob(-1 if token is None else token) for token in following[: max(0, count)])


def first_text(item: StepItem) -> str:
    return f"{item.first_position} (+{len(item.tokens)})"


def _fold(cells: Sequence[int], start: int) -> int:
    state = start
    for cell in cells:
        state = hash((state, cell))
    return state
