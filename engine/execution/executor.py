"""Computes steps: the torch side of a worker, driven by plain values."""

import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.core.geometry import KVGeometry
from baton.core.ids import SeqKey, SequenceId
from baton.core.sampling import SamplingParams, finish_after
from baton.core.steps import (
    NOTHING_SAMPLED,
    ItemResult,
    StepItem,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from engine.compiling import CompilerProcess
from engine.devices import TORCH_DTYPES
from engine.execution.draft import DraftModel, DraftRequest
from engine.execution.graphs import make_graphs
from engine.execution.self_timing import Measured, time_steps
from engine.execution.step_batch import PromptRows, StepBatch
from engine.grammar import GrammarStore
from engine.kernels.interface import BatchLayout, Span
from engine.kv.parts import PoolPart
from engine.kv.swap import SwapSpace
from engine.loading.adapters import AdapterSlots
from engine.loading.load import LoadedModel, load_model
from engine.models.decoder import Progress
from engine.models.model import LanguageModel
from engine.parallel.group import Group
from engine.sampling.logprobs import logprobs_of
from engine.sampling.sampler import Sampler

TIMED_BYTES_MAX = 64 * 2**20
"""Largest part of the KV pool, in bytes, that a worker writes to when it times itself."""
PROMPT_LOGITS_MAX = 2**24
"""Logits of a prompt that are in memory at once, 64 MiB."""


class Executor:
    """A loaded model and its KV pool. `execute` runs on one thread only; between steps the pool's
    blocks belong to whoever holds them (scheduler, leases, transfers)."""

    def __init__(self, loaded: LoadedModel, engine: EngineConfig, *, draft: DraftModel | None = None) -> None:
        self.spec = loaded.spec
        self.model_name = loaded.name
        self.fingerprint = loaded.fingerprint
        self.notes = (*loaded.notes, *(draft.notes if draft is not None else ()))
        """Lines for `Member.notes`."""
        self.kernels = loaded.kernels
        self.kv = loaded.kv
        self.geometry: KVGeometry = loaded.kv.geometry
        self.max_model_tokens = loaded.context_tokens
        self.vocab_size: int = loaded.spec.vocab_size
        self.eos_token_ids: tuple[int, ...] = loaded.spec.eos_token_ids
        self._model: LanguageModel | None = loaded.model
        self.expert_counts = loaded.model.expert_counts
        self.swap = SwapSpace(self.kv, engine.swap_bytes)
        self.grammars = GrammarStore(
            loaded.folder,
            self.vocab_size,
            self.eos_token_ids,
            process=CompilerProcess(compile_s=engine.compile_s),
        )
        self._sampler = Sampler(
            vocab=self.vocab_size, grammars=self.grammars, eos_token_ids=self.eos_token_ids
        )
        self._draft = draft
        self._last_sampled: dict[SeqKey, int] = {}
        """Tokens that the previous step sampled, by sequence. They take the place of `PENDING_TOKEN`."""
        self.adapters = AdapterSlots(
            loaded.linears,
            loaded.division,
            slot_count=engine.adapters_max,
            rank_max=engine.adapter_rank_max,
            dtype=TORCH_DTYPES[self.geometry.dtype],
            device=loaded.kv.device,
        )
        self._graphs = make_graphs(
            loaded.model,
            loaded.kernels,
            loaded.kv,
            sequences_max=min(engine.graph_sequences_max, engine.batch_sequences_max),
        )
        self._step_tokens_max = engine.step_tokens_max
        self._batch_sequences_max = engine.batch_sequences_max

    @property
    def parts(self) -> tuple[PoolPart, ...]:
        """The KV pools of the worker, by rank."""
        whole = self.geometry
        return (PoolPart(range(whole.layer_count), range(whole.kv_head_count), self.kv),)

    @property
    def whole_geometry(self) -> KVGeometry:
        """Geometry of a block of all ranks together."""
        return self.geometry

    load_count: ClassVar[int] = 0
    """Number of times that this process has read weights."""

    @classmethod
    def load(
        cls,
        model: ModelConfig,
        engine: EngineConfig,
        *,
        group: Group | None = None,
        progress: Progress | None = None,
    ) -> "Executor":
        """group: the tensor ranks that execute the same plans as this one. Raises SetupError, see
        `load_model` and `DraftModel.load`."""
        if engine.threads:
            torch.set_num_threads(engine.threads)
        Executor.load_count += 1
        loaded = load_model(model, engine, group=group, progress=progress)
        draft = DraftModel.load(model, engine, loaded) if engine.speculation == "draft" else None
        return cls(loaded, engine, draft=draft)

    def execute(self, plan: StepPlan) -> StepResult:
        """Any mixture of prompt chunks, decodes and decodes with draft tokens, each sequence at most once.
        Returns when the KV is written and the tokens are sampled."""
        assert self._model is not None, "execute after close"
        started_s = time.perf_counter()
        self._sampler.end(plan.ended)
        self._move_blocks(plan)
        results = self._run(self._model, plan.items) if plan.items else ()
        if self._draft is not None:
            results = _with_drafts(self._draft, plan, results)
        self._last_sampled = {
            item.key: result.tokens[-1]
            for item, result in zip(plan.items, results, strict=True)
            if result.tokens
        }
        return StepResult(plan.step_number, results, time.perf_counter() - started_s)

    def _move_blocks(self, plan: StepPlan) -> None:
        if plan.swap_out:
            self.swap.out(plan.swap_out)
        if plan.swap_in:
            self.swap.back(plan.swap_in)
        if plan.copies:
            self.kernels.copy_blocks(plan.copies)

    @torch.inference_mode()
    def _run(self, model: LanguageModel, items: tuple[StepItem, ...]) -> tuple[ItemResult, ...]:
        for item in items:
            self._clear_partial_block(item)
        batch = StepBatch.of(items, [self._span(item) for item in items], self._last_sampled.__getitem__)
        device = self.kv.device
        tokens = torch.tensor(batch.tokens, dtype=torch.int64)
        rows = torch.tensor(batch.rows, dtype=torch.int64, device=device)
        replayed = self._graphs.run(tokens, batch.layout) if self._graphs is not None else None
        hidden = model.forward(tokens.to(device), batch.layout, rows) if replayed is None else replayed[rows]
        if not batch.rows and device.type == "cuda":
            torch.cuda.synchronize(device)
        return self._results(model, len(items), batch, hidden)

    def _results(
        self, model: LanguageModel, item_count: int, batch: StepBatch, hidden: Tensor
    ) -> tuple[ItemResult, ...]:
        results = [NOTHING_SAMPLED] * item_count
        sampled_end = batch.sampled_row_count
        embedded_end = sampled_end + len(batch.embedding_items)
        if batch.sampling:
            rows = hidden if sampled_end == len(hidden) else hidden[:sampled_end]
            sampled = self._sampler.sample(model.logits(rows), [request for _, request in batch.sampling])
            for (item, _), one in zip(batch.sampling, sampled, strict=True):
                results[item] = ItemResult(one.tokens, one.logprobs)
        if batch.embedding_items:
            vectors = hidden[sampled_end:embedded_end].float().tolist()
            for item, vector in zip(batch.embedding_items, vectors, strict=True):
                results[item] = ItemResult(embedding=tuple(vector))
        start = embedded_end
        for prompt in batch.prompts:
            end = start + len(prompt.tokens)
            logprobs = self._prompt_logprobs(model, hidden[start:end], prompt)
            results[prompt.item] = msgspec.structs.replace(results[prompt.item], prompt_logprobs=logprobs)
            start = end
        return tuple(results)

    def _prompt_logprobs(
        self, model: LanguageModel, hidden: Tensor, prompt: PromptRows
    ) -> tuple[TokenLogprobs, ...]:
        """Logprobs of the prompt's tokens. They are computed in pieces, since a prompt's logits are many
        times larger than its hidden states."""
        piece = max(1, PROMPT_LOGITS_MAX // self.vocab_size)
        found: list[TokenLogprobs] = []
        for start in range(0, len(prompt.tokens), piece):
            tokens = prompt.tokens[start : start + piece]
            logits = model.logits(hidden[start : start + piece])
            found += logprobs_of(logits, tokens, [prompt.top_count] * len(tokens))
        return tuple(found)

    def _span(self, item: StepItem) -> Span:
        end = item.first_position + len(item.tokens)
        needed = self.geometry.blocks_for(end)
        assert item.tokens, item.key
        assert len(item.block_ids) >= needed, item.key
        slot = self.adapters.slot(item.adapter)
        return Span(item.first_position, len(item.tokens), item.block_ids[:needed], slot)

    def _clear_partial_block(self, item: StepItem) -> None:
        """See `KVPool.clear`. Only when this step is the first to write to it."""
        end = item.first_position + len(item.tokens)
        last, filled = divmod(end, self.geometry.block_tokens)
        if filled and last * self.geometry.block_tokens >= item.first_position:
            self.kv.clear(item.block_ids[last])

    @torch.inference_mode()
    def logits_of(self, tokens: Sequence[int], *, chunk_tokens: int) -> Iterator[Tensor]:
        """Logits after each token of one text, for measurements: float32 [n, vocab] per chunk. They are
        computed as a prompt is, in chunks and through the KV pool, which nothing else may be using.

        Raises SetupError if the pool does not hold the text.
        """
        assert self._model is not None, "logits_of after close"
        needed = self.geometry.blocks_for(len(tokens))
        if needed > self.kv.block_count:
            raise SetupError(
                f"{len(tokens)} tokens need {needed} blocks of KV, there are {self.kv.block_count}"
            )
        blocks = tuple(range(needed))
        for block in blocks:
            self.kv.clear(block)
        for start in range(0, len(tokens), chunk_tokens):
            chunk = list(tokens[start : start + chunk_tokens])
            end = start + len(chunk)
            layout = BatchLayout.of([Span(start, len(chunk), blocks[: self.geometry.blocks_for(end)])])
            ids = torch.tensor(chunk, dtype=torch.int64, device=self.kv.device)
            hidden = self._model.forward(ids, layout, torch.arange(len(chunk), device=self.kv.device))
            yield self._model.logits(hidden)

    def warm_up(self) -> None:
        """Compute a full prompt chunk and a batch of decodes, so that the first request does not pay
        for reading weights and first-time set-up. Call before any block holds anything."""
        block_count = self.kv.block_count
        chunk = min(self._step_tokens_max, self.max_model_tokens - 1)
        decodes = min(self._batch_sequences_max, block_count)
        greedy = SamplingParams(max_tokens=1)

        def item(number: int, tokens: tuple[int, ...], blocks: tuple[int, ...]) -> StepItem:
            key = SeqKey(SequenceId(f"warm-up/{number}"), 0)
            return StepItem(key, tokens, 0, blocks, 0, greedy)

        self.execute(StepPlan((item(0, (0,) * max(1, chunk), tuple(range(block_count))),), 0))
        self.execute(StepPlan(tuple(item(n, (0,), (n,)) for n in range(decodes)), 1))
        self._forget_experts()

    def time_itself(self, budget_s: float) -> Measured:
        """Measure the costs of steps of several shapes, see `time_steps`. Call it before any block holds
        anything."""
        block_bytes = self.geometry.block_bytes
        blocks = min(self.kv.block_count, max(1, TIMED_BYTES_MAX // block_bytes))
        for block in range(blocks):
            self.kv.clear(block)  # memory that was never written is faster than any that is used
        measured = time_steps(
            self.execute,
            block_tokens=self.geometry.block_tokens,
            block_count=blocks,
            step_tokens_max=self._step_tokens_max,
            batch_sequences_max=self._batch_sequences_max,
            positions_max=self.max_model_tokens - 1,
            vocab=self.vocab_size,
            budget_s=budget_s,
        )
        self._forget_experts()
        return measured

    def _forget_experts(self) -> None:
        if self.expert_counts is not None:
            self.expert_counts.reset()

    def close(self) -> None:
        """Drop weights. The pool's memory lives as long as somebody refers to it. Idempotent."""
        self._model = self._draft = None


def _with_drafts(
    draft: DraftModel, plan: StepPlan, results: tuple[ItemResult, ...]
) -> tuple[ItemResult, ...]:
    draft.end(plan.ended)
    requests: list[DraftRequest] = []
    for item, result in zip(plan.items, results, strict=True):
        if not result.tokens:
            continue
        if item.history is not None:
            draft.begin(item.key, item.history)
        draft.follow(item.key, result.tokens)
        count = (item.sample_index or 0) + len(result.tokens)
        if item.want_drafts and finish_after(item.sampling, result.tokens[-1], count) is None:
            requests.append(DraftRequest(item.key, item.want_drafts))
    drafts = draft.draft(requests)
    return tuple(
        msgspec.structs.replace(result, drafts=drafts[item.key]) if item.key in drafts else result
        for item, result in zip(plan.items, results, strict=True)
    )
