"""Bytes of the rows of one token and layer, on their way to the experts and back."""

from dataclasses import dataclass
from math import comb

from simulator.experts.layout import SCALE_NUMBERS, ExpertLayout
from simulator.models import ModelShape


@dataclass(frozen=True, slots=True)
class RowTraffic:
    """Means per token and layer, in bytes."""

    network_out: float
    """Bytes between nodes on the way to the experts."""
    network_back: float
    peer_out: float
    """Bytes over NVLink."""
    peer_back: float


def nodes_per_token(model: ModelShape, nodes: int, *, has_whole_groups: bool) -> float:
    """Return the mean number of nodes that hold experts of one token.

    Where the experts of a group are on one node, a token's `groups_used` groups are on few nodes.
    """
    return nodes * _reached(model, nodes, 1, has_whole_groups=has_whole_groups)


def ranks_per_token(model: ModelShape, layout: ExpertLayout, *, has_whole_groups: bool) -> float:
    """Return the mean number of ranks that one token's rows are sent to."""
    each = layout.ranks / layout.nodes
    return layout.ranks * _reached(model, layout.nodes, each, has_whole_groups=has_whole_groups)


def _reached(model: ModelShape, nodes: int, parts: float, *, has_whole_groups: bool) -> float:
    """Return how likely a node's part, of so many equal ones, holds some expert of a token."""
    used, groups = model.experts_used, model.groups
    if not has_whole_groups or groups % nodes:
        return 1 - (1 - 1 / (nodes * parts)) ** used
    own, found = groups // nodes, 0.0
    for chosen in range(1, min(own, model.groups_used) + 1):
        ways = comb(own, chosen) * comb(groups - own, model.groups_used - chosen)
        share = chosen / model.groups_used / parts
        found += ways / comb(groups, model.groups_used) * (1 - (1 - share) ** used)
    return found


def traffic_of(model: ModelShape, layout: ExpertLayout, *, has_whole_groups: bool) -> RowTraffic:
    sent = model.hidden * layout.sent_bytes
    sent += 4 * model.hidden / SCALE_NUMBERS if layout.sent_bytes <= 1 else 0.0
    returned = model.hidden * layout.returned_bytes
    to_ranks = ranks_per_token(model, layout, has_whole_groups=has_whole_groups)
    to_nodes = nodes_per_token(model, layout.nodes, has_whole_groups=has_whole_groups)
    on_node = 0.0 if layout.is_apart else min(1.0, layout.node_gpus / layout.ranks)
    on_gpu = 0.0 if layout.is_apart else 1 / layout.ranks
    if layout.once_per_node:
        away, near = to_nodes * (1 - on_node), 1 - 1 / layout.node_gpus
        return RowTraffic(away * sent, away * returned, to_ranks * near * sent, to_ranks * near * returned)
    back = model.experts_used
    return RowTraffic(
        to_ranks * (1 - on_node) * sent,
        back * (1 - on_node) * returned,
        to_ranks * (on_node - on_gpu) * sent,
        back * (on_node - on_gpu) * returned,
    )
