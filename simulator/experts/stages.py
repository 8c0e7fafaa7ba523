"""Seconds of the parts of a layer by the roofline."""

from dataclasses import dataclass
from math import exp

from simulator.experts.layout import ExpertLayout
from simulator.experts.popularity import Unevenness
from simulator.experts.timeline import LayerParts
from simulator.experts.traffic import RowTraffic
from simulator.hardware import Efficiency, Gpu
from simulator.models import ModelShape

ATTENTION_KERNELS, SHARED_KERNELS, EXPERT_KERNELS = 14, 4, 10
"""Kernels of a layer. Attention: two norms, two quantisations, six products, position, cache, attention and
its reduction. Shared experts: two products, activation, sum. Experts: router and its choice, quantisation,
send, receive, permutation, two products, activation, combination."""
STATE_BYTES = 2
"""Bytes of a number between two kernels."""


@dataclass(frozen=True, slots=True)
class ExpertStepWork:
    """The work of one GPU in one step. All GPUs of a pool are assumed to have as much."""

    prompt_tokens: float = 0.0
    decodes: float = 0.0
    context_tokens: float = 0.0
    """Positions of decoding sequences, whose KV is read."""
    pairs: float = 0.0
    """Pairs of a prompt token and a position before it."""

    @property
    def tokens(self) -> float:
        return self.prompt_tokens + self.decodes

    def part(self, parts: int) -> "ExpertStepWork":
        return ExpertStepWork(
            self.prompt_tokens / parts, self.decodes / parts, self.context_tokens / parts, self.pairs / parts
        )


