"""Continuous batching: which tokens of which sequences the next engine step computes.

A sequence is a list of known tokens of which the first `computed_count` are in the KV pool. Every
step moves some sequences forward; when all known tokens are computed the next one is sampled. Prompt
chunks and decodes are therefore the same thing (vLLM v1), and preemption by recompute is setting
`computed_count` back to 0: tokens that were sampled stay known and are never sampled again.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator

from baton.core.geometry import blocks_for
from baton.core.ids import SeqKey
from baton.core.messages import Leg, Task
from baton.core.steps import ItemResult, StepItem, StepPlan, StepResult
from baton.engine.block_pool import OutOfBlocks
from baton.engine.prefix_cache import PrefixCache
from baton.engine.scheduling.sequence import Progress, Sequence

WATERMARK_SHARE = 100
"""While others run, 1/100 of the pool stays free at admission, so that they can grow a little before
somebody must be preempted."""


class Scheduler:
    """Sequences wait in order of age for a seat (`batch_sequences_max`) and for blocks.

    Admission needs blocks for all that is known of the sequence and the position of its next token,
    so a prompt once begun never waits for blocks; only generation grows, one block at a time. When
    none is free the youngest sequence that generates here is preempted. PREFILL legs are not: they
    do not grow, and a reader may be reading their blocks.
    """

    def __init__(
        self, cache: PrefixCache, *, block_tokens: int, step_tokens_max: int, batch_sequences_max: int
    ) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._block_tokens = block_tokens
        self._step_tokens_max = step_tokens_max
        self._batch_sequences_max = batch_sequences_max
        self._waiting: list[Sequence] = []
        self._joined: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._plan: StepPlan | None = None
        self._in_step: list[Sequence] = []
        self._arrivals = 0
        self._step_number = 0
        self._ended: list[SeqKey] = []
        """Computed here, over, and not told to the executor yet."""
        self._is_head_blocked = False
        self.preemption_count = 0
        """Since the start."""

    # --- what others may know -------------------------------------------------------------------

    @property
    def is_stepping(self) -> bool:
        return self._plan is not None

    @property
    def running_count(self) -> int:
        return len(self._running) + len(self._joined)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        return not (self._waiting or self._joined or self._running or self._in_step)

    @property
    def keep_free(self) -> int:
        """Blocks that must stay free when others reserve: all of them while the head of the waiting
        queue lacks blocks, else it would starve behind smaller arrivals; the watermark while any run."""
        if self._is_head_blocked and self._waiting:
            return self._pool.block_count
        return self._watermark()

    def waiting_token_count(self) -> int:
        """Tokens accepted whose KV is not computed yet, those being generated left out."""
        waiting = sum(seq.pending_count for seq in self._waiting)
        return waiting + sum(seq.pending_count for seq in self._running if seq.pending_count > 1)

    def sequences(self) -> Iterator[Sequence]:
        """All that hold blocks or wait for them, dropped ones of the running step included."""
        yield from self._waiting
        yield from self._joined
        yield from self._running
        yield from (seq for seq in self._in_step if seq.is_dropped)

    # --- coming and going -----------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Holds nothing yet; waits for a seat and for blocks."""
        assert not seq.block_ids
        self._number(seq)
        self._waiting.append(seq)

    def join(self, seq: Sequence) -> None:
        """All but its newest token is computed, in blocks that become the scheduler's to free."""
        assert seq.pending_count == 1
        assert len(seq.block_ids) * self._block_tokens >= len(seq.tokens)
        self._number(seq)
        self._joined.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Ended or cancelled: its blocks come back now, or when the running step is done with them."""
        for queue in (self._waiting, self._joined, self._running):
            if seq in queue:
                queue.remove(seq)
        if seq.last_step:
            self._ended.append(seq.key)
        if seq in self._in_step:
            seq.is_dropped = True
        else:
            self._release(seq)

    # --- steps ----------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run now. Not while a step is running."""
        assert self._plan is None, "one step at a time"
        self._is_head_blocked = False
        self._seat_joined()
        decodes, someone_preempted = self._with_room(self._pick_decodes())
        work = [(seq, 1) for seq in decodes]
        budget = self._step_tokens_max - len(work)
        for seq in sorted(self._running, key=_by_age):
            if seq.pending_count > 1 and budget > 0:
                work.append((seq, min(budget, seq.pending_count)))
                budget -= work[-1][1]
        if not someone_preempted or not work:  # what was just preempted must not come straight back
            self._admit(work, budget)
        return self._begin(work) if work else None

    def finish_step(self, result: StepResult) -> list[Progress]:
        """Seals what became full. Cancelled sequences give their blocks back and are not reported."""
        plan, sequences = self._plan, self._in_step
        assert plan is not None
        assert plan.step_number == result.step_number, "answer to another step"
        self._plan, self._in_step = None, []
        progress: list[Progress] = []
        for seq, item, sampled in zip(sequences, plan.items, result.results, strict=True):
            self._computed(seq, item, sampled)
            if seq.is_dropped:
                self._release(seq)
                continue
            seq.take_prompt_logprobs(sampled.prompt_logprobs)
            tokens = seq.extend(sampled.tokens)
            progress.append(Progress(seq, tokens, sampled.logprobs[: len(tokens)], sampled.embedding))
        return progress

    def _computed(self, seq: Sequence, item: StepItem, sampled: ItemResult) -> None:
        assert bool(sampled.tokens) == (item.sample_index is not None)
        assert len(sampled.tokens) <= 1 + item.draft_count
        seq.computed_count += len(item.tokens) - item.draft_count + max(0, len(sampled.tokens) - 1)
        self._seal(seq)

    def check(self) -> None:
        assert len(self._running) <= self._batch_sequences_max
        assert (self._plan is None) == (not self._in_step)
        for seq in self._waiting:
            assert not seq.block_ids
            assert seq.computed_count == 0
        for seq in (*self._joined, *self._running):
            assert seq.pending_count >= 1
            assert len(seq.block_ids) >= blocks_for(seq.computed_count, self._block_tokens)
        orders = [seq.order for seq in self._waiting]
        assert orders == sorted(orders)

    # --- parts of a plan --------------------------------------------------------------------------

    def _seat_joined(self) -> None:
        """Sequences that hold all their KV take free seats, unless an older one waits and can run."""
        while self._joined and len(self._running) < self._batch_sequences_max:
            older_waits = bool(self._waiting) and self._waiting[0].order < self._joined[0].order
            if older_waits and self._admit_head():
                continue
            self._running.append(self._joined.popleft())

    def _pick_decodes(self) -> list[Sequence]:
        """One token each, those that waited longest first, so a budget smaller than the batch goes
        round. One token of the budget is left to prompts, so that decodes cannot starve them."""
        decodes = [seq for seq in self._running if seq.pending_count == 1]
        has_chunks = len(decodes) < len(self._running)
        wants_admission = bool(self._waiting) and self._step_tokens_max > 1
        budget = self._step_tokens_max - (1 if has_chunks or wants_admission else 0)
        decodes.sort(key=lambda seq: (seq.last_step, seq.order))
        return decodes[:budget]

    def _with_room(self, decodes: list[Sequence]) -> tuple[list[Sequence], bool]:
        """Gives each a block where it needs one, oldest first. Victims are always younger than, or
        the same as, the sequence in need, so those served before keep what they got."""
        served: list[Sequence] = []
        preempted: set[SeqKey] = set()
        for seq in sorted(decodes, key=_by_age):
            while seq.key not in preempted and seq.computed_count == len(seq.block_ids) * self._block_tokens:
                try:
                    seq.block_ids += self._pool.take(1)
                except OutOfBlocks:
                    preempted.add(self._preempt_youngest().key)
            if seq.key not in preempted:
                served.append(seq)
        return served, bool(preempted)

    def _preempt_youngest(self) -> Sequence:
        victim = max(
            (seq for seq in (*self._running, *self._joined) if seq.leg is not Leg.PREFILL), key=_by_age
        )
        (self._running if victim in self._running else self._joined).remove(victim)
        self._release(victim)
        self._ended.append(victim.key)
        victim.has_history = False
        if victim.lacks_prompt_logprobs:
            victim.prompt_logprobs.clear()
        insort(self._waiting, victim, key=_by_age)
        self._is_head_blocked = True
        self.preemption_count += 1
        return victim

    def _admit(self, work: list[tuple[Sequence, int]], budget: int) -> None:
        while budget > 0 and self._waiting and len(self._running) < self._batch_sequences_max:
            seq = self._waiting[0]
            if not self._admit_head():
                return
            work.append((seq, min(budget, seq.pending_count)))
            budget -= work[-1][1]

    def _admit_head(self) -> bool:
        """At least the last token is computed, however much is cached: sampling needs its logits."""
        seq = self._waiting[0]
        cacheable_count = 0 if seq.lacks_prompt_logprobs else (len(seq.tokens) - 1) // self._block_tokens
        hashes = seq.hashes_of(cacheable_count)
        grows = seq.leg is not Leg.PREFILL and seq.task is Task.GENERATE
        position_count = len(seq.tokens) + (1 if grows else 0)
        need_count = blocks_for(position_count, self._block_tokens)
        try:
            got = self._cache.reserve(hashes, need_count, keep_free=self._watermark())
        except OutOfBlocks:
            self._is_head_blocked = True
            return False
        del self._waiting[0]
        seq.block_ids = got.blocks
        seq.sealed_count = got.cached_count
        seq.computed_count = got.cached_count * self._block_tokens
        if seq.cached_token_count is None:
            seq.cached_token_count = min(seq.computed_count, seq.prompt_token_count)
        self._running.append(seq)
        return True

    def _begin(self, work: list[tuple[Sequence, int]]) -> StepPlan:
        """A key is never both in a plan's items and in its `ended`: what ended while the step before
        this one ran, or was preempted for this one, is no longer among the running."""
        self._step_number += 1
        for seq, _ in work:
            seq.last_step = self._step_number
        self._in_step = [seq for seq, _ in work]
        ended, self._ended = tuple(self._ended), []
        items = tuple(_item(seq, count) for seq, count in work)
        self._plan = StepPlan(items, self._step_number, ended=ended)
        return self._plan

    # --- blocks ---------------------------------------------------------------------------------

    def _seal(self, seq: Sequence) -> None:
        full_count = seq.computed_count // self._block_tokens
        if full_count == seq.sealed_count:
            return
        hashes = seq.hashes_of(full_count)
        for i in range(seq.sealed_count, full_count):
            self._cache.insert(hashes[i], seq.block_ids[i])
        seq.sealed_count = full_count

    def _release(self, seq: Sequence) -> None:
        self._pool.give_back(seq.block_ids)
        seq.block_ids = []
        seq.computed_count = seq.sealed_count = 0

    def _watermark(self) -> int:
        if not self._running and not self._joined:
            return 0
        return max(1, self._pool.block_count // WATERMARK_SHARE)

    def _number(self, seq: Sequence) -> None:
        self._arrivals += 1
        seq.order = self._arrivals


def _by_age(seq: Sequence) -> int:
    return seq.order


def _item(seq: Sequence, count: int) -> StepItem:
    end = seq.computed_count + count
    is_last = end == len(seq.tokens)
    samples = is_last and seq.task is Task.GENERATE
    follows = end < seq.prompt_token_count and seq.lacks_prompt_logprobs
    history = None
    if samples and seq.sampling.needs_history and not seq.has_history:
        history, seq.has_history = tuple(seq.tokens), True
    return StepItem(
        key=seq.key,
        tokens=tuple(seq.tokens[seq.computed_count : end]),
        first_position=seq.computed_count,
        block_ids=tuple(seq.block_ids[: blocks_for(end, seq.block_tokens)]),
        sample_index=seq.generated_count if samples else None,
        sampling=seq.sampling,
        prompt_token_count=seq.prompt_token_count,
        history=history,
        next_prompt_token=seq.tokens[end] if follows else None,
        adapter=seq.adapter,
        wants_embedding=is_last and seq.task is Task.EMBED,
    )
