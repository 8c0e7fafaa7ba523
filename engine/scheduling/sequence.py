"""One sequence attempt as the scheduler knows it, and what a step made of it."""

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from baton.core.hashing import chain
from baton.core.ids import BlockHash, BlockId, SeqKey
from baton.core.messages import Phase, Task
from baton.core.sampling import FinishReason, SamplingParams, finish_after
from baton.core.steps import TokenLogprobs
from engine.scheduling.incoming import Incoming


class Drafter(Protocol):
    """Proposes draft tokens for a sequence."""

    @property
    def hit_rate(self) -> float:
        """Measured share of drafts like the present one that were right; 0 if there is no draft."""
        ...

    def observe(self, tokens: list[int]) -> None:
        """All tokens known; those that are new are learnt from."""
        ...

    def offer(self, drafts: tuple[int, ...]) -> None:
        """Draft tokens of a draft model, to follow the tokens observed."""
        ...

    def draft(self, count: int) -> tuple[int, ...]:
        """Draft tokens to follow those observed, at most `count`."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt while the scheduler has it. The scheduler alone writes to it."""

    key: SeqKey
    phase: Phase
    tokens: list[int]
    """Prompt and all generated tokens known so far."""
    prompt_token_count: int
    sampling: SamplingParams
    cache_root: BlockHash
    block_tokens: int
    tokens_max: int = 1 << 31
    """Prompt plus generated ones; the sequence ends with LENGTH where they are reached."""
    task: Task = Task.GENERATE
    adapter: str = ""
    wants_prompt_logprobs: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    """Logprobs of prompt tokens 1, 2, … as far as computed."""
    finish: FinishReason | None = None
    """Set with the last token."""
    hashes: list[BlockHash] = field(default_factory=list[BlockHash])
    """Hashes of the first full blocks of `tokens`, as far as they were needed."""
    block_ids: list[BlockId] = field(default_factory=list[BlockId])
    """Block table; one share of each is the sequence's."""
    computed_count: int = 0
    """Positions in the KV pool (or, of a swapped one, in its slots)."""
    planned_count: int = 0
    """The same, when the steps under way are done. Draft tokens do not count."""
    sampling_count: int = 0
    """Tokens that the steps under way will sample, those after draft tokens left out."""
    steps_open: int = 0
    """Steps under way that it is in."""
    is_drafting: bool = False
    """True while a step under way verifies draft tokens, so that how far it gets is not known."""
    committed_count: int = 0
    """Blocks, from the front, that are full and known to the prefix cache."""
    cached_token_count: int | None = None
    """Prompt tokens found in the cache when first admitted, here or by the prefill worker."""
    promised: list[BlockHash] = field(default_factory=list[BlockHash])
    """Contents that others may wait for it to compute."""
    tail: BlockHash | None = None
    """Hash of the part-filled block that ends before the last token known at admission, until it is
    computed."""
    tail_end: int = 0
    swap_slots: list[int] = field(default_factory=list[int])
    """Preempted: where its first blocks' content is."""
    incoming: Incoming | None = None
    """Blocks that are brought from elsewhere, or may be."""
    was_preempted: bool = False
    priority: int = 0
    fairness_key: str = ""
    tpot_slo_s: float = 0.0
    arrived_s: float = 0.0
    order: int = 0
    """Rises with arrival at the scheduler."""
    last_step: int = 0
    generated_here: bool = False
    has_history: bool = False
    """The executor keeps track of its tokens."""
    drafter: Drafter | None = None
    is_dropped: bool = False
    """Removed while a step with it was under way: its blocks come back when that is done."""

    @property
    def pending_count(self) -> int:
        """Tokens, known or being sampled, that no step computes yet."""
        return len(self.tokens) + self.sampling_count - self.planned_count

    @property
    def runnable_count(self) -> int:
        """Number of pending tokens that may be computed before the awaited blocks have come."""
        if self.incoming is None or not self.incoming.is_awaited:
            return self.pending_count
        return min(self.pending_count, self.incoming.first * self.block_tokens - self.planned_count)

    @property
    def is_runnable(self) -> bool:
        """True if another step may be planned for the sequence before those under way are done."""
        if self.is_drafting or self.runnable_count <= 0:
            return False
        if not self.sampling_count:
            return True
        if self.phase is Phase.PREFILL:
            return False
        will_have = self.generated_count + self.sampling_count
        return will_have < self.sampling.max_tokens and self.prompt_token_count + will_have < self.tokens_max

    @property
    def is_decoding(self) -> bool:
        return self.pending_count == 1 and self.is_runnable

    @property
    def generated_count(self) -> int:
        return len(self.tokens) - self.prompt_token_count

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Each prompt position must still be computed: none may come from the cache."""
        return self.wants_prompt_logprobs and len(self.prompt_logprobs) < self.prompt_token_count - 1

    def hashes_of(self, block_count: int) -> list[BlockHash]:
        """Hashes of the first `block_count` blocks, which must be full."""
        have = len(self.hashes)
        if have < block_count:
            fresh = self.tokens[have * self.block_tokens : block_count * self.block_tokens]
            self.hashes.extend(chain(self.hashes[-1] if have else self.cache_root, fresh, self.block_tokens))
        return self.hashes[:block_count]

    def take_prompt_logprobs(self, found: tuple[TokenLogprobs, ...]) -> None:
        """Those of the next prompt tokens. When all are here the executor is not asked again, also not
        by a prompt that is computed a second time."""
        self.prompt_logprobs += found
        if self.wants_prompt_logprobs and not self.lacks_prompt_logprobs:
            self.sampling = msgspec.structs.replace(self.sampling, prompt_logprobs=None)

    def extend(self, sampled: tuple[int, ...]) -> tuple[int, ...]:
        """Appends what was sampled, up to the token that ends the sequence; returns what was appended."""
        for count, token in enumerate(sampled, 1):
            self.tokens.append(token)
            self.finish = finish_after(self.sampling, token, self.generated_count)
            if self.finish is None and len(self.tokens) >= self.tokens_max:
                self.finish = FinishReason.LENGTH
            if self.finish is not None:
                return sampled[:count]
        return sampled


@dataclass(frozen=True, slots=True)
class Progress:
    """One sequence after a step. `tokens` were sampled, and are appended to its tokens already."""

    sequence: Sequence
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, if asked for."""
    embedding: tuple[float, ...] = ()
