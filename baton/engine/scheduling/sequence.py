"""One sequence attempt as the scheduler knows it, and what a step made of it."""

from dataclasses import dataclass, field

import msgspec

from baton.core.hashing import chain
from baton.core.ids import BlockHash, BlockId, SeqKey
from baton.core.messages import Leg, Task
from baton.core.sampling import FinishReason, SamplingParams, finish_after
from baton.core.steps import TokenLogprobs


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt while the scheduler has it. The scheduler alone writes to it."""

    key: SeqKey
    leg: Leg
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
    """Of prompt tokens 1, 2, … as far as computed."""
    finish: FinishReason | None = None
    """Set with the last token."""
    hashes: list[BlockHash] = field(default_factory=list[BlockHash])
    """Of the first full blocks of `tokens`, as far as anybody needed them."""
    block_ids: list[BlockId] = field(default_factory=list[BlockId])
    """Block table; one share of each is the sequence's."""
    computed_count: int = 0
    sealed_count: int = 0
    """Blocks, from the front, that are full and known to the prefix cache."""
    cached_token_count: int | None = None
    """Prompt tokens found in the cache when first admitted."""
    order: int = 0
    """Rises with arrival at the scheduler: seats, admission and preemption go by age."""
    last_step: int = 0
    has_history: bool = False
    """The executor keeps track of its tokens."""
    is_dropped: bool = False
    """Removed while a step with it was running: its blocks come back when the step is done."""

    @property
    def pending_count(self) -> int:
        """Known tokens that are not computed yet."""
        return len(self.tokens) - self.computed_count

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
