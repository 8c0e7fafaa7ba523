"""Mixture of experts: the router's choice, and the routed and shared experts."""

from typing import Any, Generic

import torch
from torch import Tensor

from engine.kernels.interface import Activation, Packed, PackedExperts, Plan
from engine.kernels.weights import ExpertMatrices, Matrix, join_rows
from engine.model_files.spec import ModelSpec, MoeSpec
from engine.models.expert_counts import ExpertCounts
from engine.models.linear import Linear, Loader, MatrixSource, StepContext
from engine.models.mlp import Finish, GatedMlp


class MixtureOfExperts(Generic[Packed, PackedExperts]):
    """Implements `engine.models.mlp.Mlp`."""

    def __init__(
        self,
        spec: ModelSpec,
        loader: Loader[Plan, Packed, PackedExperts],
        layer: int,
        at: str,
        counts: ExpertCounts,
    ) -> None:
        """at: the layer's name with a dot. Raises SetupError, see `MatrixSource`."""
        assert spec.moe is not None
        self._moe, self._kernels = spec.moe, loader.kernels
        self._counts, self._row = counts, counts.layers.index(layer)
        self._activation: Activation = spec.activation
        moe, hidden = spec.moe, spec.hidden_size
        name = experts_name(moe, at)
        router = f"{name}.router" if moe.expert_names == "gpt_oss" else f"{name}.gate"
        matrix = loader.source.matrix(router, moe.expert_count, hidden, bias=moe.router_bias)
        self._router: Linear[Packed] = loader.joined([matrix], [(router, moe.expert_count)])
        self._correction: Tensor | None = None
        if moe.has_correction_bias:
            bias_name = f"{router}.e_score_correction_bias"
            self._correction = loader.source.tensor(bias_name, moe.expert_count, dtype=torch.float32)
        self._routed = loader.routed
        self._experts: PackedExperts | None = None
        if self._routed is None:
            self._experts = loader.experts(_load_experts(spec, moe, loader.source, name))
        self._shared: GatedMlp[Packed] | None = None
        self._shared_gate: Linear[Packed] | None = None
        if moe.shared_intermediate_size:
            shared = f"{name}.shared_expert" if moe.shared_gate else f"{name}.shared_experts"
            self._shared = GatedMlp(spec, loader, shared, moe.shared_intermediate_size)
        if moe.shared_gate:
            self._shared_gate = loader.linear((f"{name}.shared_expert_gate", 1), in_size=hidden)

    def begin(self, x: Tensor, step: StepContext[Any], *, residual: Tensor | None = None) -> Finish:
        """See `Mlp`."""
        chosen, weights = choose_experts(self._moe, self._router.logits(x), self._correction)
        self._counts.add(self._row, chosen, step.is_token)
        if self._routed is None:
            assert self._experts is not None
            out = self._kernels.experts(x, self._experts, chosen, weights, self._activation)
            out = _sum(out, self._of_shared(x, step), residual)
            return lambda: out
        routed, sent = self._routed, self._routed.begin(self._row, x, chosen)
        try:  # the shared expert computes while the rows are away
            shared = self._of_shared(x, step)
        except BaseException:
            routed.finish(sent, weights)
            raise
        return lambda: _sum(routed.finish(sent, weights), shared, residual)

    def _of_shared(self, x: Tensor, step: StepContext[Any]) -> Tensor | None:
        """What the expert that every token passes gives [T, hidden]; None: there is none."""
        if self._shared is None:
            return None
        shared = self._shared(x, step)
        return shared if self._shared_gate is None else shared * _sigmoid(self._shared_gate(x, step))


def _sum(out: Tensor, shared: Tensor | None, residual: Tensor | None) -> Tensor:
    out = out if shared is None else out + shared
    return out if residual is None else out + residual


def choose_experts(moe: MoeSpec, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """The router's logits, float32 [T, E] -> experts int64 [T, k] and their weights float32 [T, k].

    Equal scores are decided by torch.topk. correction: float32 [E].
    """
    # In float64: torch computes some elements of a tensor with vector instructions and the rest without,
    # which differ in the last bit, and what a token gets must not depend on its place in the batch.
    if moe.scoring == "softmax_of_chosen":
        best = torch.topk(logits, moe.experts_per_token, dim=-1)
        return best.indices, torch.softmax(best.values.double(), -1).float()
    scores = _sigmoid(logits) if moe.scoring == "sigmoid" else torch.softmax(logits.double(), -1).float()
    ranked = scores if correction is None else scores + correction
    if moe.group_count > 1:
        ranked = _within_best_groups(moe, ranked)
    chosen = torch.topk(ranked, moe.experts_per_token, dim=-1).indices
    weights = scores.gather(1, chosen)
    if moe.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * moe.scale


def _sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x.double()).to(x.dtype)


def _within_best_groups(moe: MoeSpec, scores: Tensor) -> Tensor:
    """Scores with those of other groups at -inf."""
    grouped = scores.view(len(scores), moe.group_count, -1)
    best = grouped.topk(1 if moe.group_score == "max" else 2, dim=-1).values
    of_group = best.sum(-1)
    kept = torch.topk(of_group, moe.groups_kept, dim=-1).indices
    left_out = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(left_out[..., None], float("-inf")).flatten(1)


def experts_name(moe: MoeSpec, at: str) -> str:
    """The module of a layer's mixture in the checkpoint. at: the layer's name with a dot."""
    return at + ("block_sparse_moe" if moe.expert_names == "block_sparse_moe" else "mlp")


def expert_matrices(spec: ModelSpec, source: MatrixSource, name: str, expert: int) -> tuple[Matrix, Matrix]:
    """One routed expert: gate and up rows as one matrix [2 I, hidden], and down [hidden, I]. name: see
    `experts_name`. Raises SetupError, see `MatrixSource`."""
    moe = spec.moe
    assert moe is not None
    gate, up, down = ("w1", "w3", "w2") if moe.expert_names == "block_sparse_moe" else _PROJECTIONS
    hidden, inner, bias = spec.hidden_size, moe.intermediate_size, moe.expert_bias
    both = [source.matrix(f"{name}.experts.{expert}.{part}", inner, hidden, bias=bias) for part in (gate, up)]
    return join_rows(both, source.dtype), source.matrix(
        f"{name}.experts.{expert}.{down}", hidden, inner, bias=bias
    )


def _load_experts(spec: ModelSpec, moe: MoeSpec, source: MatrixSource, name: str) -> ExpertMatrices:
    found = [expert_matrices(spec, source, name, expert) for expert in range(moe.expert_count)]
    return ExpertMatrices(tuple(gate_up for gate_up, _ in found), tuple(down for _, down in found))


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
