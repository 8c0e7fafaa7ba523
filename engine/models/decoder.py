"""Forward pass of a decoder over a flat batch of tokens: all families with a `ModelSpec`."""

from collections.abc import Callable
from typing import Generic

import torch
from torch import Tensor

from engine.devices import to_device
from engine.kernels.interface import BatchLayout, Packed, PackedExperts, Plan, RopeTables
from engine.kernels.weights import DenseMatrix
from engine.model_files.division import ONLY_STAGE, StagePlace
from engine.model_files.spec import ModelSpec
from engine.models.attention import Attention, GroupedAttention
from engine.models.expert_counts import ExpertCounts
from engine.models.halves import OVERLAP_ROWS_MIN, HalfBatch, halves_of
from engine.models.linear import LayerPlace, Linear, Loader, MatrixSource, Norm, StepContext
from engine.models.mla import LatentAttention
from engine.models.mlp import Finish, GatedMlp, Mlp
from engine.models.moe import MixtureOfExperts
from engine.models.rope import frequencies

Progress = Callable[[int, int], None]
"""(layers loaded, layers in all)"""

_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
"""Places of the decoder in a checkpoint: alone, or inside a model that also reads images."""


def decoder_prefix(source: MatrixSource) -> str:
    """Where the decoder is in a checkpoint, with a dot: the beginning of the names of its tensors."""
    return next((p for p in _PREFIXES if source.has(f"{p}embed_tokens")), _PREFIXES[0])


class Layer:
    def __init__(
        self,
        spec: ModelSpec,
        loader: Loader[Plan, Packed, PackedExperts],
        layer: int,
        at: str,
        counts: ExpertCounts | None,
    ) -> None:
        """at: the layer's name in the checkpoint, with a dot. counts: None if no layer has experts."""

        def norm(name: str) -> Norm:
            return loader.norm(at + name, spec.hidden_size, spec.norm_eps, offset=spec.norm_offset)

        self._ranks = loader.ranks
        self._attention_norm = norm("input_layernorm")
        self.attention: Attention
        if spec.mla is None:
            self.attention = GroupedAttention(spec, loader, layer, f"{at}self_attn")
        else:
            self.attention = LatentAttention(spec, loader, layer, f"{at}self_attn")
        self._mlp: Mlp
        if counts is not None and layer in counts.layers:
            self._mlp = MixtureOfExperts(spec, loader, layer, at, counts)
        else:
            self._mlp = GatedMlp(spec, loader, f"{at}mlp", spec.intermediate_size)
        self._after_attention: Norm | None = None
        self._after_mlp: Norm | None = None
        if spec.post_norms:
            self._after_attention = norm("post_attention_layernorm")
            self._mlp_norm = norm("pre_feedforward_layernorm")
            self._after_mlp = norm("post_feedforward_layernorm")
        else:
            self._mlp_norm = norm("post_attention_layernorm")

    def queries(self, hidden: Tensor, step: StepContext[Plan]) -> Tensor:
        return self.attention.queries(self._attention_norm(hidden), step)

    def finish(self, hidden: Tensor, attended: Tensor, step: StepContext[Plan]) -> Tensor:
        """The rest of the layer after attention. `hidden` is the layer's input, of the same rows, and may be
        overwritten."""
        return self.begin(hidden, attended, step)()

    def begin(self, hidden: Tensor, attended: Tensor, step: StepContext[Plan]) -> Finish:
        """`finish` in two parts: when this returns, rows that go to experts elsewhere are on their way."""
        after_mlp = self._after_mlp
        if self._after_attention is None or after_mlp is None:
            residual = self._own_residual(hidden)
            hidden = self._total(self.attention.output(attended, step, residual=residual))
            rest = self._mlp.begin(self._mlp_norm(hidden), step, residual=self._own_residual(hidden))
            return lambda: self._total(rest())
        after = hidden + self._after_attention(self._total(self.attention.output(attended, step)))
        rest = self._mlp.begin(self._mlp_norm(after), step)
        return lambda: after + after_mlp(self._total(rest()))

    def leave_out(self) -> None:
        """The step ends after `queries`."""

    def _own_residual(self, hidden: Tensor) -> Tensor | None:
        return hidden if self._ranks is None else self._ranks.residual(hidden)

    def _total(self, part: Tensor) -> Tensor:
        return part if self._ranks is None else self._ranks.total(part)