@dataclass(frozen=True, slots=True)
class LayerStages:
    """The times of one model's layers on one kind of GPU in one layout."""

    model: ModelShape
    gpu: Gpu
    layout: ExpertLayout
    traffic: RowTraffic
    weight_bytes: float
    kv_element_bytes: float
    nic_bytes_s: float
    efficiency: Efficiency

    def layer(self, work: ExpertStepWork, uneven: Unevenness, *, is_sending_beside: bool) -> LayerParts:
        """Return the parts of a layer that has experts. `is_sending_beside`: kernels of another part of the
        batch pass rows on meanwhile, which takes some of the multiprocessors."""
        slower = 1.0
        if is_sending_beside and self.layout.once_per_node:
            slower = 1 / (1 - self.efficiency.forwarding_share)
        sent_s, returned_s = self._network_s(work.tokens, uneven)
        return LayerParts(
            slower * self._attention_s(work),
            slower * self._shared_s(work.tokens),
            sent_s,
            slower * self._experts_s(work.tokens * uneven.rank),
            returned_s,
        )

    def dense_layer_s(self, work: ExpertStepWork) -> float:
        """Return the time of a layer without experts."""
        weights = 3 * self.model.hidden * self.model.dense_intermediate
        width = self.model.dense_intermediate
        return self._attention_s(work) + self._mlp_s(work.tokens, weights, width, SHARED_KERNELS)

    def head_s(self, sampled: float) -> float:
        """Return the time of the output layer, whose weights are in BF16, for so many tokens to sample."""
        weights = self.model.vocab_weights
        flops_s = 2 * weights * sampled / (self.gpu.bf16_flops * self.efficiency.flops)
        return max(flops_s, self._memory_s(2 * weights)) if sampled else 0.0

    # --- parts ------------------------------------------------------------------------------------

    def _attention_s(self, work: ExpertStepWork) -> float:
        model, share = self.model, self.efficiency
        flops = self.gpu.bf16_flops * share.attention_flops
        kv_bytes = model.kv_bytes_per_token(element_bytes=self.kv_element_bytes) / model.layers
        decode_s = max(
            work.context_tokens * model.decode_pair_flops / flops,
            self._memory_s(work.context_tokens * kv_bytes),
        )
        prompt_s = work.pairs * model.prompt_pair_flops / flops
        moved = work.prompt_tokens * self._state_bytes(is_decode=False)
        moved += work.decodes * self._state_bytes(is_decode=True)
        product_s = self._product_s(work.tokens, model.attention_weights, 1.0)
        return product_s + decode_s + prompt_s + self._memory_s(moved) + ATTENTION_KERNELS * share.kernel_s

    def _shared_s(self, tokens: float) -> float:
        model = self.model
        if not model.shared_intermediate:
            return 0.0
        return self._mlp_s(tokens, model.shared_weights, model.shared_intermediate, SHARED_KERNELS)

    def _mlp_s(self, tokens: float, weights: float, width: int, kernels: int) -> float:
        moved = tokens * (self._activation_bytes(width) + self.model.hidden * (self._in_bytes + STATE_BYTES))
        return (
            self._product_s(tokens, weights, 1.0) + self._memory_s(moved) + kernels * self.efficiency.kernel_s
        )

    def _experts_s(self, tokens: float) -> float:
        """Return the time of a rank while every caller has so many tokens."""
        model, layout = self.model, self.layout
        rows = tokens * model.experts_used * layout.callers / layout.ranks
        experts = layout.slots * (1 - exp(-rows / layout.slots))
        # Rows are read where they came, permuted, and read by the product; results are written and combined.
        moved = model.hidden * (3 * self._in_bytes + 2 * STATE_BYTES)
        moved += self._activation_bytes(model.intermediate)
        results = tokens * (model.experts_used + 1) * model.hidden * layout.returned_bytes
        return (
            self._product_s(rows / max(experts, 1e-9), model.expert_weights, experts)
            + self._memory_s(rows * moved + results)
            + EXPERT_KERNELS * self.efficiency.kernel_s
        )

    def _network_s(self, tokens: float, uneven: Unevenness) -> tuple[float, float]:
        """Return the seconds of the rows' way to the experts and back, at the busiest end."""
        share, traffic = self.efficiency, self.traffic
        more = uneven.node if self.layout.once_per_node else uneven.rank
        at_ranks = max(1.0, self.layout.callers / self.layout.ranks)
        network = self.nic_bytes_s * share.link
        peers = self.gpu.peer_bytes_s * share.link
        seconds = (
            tokens * at_ranks * max(more * across / network, uneven.rank * beside / peers) + share.message_s
            for across, beside in (
                (traffic.network_out, traffic.peer_out),
                (traffic.network_back, traffic.peer_back),
            )
        )
        sent_s, returned_s = seconds
        return sent_s, returned_s

    # --- the roofline -----------------------------------------------------------------------------

    def _product_s(self, rows: float, weights: float, count: float) -> float:
        """Return the time of `count` products of `rows` tokens each with so many weights."""
        is_small = self.weight_bytes <= 1 and self.gpu.fp8_flops > 0
        peak = self.gpu.fp8_flops if is_small else self.gpu.bf16_flops
        flops_s = 2 * rows * weights * count / (peak * self.efficiency.flops)
        return max(flops_s, self._memory_s(weights * count * self.weight_bytes))

    def _memory_s(self, moved_bytes: float) -> float:
        return moved_bytes / (self.gpu.memory_bytes_s * self.efficiency.memory)

    @property
    def _in_bytes(self) -> float:
        """Bytes per number of what a product reads."""
        return min(self.weight_bytes, STATE_BYTES)

    def _activation_bytes(self, width: int) -> float:
        """Return the bytes that a token moves between the products of a feed-forward network: the first
        one's results written and read, the activated ones written and read."""
        return width * (2 * 2 * STATE_BYTES + 2 * self._in_bytes)

    def _state_bytes(self, *, is_decode: bool) -> float:
        """Return the bytes that a token moves between the kernels of a layer's attention and around them."""
        model = self.model
        moved = model.hidden * (11 * STATE_BYTES + 2 * self._in_bytes)  # two norms, residual, in and out
        if (latent := model.latent) is None:
            heads = model.heads + 2 * model.kv_heads + model.heads
            return moved + 2 * STATE_BYTES * heads * model.head_dim
        key_dim = latent.plain_dim + latent.position_dim
        moved += model.heads * (2 * STATE_BYTES * (key_dim + latent.value_dim) + 2 * latent.value_dim)
        if is_decode:
            absorbed = latent.cached_dim + latent.kv_rank
            return moved + 2 * STATE_BYTES * model.heads * absorbed
        expanded = latent.plain_dim + latent.value_dim + key_dim
        return moved + 2 * STATE_BYTES * model.heads * expanded
