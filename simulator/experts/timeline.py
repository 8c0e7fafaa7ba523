"""The parts of a layer, one beside the other as far as they may be."""

from dataclasses import dataclass

LAYERS_BEFORE, LAYERS_MEASURED = 4, 8


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Seconds of the parts of one layer, for one part of a batch."""

    attention_s: float
    """Attention and the router. Nothing of the layer can be sent before."""
    shared_s: float
    """Shared experts, which need no rows of others."""
    dispatch_s: float
    experts_s: float
    """The grouped product of the busiest rank."""
    combine_s: float

    @property
    def computed_s(self) -> float:
        return self.attention_s + self.shared_s + self.experts_s


def layer_s(parts: LayerParts, *, halves: int, is_apart: bool) -> float:
    """Return the seconds between two layers of a batch that is computed in so many parts, in turn.

    Three things do one piece of work at a time: the GPU of attention, that of the experts, which is the same
    unless `is_apart`, and the network. Each does its work in the order in which the parts of the batch come
    to it: all parts' attention, all parts' experts.
    """
    gpu_s, expert_gpu_s, network_s = 0.0, 0.0, 0.0
    ready_s = [0.0] * halves
    starts: list[float] = []
    for _ in range(LAYERS_BEFORE + LAYERS_MEASURED + 1):
        arrived_s: list[float] = []
        for half in range(halves):
            begin_s = max(gpu_s, ready_s[half])
            if half == 0:
                starts.append(begin_s)
            sent_s = begin_s + parts.attention_s
            gpu_s = sent_s + parts.shared_s
            network_s = max(network_s, sent_s) + parts.dispatch_s
            arrived_s.append(network_s)
        if not is_apart:
            expert_gpu_s = gpu_s
        for half in range(halves):
            expert_gpu_s = max(expert_gpu_s, arrived_s[half]) + parts.experts_s
            network_s = max(network_s, expert_gpu_s) + parts.combine_s
            ready_s[half] = max(network_s, gpu_s)
        if not is_apart:
            gpu_s = expert_gpu_s
    return (starts[-1] - starts[LAYERS_BEFORE]) / LAYERS_MEASURED
