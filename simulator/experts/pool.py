"""The workers of one pool whose experts are divided: what their steps cost, and the room they have."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from baton.core.costs import StepCosts
from baton.core.errors import SetupError
from control_plane.experts.place import ExpertPlacement
from control_plane.experts.values import ExpertRank
from simulator.experts.layout import SPARE_EXPERTS, ExpertLayout
from simulator.experts.popularity import EVEN, ExpertPopularity, Unevenness, expert_ranks
from simulator.experts.stages import ExpertStepWork, LayerStages
from simulator.experts.timeline import LayerParts, layer_s
from simulator.experts.traffic import traffic_of
from simulator.hardware import GB, NIC_BYTES_S, Efficiency, Gpu
from simulator.models import ModelShape

MEMORY_USED = 0.9
"""Part of a GPU's memory that is planned for weights, activations and KV."""
CONTEXT_TOKENS = 2048
"""Length of the sequences at which the linear costs are laid through a full batch."""


@dataclass(frozen=True)
class ExpertPool:
    """A pool of one role. Every worker is one GPU; GPUs of expert ranks are its own or others."""

    model: ModelShape
    gpu: Gpu
    layout: ExpertLayout
    popularity: ExpertPopularity
    weight_bytes: float = 1.0
    kv_element_bytes: float = 2.0
    nic_bytes_s: float = NIC_BYTES_S
    efficiency: Efficiency = field(default_factory=Efficiency)

    @cached_property
    def ranks(self) -> list[ExpertRank]:
        return expert_ranks(self.layout)

    @cached_property
    def placement(self) -> ExpertPlacement:
        """Raises ExpertsDoNotFit."""
        return self.popularity.place(self.model, self.ranks)

    @cached_property
    def stages(self) -> LayerStages:
        traffic = traffic_of(self.model, self.layout, has_whole_groups=self.placement.has_whole_groups)
        return LayerStages(
            *(self.model, self.gpu, self.layout, traffic),
            *(self.weight_bytes, self.kv_element_bytes, self.nic_bytes_s, self.efficiency),
        )

    # --- steps ------------------------------------------------------------------------------------

    def unevenness(self, tokens: float) -> Unevenness:
        """Compare ranks while every worker has so many tokens."""
        rows = tokens * self.model.experts_used * self.layout.callers
        if self.layout.ranks == 1:
            return EVEN
        return self.popularity.unevenness(self.placement, rows=rows, node_gpus=self.layout.node_gpus)

    def parts(self, work: ExpertStepWork, *, halves: int) -> LayerParts:
        """Return the parts of a layer for one of so many parts of a batch."""
        part = work.part(halves)
        return self.stages.layer(part, self.unevenness(part.tokens), is_sending_beside=halves > 1)

    def step_s(self, work: ExpertStepWork) -> float:
        """Return the time of a step. A batch is divided where that is faster, if the layout allows it."""
        if not work.tokens:
            return 0.0
        choices = (1, 2) if self.layout.overlaps and work.tokens >= 2 else (1,)
        return min(self._step_s(work, halves) for halves in choices)

    def _step_s(self, work: ExpertStepWork, halves: int) -> float:
        model = self.model
        each_s = layer_s(self.parts(work, halves=halves), halves=halves, is_apart=self.layout.is_apart)
        dense_s = self.stages.dense_layer_s(work) * model.dense_layers
        head_s = self.stages.head_s(work.decodes)
        return self.efficiency.step_s + model.expert_layers * each_s + dense_s + head_s

    def costs(self, *, chunk_tokens: int, batch: int) -> StepCosts:
        """Return costs that are linear through one decode, a full batch of short and of long sequences, and a
        full chunk of one short and of several long prompts.

        All workers of the pool are assumed to have as much to do. What is hidden beside the network's work,
        or behind it, is linear only between these points.
        """
        one_s = self.step_s(ExpertStepWork(decodes=1))
        batch_s = self.step_s(ExpertStepWork(decodes=batch))
        long_s = self.step_s(ExpertStepWork(decodes=batch, context_tokens=batch * CONTEXT_TOKENS))
        pairs = chunk_tokens * CONTEXT_TOKENS / 2
        chunk_s = self.step_s(ExpertStepWork(prompt_tokens=chunk_tokens))
        prompts_s = self.step_s(ExpertStepWork(prompt_tokens=chunk_tokens, pairs=pairs))
        decode_s = max(0.0, batch_s - one_s) / max(1, batch - 1)
        base_s = max(0.0, one_s - decode_s)
        return StepCosts(
            base_s=base_s,
            prompt_token_s=max(0.0, chunk_s - base_s) / chunk_tokens,
            decode_s=decode_s,
            context_token_s=max(0.0, long_s - batch_s) / (batch * CONTEXT_TOKENS),
            pair_s=max(0.0, prompts_s - chunk_s) / pairs,
        )

    # --- memory -----------------------------------------------------------------------------------

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert of one layer."""
        return self.model.expert_weights * self.weight_bytes

    @property
    def rank_bytes(self) -> float:
        """Bytes of the experts of one rank, and of the room in which it loads others."""
        return (self.layout.slots * self.model.expert_layers + SPARE_EXPERTS) * self.expert_bytes

    @property
    def own_bytes(self) -> float:
        """Bytes of the weights that every worker holds itself, with embedding and output layer in BF16."""
        model = self.model
        beside = model.weights_with(0) - model.vocab_weights
        return beside * self.weight_bytes + 2 * model.vocab_weights * (2 - model.is_tied)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.model.kv_bytes_per_token(element_bytes=self.kv_element_bytes)

    @property
    def spare_bytes(self) -> float:
        """Bytes of a GPU that are planned for nothing."""
        return self.gpu.memory_bytes * (1 - MEMORY_USED)

    def kv_pool_bytes(self, *, use: float = MEMORY_USED, activations: float = 2 * GB) -> float:
        """Return what is left for KV on one worker: `use` of the memory, less weights, experts and
        `activations` bytes. Raises SetupError when they do not fit."""
        held = self.own_bytes + (0.0 if self.layout.is_apart else self.rank_bytes)
        room = self.gpu.memory_bytes * use - activations
        left = room - held
        if left < 1024 * self.kv_bytes_per_token or (self.layout.is_apart and self.rank_bytes > room):
            most = max(held, self.rank_bytes)
            raise SetupError(
                f"{self.model.name} takes {most / GB:.0f} GB of a {self.gpu.name} of "
                f"{self.gpu.memory_bytes / GB:.0f} GB in a pool of {self.layout.ranks} expert ranks with "
                f"{self.layout.slots} experts of each layer: take more workers, or fewer replicas"
            )
        return left

    @property
    def transfer_bytes_s(self) -> float:
        return self.nic_bytes_s * self.efficiency.link

    @property
    def host_bytes_s(self) -> float:
        return self.gpu.host_bytes_s * self.efficiency.link

    def with_ranks(self, ranks: Sequence[ExpertRank], placement: ExpertPlacement) -> "ExpertPool":
        """Return the pool with only these of its ranks, placed as given."""
        lost = self.layout.ranks - len(ranks)
        callers = self.layout.callers - (0 if self.layout.is_apart else lost)
        slots = max(rank.slots for rank in ranks)
        layout = replace(self.layout, ranks=len(ranks), callers=callers, slots=slots)
        smaller = replace(self, layout=layout)
        smaller.__dict__["ranks"], smaller.__dict__["placement"] = list(ranks), placement
        return smaller
