"""Computes steps: the torch side of a worker, driven by plain values."""

import hashlib
import time
from pathlib import Path

import msgspec
import torch

from baton.config import EngineConfig, ModelConfig
from baton.core.geometry import KVGeometry, fingerprint
from baton.core.ids import SeqKey, SequenceId
from baton.core.messages import WIRE_VERSION
from baton.core.sampling import SamplingParams
from baton.core.steps import NOTHING_SAMPLED, ItemResult, StepItem, StepPlan, StepResult
from baton.engine.devices import TORCH_DTYPES, torch_device
from baton.engine.kernels.interface import BatchLayout, Span
from baton.engine.kernels.torch_ref import TorchKernels, TorchPlan
from baton.engine.kv_pool import KVPool
from baton.engine.models.dense import DenseModel, Progress, load_weights
from baton.engine.models.rope import frequencies
from baton.engine.models.spec import ModelSpec, load_spec
from baton.engine.sampler import Draw, sample
from baton.engine.sizes import context_tokens, kv_geometry
from baton.engine.weights import Checkpoint, resolve_model


class Executor:
    """A loaded model and its KV pool. `execute` runs on one thread only; between steps the pool's
    blocks belong to whoever holds them (scheduler, leases, transfers)."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        model_name: str,
        fingerprint: str,
        max_model_tokens: int,
        kv: KVPool,
        model: DenseModel[TorchPlan],
        step_tokens_max: int,
        batch_sequences_max: int,
    ) -> None:
        """Use `load`."""
        self.spec = spec
        self.model_name = model_name
        self.fingerprint = fingerprint
        self.kv = kv
        self.geometry: KVGeometry = kv.geometry
        self.max_model_tokens = max_model_tokens
        """Prompt plus generated tokens of one sequence: the context, or the whole pool if smaller."""
        self.vocab_size: int = spec.vocab_size
        self.eos_token_ids: tuple[int, ...] = spec.eos_token_ids
        self._model: DenseModel[TorchPlan] | None = model
        self._step_tokens_max, self._batch_sequences_max = step_tokens_max, batch_sequences_max

    @classmethod
    def load(
        cls, model: ModelConfig, engine: EngineConfig, *, progress: Progress | None = None
    ) -> "Executor":
        """Read the model and allocate the KV pool. `progress(layers loaded, layers in all)`.

        Raises SetupError: no such model, an unsupported or damaged one, no such device, too little memory.
        """
        if engine.threads:
            torch.set_num_threads(engine.threads)
        device = torch_device(model.device)
        folder = resolve_model(model.path, model.revision)
        spec = load_spec(folder)
        tokens = context_tokens(spec, model)
        geometry = kv_geometry(spec, model, engine)
        checkpoint = Checkpoint(folder)
        weights = load_weights(
            spec, checkpoint, dtype=TORCH_DTYPES[geometry.dtype], device=device, progress=progress
        )
        kv = KVPool(geometry, kv_bytes=engine.kv_bytes, device=device)
        rope = frequencies(spec.rope, spec.head_dim, context_tokens=tokens, device=device)
        name = model.name or _default_name(model.path, folder)
        return cls(
            spec=spec,
            model_name=name,
            fingerprint=fingerprint(
                model=name,
                weights_digest=_model_digest(spec, checkpoint, tokens),
                geometry=geometry,
                wire_version=WIRE_VERSION,
            ),
            max_model_tokens=min(tokens, kv.block_count * geometry.block_tokens),
            kv=kv,
            model=DenseModel(spec, weights, TorchKernels(kv), rope),
            step_tokens_max=engine.step_tokens_max,
            batch_sequences_max=engine.batch_sequences_max,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Any mixture of prompt chunks and decodes, each sequence at most once. Returns when the KV is
        written and the tokens are sampled."""
        assert self._model is not None, "execute after close"
        started_s = time.perf_counter()
        if not plan.items:
            return StepResult(plan.step_number, (), 0.0)
        sampled = self._run(self._model, plan.items)
        return StepResult(plan.step_number, sampled, time.perf_counter() - started_s)

    @torch.inference_mode()
    def _run(self, model: DenseModel[TorchPlan], items: tuple[StepItem, ...]) -> tuple[ItemResult, ...]:
        for item in items:
            self._clear_partial_block(item)
        layout = BatchLayout.of([self._span(item) for item in items])
        tokens: list[int] = []
        rows: list[int] = []
        draws: list[Draw] = []
        sampling_items: list[int] = []
        for index in layout.order:
            item = items[index]
            tokens.extend(item.tokens)
            if item.sample_index is not None:
                rows.append(len(tokens) - 1)
                draws.append(Draw(item.sampling, item.sample_index))
                sampling_items.append(index)
        device = self.kv.device
        logits = model.forward(
            torch.tensor(tokens, dtype=torch.int64, device=device),
            layout,
            torch.tensor(rows, dtype=torch.int64, device=device),
        )
        results = [NOTHING_SAMPLED] * len(items)
        if draws:
            for index, token in zip(sampling_items, sample(logits, draws), strict=True):
                results[index] = ItemResult((token,))
        elif device.type == "cuda":
            torch.cuda.synchronize(device)
        return tuple(results)

    def _span(self, item: StepItem) -> Span:
        end = item.first_position + len(item.tokens)
        needed = self.geometry.blocks_for(end)
        assert item.tokens, item.key
        assert len(item.block_ids) >= needed, item.key
        return Span(item.first_position, len(item.tokens), item.block_ids[:needed])

    def _clear_partial_block(self, item: StepItem) -> None:
        """See `KVPool.clear`. Only when this step is the first to write to it."""
        end = item.first_position + len(item.tokens)
        last, filled = divmod(end, self.geometry.block_tokens)
        if filled and last * self.geometry.block_tokens >= item.first_position:
            self.kv.clear(item.block_ids[last])

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

    def close(self) -> None:
        """Drop weights. The pool's memory lives as long as somebody refers to it. Idempotent."""
        self._model = None


def _default_name(path: str, folder: Path) -> str:
    """The last part of what was asked for: a downloaded snapshot's folder is named by its commit."""
    return Path(path).name or folder.resolve().name


def _model_digest(spec: ModelSpec, checkpoint: Checkpoint, tokens: int) -> str:
    """Whatever changes a key or value: the weights, and how config.json says to use them."""
    facts = msgspec.structs.asdict(spec)
    if spec.rope.kind == "dynamic":
        facts["rope_context_tokens"] = max(tokens, spec.rope.original_context_tokens)
    for name in ("eos_token_ids", "context_tokens", "context_tokens_limit"):
        del facts[name]
    text = f"{checkpoint.digest()} {sorted(facts.items())!r}"
    return hashlib.sha256(text.encode()).hexdigest()