class StreamedLayer:
    """A layer whose weights are in memory only while it computes."""

    def __init__(self, layer: Layer, place: LayerPlace) -> None:
        self._layer, self._place = layer, place
        self.attention = layer.attention

    def queries(self, hidden: Tensor, step: StepContext[Plan]) -> Tensor:
        self._place.enter()
        return self._layer.queries(hidden, step)

    def finish(self, hidden: Tensor, attended: Tensor, step: StepContext[Plan]) -> Tensor:
        hidden = self._layer.finish(hidden, attended, step)
        self._place.leave()
        return hidden

    def leave_out(self) -> None:
        self._place.leave()


class Decoder(Generic[Plan, Packed, PackedExperts]):
    """Implements `engine.models.model.LanguageModel`, or one pipeline stage of it: what a stage returns, the
    next one is given, and only the last has logits."""

    def __init__(
        self,
        spec: ModelSpec,
        loader: Loader[Plan, Packed, PackedExperts],
        *,
        context_tokens: int,
        stage: StagePlace = ONLY_STAGE,
        progress: Progress | None = None,
    ) -> None:
        """Read the weights. spec: of the rank. context_tokens: the longest sequence that will be admitted.

        Raises SetupError: a tensor is missing or has another shape than the spec asks for.
        """
        source = loader.source
        self._spec, self._kernels, self._ranks, self._stage = spec, loader.kernels, loader.ranks, stage
        self.layer_count, self.is_last = spec.layer_count, stage.is_last
        self._routed, self._block_tokens = loader.routed, loader.kernels.block_tokens
        at = decoder_prefix(source)
        vocab, hidden = spec.vocab_size, spec.hidden_size
        self._embedding: Tensor | None = None
        if stage.is_first or (stage.is_last and spec.tie_embeddings):
            self._embedding = source.tensor(f"{at}embed_tokens.weight", vocab, hidden)
        # Gemma's authors round the factor to the model's dtype.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=source.dtype).item()
        self.expert_counts: ExpertCounts | None = None
        if spec.moe is not None and spec.moe.layers:
            self.expert_counts = ExpertCounts(spec.moe.layers, spec.moe.expert_count, source.device)
        self._layers: list[Layer | StreamedLayer] = []
        for index in range(spec.layer_count):
            name = f"{at}layers.{stage.first_layer + index}."
            layer = Layer(spec, loader, index, name, self.expert_counts)
            place = loader.layer_is_read(index)
            self._layers.append(layer if place is None else StreamedLayer(layer, place))
            if progress is not None:
                progress(index + 1, spec.layer_count)
        self._norm: Norm | None = None
        self._head: Linear[Packed] | None = None
        if stage.is_last:
            self._norm = loader.norm(f"{at}norm", hidden, spec.norm_eps, offset=spec.norm_offset)
            table = self._embedding if spec.tie_embeddings else None
            tied = None if table is None else DenseMatrix(table)
            prefix = at.removesuffix("model.")
            head = f"{prefix}lm_head" if source.has(f"{prefix}lm_head") else "lm_head"
            self._head = loader.head(head, vocab, hidden, tied=tied)
        self.windows = frozenset(spec.windows)
        self._frequencies = [
            frequencies(rope, context_tokens=context_tokens, device=source.device) for rope in spec.ropes
        ]

    def own_token_count(self, layout: BatchLayout) -> int:
        """Number of the step's tokens that this rank computes: all."""
        return layout.token_count

    def forward(
        self,
        tokens: Tensor,
        layout: BatchLayout,
        rows: Tensor,
        *,
        hidden: Tensor | None = None,
        on_written: Callable[[], None] | None = None,
    ) -> Tensor:
        """hidden: what the stage before returned, [T, hidden], which may be overwritten; None for the first.
        on_written: called in every layer when the KV of all tokens is written, before any is read.
        A stage that is not the last returns all rows, before any norm."""
        positions = to_device(torch.from_numpy(layout.positions()), tokens.device)
        halves = None if on_written is not None else self._halves(layout)
        if halves is not None:
            return self._compute_halves(tokens, halves, rows, positions, hidden)
        plan = self._kernels.plan(layout, self.ropes(positions), windows=self.windows)
        step = _step_context(plan, layout, tokens.device)
        return self.compute(tokens, step, rows, hidden=hidden, on_written=on_written)

    def _halves(self, layout: BatchLayout) -> tuple[BatchLayout, BatchLayout] | None:
        """Two batches that are computed in turn, one's attention while the other's rows are with experts
        elsewhere; None: it is not worth it, or no rows go elsewhere."""
        moe, routed = self._spec.moe, self._routed
        if moe is None or routed is None or not routed.overlaps:
            return None
        if any(isinstance(layer, StreamedLayer) for layer in self._layers):
            return None
        rows_of_expert = layout.token_count * moe.experts_per_token / moe.expert_count
        return halves_of(layout, self._block_tokens) if rows_of_expert >= OVERLAP_ROWS_MIN else None

    def _compute_halves(
        self,
        tokens: Tensor,
        halves: tuple[BatchLayout, BatchLayout],
        rows: Tensor,
        positions: Tensor,
        hidden: Tensor | None,
    ) -> Tensor:
        hidden = self._embedded(tokens) if hidden is None else hidden
        cut = halves[0].token_count
        of_half = (rows < cut, rows >= cut)
        parts: list[HalfBatch[Plan]] = []
        for number, layout in enumerate(halves):
            own = slice(0, cut) if number == 0 else slice(cut, None)
            plan = self._kernels.plan(layout, self.ropes(positions[own]), windows=self.windows)
            asked = rows[of_half[number]] - (cut if number else 0)
            parts.append(HalfBatch(hidden[own], _step_context(plan, layout, tokens.device), asked))
        layers = [layer for layer in self._layers if isinstance(layer, Layer)]
        for layer in layers[:-1] if self._stage.is_last else layers:
            for half in parts:
                own_hidden = half.collect()
                q = layer.queries(own_hidden, half.step)
                half.rest = layer.begin(own_hidden, layer.attention.attend(q, half.step), half.step)
        if self._norm is None:
            return torch.cat([half.collect() for half in parts])
        last = layers[-1]
        for half in parts:
            own_hidden, asked = half.collect(), half.rows
            q = last.queries(own_hidden, half.step)
            if not len(asked):
                continue
            attended = last.attention.attend(q, half.step)[asked]
            half.rest = last.begin(own_hidden[asked], attended, half.step.rows(asked))
        if not len(rows) and self._ranks is not None:
            self._ranks.meet(hidden)  # see `compute`
        out = hidden.new_empty((len(rows), hidden.shape[1]))
        for mine, half in zip(of_half, parts, strict=True):
            if len(half.rows):
                out[mine] = half.collect()
        return self._norm(out)

    def ropes(self, positions: Tensor) -> RopeTables:
        """positions int64 [T]."""
        return {rope: table.cos_sin(positions) for rope, table in enumerate(self._frequencies)}

    def compute(
        self,
        tokens: Tensor,
        step: StepContext[Plan],
        rows: Tensor | None,
        *,
        hidden: Tensor | None = None,
        on_written: Callable[[], None] | None = None,
    ) -> Tensor:
        """`forward` without what the host does for it. rows: None for all."""
        hidden = self._embedded(tokens) if hidden is None else hidden
        last = self._layers[-1]
        earlier = self._layers[:-1] if self._stage.is_last else self._layers
        for layer in earlier:
            q = layer.queries(hidden, step)
            if on_written is not None:
                on_written()
            hidden = layer.finish(hidden, layer.attention.attend(q, step), step)
        if self._norm is None:
            return hidden
        # After the last layer's KV is written, only the rows that are asked for matter.
        q = last.queries(hidden, step)
        if on_written is not None:
            on_written()
        if rows is not None and not len(rows):
            last.leave_out()
            if self._ranks is not None:
                # No sum follows that waits for the others, and peers may read the KV when the step is done.
                self._ranks.meet(hidden)
            return hidden[:0]
        attended = last.attention.attend(q, step)
        if rows is None:
            return self._norm(last.finish(hidden, attended, step))
        return self._norm(last.finish(hidden[rows], attended[rows], step.rows(rows)))

    def _embedded(self, tokens: Tensor) -> Tensor:
        assert self._embedding is not None, "only the first stage embeds tokens"
        if self._ranks is None:
            hidden = self._kernels.embed(tokens, self._embedding)
        else:
            hidden = self._ranks.embed(self._kernels, tokens, self._embedding)
        return hidden if self._embedding_scale == 1.0 else hidden * self._embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        assert self._head is not None, "only the last stage has logits"
        logits = self._head.logits(hidden)
        cap = self._spec.logit_softcap
        logits = torch.tanh(logits / cap) * cap if cap else logits
        return logits if self._ranks is None else self._ranks.logits(logits)


def _step_context(plan: Plan, layout: BatchLayout, device: torch.device) -> StepContext[Plan]:
    slots = [span.adapter_slot for span in layout.spans for _ in range(span.token_count)]
    if max(slots) < 0:
        return StepContext(plan)
    return StepContext(plan, torch.tensor(slots, dtype=torch.int64, device=device))
