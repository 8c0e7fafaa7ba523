"""Chooses the node where a process of the cluster should start.

Ray's own "SPREAD" strategy hands out nodes in turn to whatever asks next. Two ranks of one group can then be
on one node because a worker asked between them, and the loss of that node is the loss of both. Here each
process goes to the node with the fewest of its own group, so that a group loses as little as possible with
any node. Ray has the last word: if the chosen node is full or gone, it takes another one.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.core.messages import Role

NODE_LABEL = "ray.io/node-id"
"""Label that Ray gives to every node."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What one process needs of its node."""

    resources: Mapping[str, float]
    """Amounts by Ray's names: "CPU", "GPU" and an operator's own."""
    labels: Mapping[str, str]
    """Ray's label selector: a value, "!value", "in(a,b)" or "!in(a,b)" for each label."""


NOTHING = Needs({}, {})


@dataclass(frozen=True, slots=True)
class Placed:
    """A process that runs or starts."""

    group: str
    """Processes that serve the same purpose: a pool of workers, or the ranks of one expert group."""
    node: str
    """Ray's id of its node, or "" while only Ray knows it."""
    needs: Needs


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node that is alive."""

    node: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


def choose_node(
    nodes: Iterable[RayNode],
    placed: Collection[Placed],
    group: str,
    needs: Needs,
    avoid: Collection[str] = (),
) -> str:
    """Return the id of the node with the fewest processes of the group, then with the fewest of all groups,
    among those that have what is needed and have not given it to others. Return "" if there is none."""
    of_group = Counter(one.node for one in placed if one.group == group)
    of_all = Counter(one.node for one in placed)

    def has_room(node: RayNode) -> bool:
        if node.node in avoid or not all(matches(node.labels, *term) for term in needs.labels.items()):
            return False
        taken = [one.needs.resources for one in placed if one.node == node.node]
        return all(
            sum(other.get(name, 0.0) for other in taken) + amount <= node.resources.get(name, 0.0)
            for name, amount in needs.resources.items()
        )

    found = [(of_group[node.node], of_all[node.node], node.node) for node in nodes if has_room(node)]
    return min(found, default=(0, 0, ""))[2]


def matches(labels: Mapping[str, str], name: str, wanted: str) -> bool:
    """Return whether a node with these labels is one that a term of a label selector of Ray allows."""
    is_denied, wanted = wanted.startswith("!"), wanted.removeprefix("!")
    values = [wanted]
    if wanted.startswith("in(") and wanted.endswith(")"):
        values = [value.strip() for value in wanted[3:-1].split(",")]
    return (labels.get(name) in values) is not is_denied


def selected(labels: Mapping[str, str], avoid: Collection[str]) -> dict[str, Any]:
    """Return the options of a Ray actor for any node that the labels allow and `avoid` does not name."""
    terms = dict(labels)
    if avoid:
        terms[NODE_LABEL] = f"!in({','.join(avoid)})"
    return {"label_selector": terms} if terms else {}


def alive_nodes(listed: Iterable[Mapping[str, Any]]) -> list[RayNode]:
    """Convert `ray.nodes()`."""
    return [
        RayNode(node["NodeID"], node.get("Resources", {}), node.get("Labels", {}))
        for node in listed
        if node.get("Alive")
    ]


def group_of(kind: str, model: str, role: Role) -> str:
    """Return the group of the processes of a kind that serve one pool of a model."""
    return f"{kind} {model} {role}"


class NodeChoice:
    """Remembers where the processes of one control plane are, and chooses nodes for more."""

    def __init__(self) -> None:
        self._nodes: Sequence[RayNode] = ()
        self._placed: dict[str, Placed] = {}

    def on_nodes(self, listed: Iterable[Mapping[str, Any]]) -> None:
        """Take over `ray.nodes()`."""
        self._nodes = alive_nodes(listed)

    def options(self, name: str, group: str, needs: Needs, *, avoid: Sequence[str] = ()) -> dict[str, Any]:
        """Choose a node for a new process, and return the options of a Ray actor that bring it there. They
        allow other nodes if that one is full or gone, but none of `avoid`."""
        allowed = selected(needs.labels, avoid)
        node = choose_node(self._nodes, self._placed.values(), group, needs, avoid)
        self._placed[name] = Placed(group, node, needs)
        if not node:
            return {"scheduling_strategy": "SPREAD", **allowed}
        # Ray wants a selector with a term as fallback; this term allows every node but the one chosen, which
        # has been refused by then.
        others = allowed or {"label_selector": {NODE_LABEL: f"!in({node})"}}
        return {
            "scheduling_strategy": "SPREAD",
            "label_selector": {**needs.labels, NODE_LABEL: f"in({node})"},
            "fallback_strategy": [others],
        }

    def found(self, name: str, group: str, node: str, needs: Needs = NOTHING) -> None:
        """Note on which node a process is, and what it needs if its node was not chosen here."""
        known = self._placed.get(name)
        self._placed[name] = Placed(group, node, known.needs if known is not None else needs)

    def regroup(self, name: str, group: str) -> None:
        """Note that a process is of another group now."""
        known = self._placed.get(name)
        if known is not None:
            self._placed[name] = replace(known, group=group)

    def forget(self, name: str) -> None:
        """Forget a process that has ended."""
        self._placed.pop(name, None)
