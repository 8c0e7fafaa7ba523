"""Steps written out by hand for what requests ask: draft tokens, logprobs, histories, grammars."""

from dataclasses import dataclass, field
from itertools import count

from baton.core.ids import SeqKey
from baton.core.sampling import SamplingParams, finish_after
from baton.core.steps import StepItem, StepPlan

_numbers = count()


@dataclass
class Asked:
    """`draft`: the tokens so far -> draft tokens that follow."""

    prompt: list[int]
    params: SamplingParams
    draft: object = None
    generated: list[int] = field(default_factory=list)
    chunk: int = 10**9
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    want_drafts: int = 0
    drafts: tuple = ()
    key: SeqKey = field(default_factory=lambda: SeqKey(f"asked-{next(_numbers)}", 0))
    has_history: bool = False
    steps: int = 0

    @property
    def tokens(self):
        return [*self.prompt, *self.generated]

    @property
    def is_over(self):
        done = len(self.generated)
        return bool(done) and finish_after(self.params, self.generated[-1], done) is not None


class Loop:
    def __init__(self, executor):
        self.executor = executor
        self.free = list(range(executor.kv.block_count))
        self.steps = count()

    def finish(self, *asked):
        """Together, to the end; returns the tokens of each."""
        while going := [one for one in asked if not one.is_over]:
            self.step(*going)
        self.end(*asked)
        return [one.generated for one in asked]

    def end(self, *asked):
        for one in asked:
            self.free.extend(one.blocks)
            one.blocks = []
        self.executor.execute(StepPlan((), next(self.steps), ended=tuple(one.key for one in asked)))

    def step(self, *asked):
        items = tuple(map(self._item, asked))
        result = self.executor.execute(StepPlan(items, next(self.steps)))
        for one, item, sampled in zip(asked, items, result.results, strict=True):
            assert bool(sampled.tokens) == (item.sample_index is not None)
            one.steps += 1
            one.computed += len(item.tokens) - item.draft_count + max(0, len(sampled.tokens) - 1)
            one.generated.extend(sampled.tokens)
            one.logprobs.extend(sampled.logprobs)
            one.prompt_logprobs.extend(sampled.prompt_logprobs)
            one.drafts = sampled.drafts

    def _item(self, one):
        tokens = one.tokens
        end = min(len(tokens), one.computed + one.chunk)
        samples = end == len(tokens)
        drafts = ()
        if samples and one.draft is not None:
            drafts = tuple(one.draft(tokens))[: one.params.max_tokens - len(one.generated) - 1]
        size = self.executor.geometry.block_tokens
        while len(one.blocks) * size < end + len(drafts):
            one.blocks.append(self.free.pop())
        history = None
        if samples and not one.has_history:
            history, one.has_history = tuple(tokens), True
        return StepItem(
            key=one.key,
            tokens=(*tokens[one.computed : end], *drafts),
            first_position=one.computed,
            block_ids=tuple(one.blocks),
            sample_index=len(one.generated) if samples else None,
            sampling=one.params,
            draft_count=len(drafts),
            prompt_token_count=len(one.prompt),
            history=history,
            want_drafts=one.want_drafts if samples else 0,
            next_prompt_token=one.prompt[end] if end < len(one.prompt) else None,
        )
