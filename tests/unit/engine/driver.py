"""A dull engine loop for tests: blocks come from a list, steps are written out by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.config import EngineConfig, ModelConfig
from baton.core.ids import SeqKey, SequenceId
from baton.core.sampling import SamplingParams
from baton.core.steps import StepItem, StepPlan
from engine.execution.executor import Executor
from engine.loading.load import load_model

GREEDY = SamplingParams(max_tokens=64)


def load(
    path: Path, *, kv_bytes: int = 16 * 2**20, block_tokens: int = 16, kernels="auto", group=None, **model
) -> Executor:
    """group: this rank computes as all others do, and samples itself."""
    engine = EngineConfig(kv_bytes=kv_bytes, block_tokens=block_tokens, threads=1, kernels=kernels)
    config = ModelConfig(path=str(path), **model)
    if group is None:
        return Executor.load(config, engine)
    return Executor(load_model(config, engine, group=group), engine)


@dataclass
class Running:
    prompt: list[int]
    params: SamplingParams = GREEDY
    computed: int = 0
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    adapter: str = ""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def is_prefilled(self) -> bool:
        return self.computed >= len(self.prompt)


class Driver:
    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.free = list(range(executor.kv.block_count))
        self.step_count = 0

    def start(
        self, prompt: Sequence[int], params: SamplingParams = GREEDY, *, like=None, adapter=""
    ) -> Running:
        """`like`: a sequence whose full blocks are shared as far as the prompts agree."""
        sequence = Running(list(prompt), params, adapter=adapter)
        if like is not None:
            size = self.executor.geometry.block_tokens
            while (
                sequence.computed + size < len(prompt)
                and sequence.computed + size <= like.computed
                and like.tokens[: sequence.computed + size] == sequence.prompt[: sequence.computed + size]
            ):
                sequence.blocks.append(like.blocks[len(sequence.blocks)])
                sequence.computed += size
        return sequence

    def step(self, *work: tuple[Running, int]) -> None:
        """Compute the next so many tokens of each sequence."""
        items = tuple(self._item(number, sequence, count) for number, (sequence, count) in enumerate(work))
        result = self.executor.execute(StepPlan(items, self.step_count))
        assert result.step_number == self.step_count
        self.step_count += 1
        for (sequence, _), item, sampled in zip(work, items, result.results, strict=True):
            sequence.computed += len(item.tokens)
            assert bool(sampled.tokens) == (item.sample_index is not None)
            sequence.generated.extend(sampled.tokens)

    def _item(self, number: int, sequence: Running, count: int) -> StepItem:
        end = min(sequence.computed + count, len(sequence.tokens))
        while len(sequence.blocks) * self.executor.geometry.block_tokens < end:
            sequence.blocks.append(self.free.pop(0))
        samples = end == len(sequence.tokens)
        return StepItem(
            key=SeqKey(SequenceId(f"s{number}"), 0),
            tokens=tuple(sequence.tokens[sequence.computed : end]),
            first_position=sequence.computed,
            block_ids=tuple(sequence.blocks),
            sample_index=len(sequence.generated) if samples else None,
            sampling=sequence.params,
            adapter=sequence.adapter,
        )

    def finish(self, *sequences: Running, chunk: int = 10**9) -> None:
        """Run all of them, together, to their last token."""
        while True:
            going = [s for s in sequences if len(s.generated) < s.params.max_tokens]
            if not going:
                return
            self.step(*((s, 1 if s.is_prefilled else chunk) for s in going))

    def generate(self, prompt: Sequence[int], params: SamplingParams = GREEDY, *, chunk=10**9) -> list[int]:
        sequence = self.start(prompt, params)
        self.finish(sequence, chunk=chunk)
        self.free.extend(sequence.blocks)
        return sequence.generated
