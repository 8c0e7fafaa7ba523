"""What steps cost when a measured model is divided over ranks.

Matrix products, attention and the reading of weights are divided. Planning, launching and sampling are not:
every rank does them for itself, or waits for the leader. Tensor ranks add two sums of the activations per
layer, and one of the embedding (Shoeybi et al., "Megatron-LM", 2019). Stages compute a part of the layers
each, and have steps of their own (`engine.scheduling.overlap`). Ranks on the cores of one host share its
memory, so that each of several reads weights more slowly than one that is alone.
"""

import msgspec

from baton.core.costs import StepCosts
from baton.core.messages import Role
from baton.core.shape import Shape


class MeasuredRank(msgspec.Struct, frozen=True):
    """A whole model on one rank, and what ranks would add, as `baton bench parallel` measures them."""

    costs: StepCosts
    beside: StepCosts
    """The same while another rank computes the same beside it, on the same host."""
    beside_unrecorded: StepCosts
    """The same as `beside` where no step is recorded and replayed. Stages replay none, tensor ranks do."""
    fixed_s: float
    """Seconds of a step that are not divided, where it is not replayed."""
    sum_s: float
    """Seconds of a sum over two ranks, however small."""
    sum_byte_s: float
    """Seconds more for each byte of it."""
    layers: int
    hidden: int
    element_bytes: int
    """Bytes of a number in the activations."""


def divided_costs(rank: MeasuredRank, shape: Shape, role: Role) -> StepCosts:
    """Return the costs of the same model divided over the ranks of `shape`, context ranks left out."""
    tensor, stages = shape.tensor, shape.pipeline
    if tensor * stages == 1:
        return rank.costs
    whole = rank.beside if stages == 1 else rank.beside_unrecorded
    # A replay saves nothing of what is divided.
    divided_s = max(0.0, rank.beside_unrecorded.base_s - rank.fixed_s)
    fixed_s = max(0.0, whole.base_s - divided_s)
    has_sums = tensor > 1
    sums_s = (2 * rank.layers + 1) * rank.sum_s * has_sums
    token_sums_s = 2 * rank.layers * rank.hidden * rank.element_bytes * rank.sum_byte_s * has_sums
    parts = tensor * stages
    work_s = divided_s / tensor + sums_s
    # A chunk adds one stage's time to the chunk before it; a token that is decoded passes all stages.
    is_chunk = role is Role.PREFILL
    base_s = fixed_s + work_s / stages if is_chunk else stages * fixed_s + work_s
    return StepCosts(
        base_s,
        whole.prompt_token_s / parts + token_sums_s / stages,
        whole.decode_s / parts + token_sums_s / stages,
        whole.context_token_s / parts,
        whole.pair_s / parts,
        stages,
        few_decode_s=whole.few_decode_s / parts,
    )
