"""The node of a new process: its group loses as little as possible with any node."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.node_choice import (
    NODE_LABEL,
    Needs,
    NodeChoice,
    Placed,
    RayNode,
    alive_nodes,
    choose_node,
    matches,
)

ONE = Needs({"CPU": 1.0, "GPU": 0.0}, {})


def listed(*cpus, **labels):
    return [
        {"NodeID": f"n{i}", "Alive": True, "Resources": {"CPU": count}, "Labels": dict(labels)}
        for i, count in enumerate(cpus)
    ]


def node_in(options):
    return options["label_selector"][NODE_LABEL].removeprefix("in(").removesuffix(")")


@given(st.lists(st.sampled_from(["prefill", "decode", "rank"]), max_size=24), st.integers(2, 5))
def test_in_whatever_order_groups_ask_each_is_spread_evenly(asked, node_count):
    """Three pools and three nodes or more: what one group asks never decides where another's next one is."""
    choice = NodeChoice()
    choice.on_nodes(listed(*[float("inf")] * node_count))
    nodes = {group: Counter() for group in asked}
    for number, group in enumerate(asked):
        nodes[group][node_in(choice.options(f"{group}-{number}", group, ONE))] += 1
    for counts in nodes.values():
        on_each = [counts[f"n{i}"] for i in range(node_count)]
        assert max(on_each) - min(on_each) <= 1


def test_nodes_without_room_are_left_out_and_those_that_end_make_room():
    choice = NodeChoice()
    choice.on_nodes(listed(0, 2, 1))
    first = [node_in(choice.options(str(number), "g", ONE)) for number in range(3)]
    assert Counter(first) == {"n1": 2, "n2": 1}
    assert choice.options("3", "g", ONE) == {"scheduling_strategy": "SPREAD"}, "Ray waits for room"
    choice.forget("2")
    assert node_in(choice.options("4", "g", ONE)) == first[2]


def test_where_ray_really_put_a_process_counts():
    choice = NodeChoice()
    choice.on_nodes(listed(9, 9))
    assert node_in(choice.options("a", "g", ONE)) == "n0"
    choice.found("a", "g", "n1")
    assert node_in(choice.options("b", "g", ONE)) == "n0"
    choice.found("adopted", "h", "n0")
    assert node_in(choice.options("c", "h", ONE)) == "n1"


def test_a_worker_whose_role_was_switched_counts_in_its_new_pool():
    choice = NodeChoice()
    choice.on_nodes(listed(9, 9))
    for name, group in (("d0", "decode"), ("d1", "decode"), ("p0", "prefill"), ("p1", "prefill")):
        choice.options(name, group, ONE)
    choice.regroup("p0", "decode")
    choice.regroup("gone", "decode")
    assert node_in(choice.options("d2", "decode", ONE)) == "n1"


def test_drained_and_dead_nodes_are_not_chosen_and_are_not_fallen_back_to():
    choice = NodeChoice()
    choice.on_nodes([*listed(9, 9, 9), {"NodeID": "n3", "Alive": False, "Resources": {"CPU": 9}}])
    options = choice.options("a", "g", ONE, avoid=("n0", "n1"))
    assert node_in(options) == "n2"
    assert options["fallback_strategy"] == [{"label_selector": {NODE_LABEL: "!in(n0,n1)"}}]
    assert choice.options("b", "g", ONE)["fallback_strategy"] == [
        {"label_selector": {NODE_LABEL: "!in(n0)"}}
    ], "any other node will do"
    nothing = choice.options("c", "g", ONE, avoid=("n0", "n1", "n2"))
    assert nothing["label_selector"] == {NODE_LABEL: "!in(n0,n1,n2)"}


def test_labels_and_resources_of_the_operator_hold():
    nodes = [
        RayNode("n0", {"CPU": 4, "rdma": 1}, {"gpu": "H100"}),
        RayNode("n1", {"CPU": 4}, {"gpu": "H100"}),
        RayNode("n2", {"CPU": 4, "rdma": 1}, {"gpu": "L4"}),
    ]
    needs = Needs({"CPU": 1, "rdma": 1}, {"gpu": "in(H100, H200)"})
    assert choose_node(nodes, [], "g", needs) == "n0"
    assert choose_node(nodes, [Placed("other", "n0", needs)], "g", needs) == "", "its rdma is taken"
    assert choose_node(nodes, [], "g", Needs({"CPU": 5}, {})) == ""


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ("H100", True),
        ("L4", False),
        ("!L4", True),
        ("!H100", False),
        ("in(L4, H100)", True),
        ("!in(L4,H100)", False),
        ("in(L4)", False),
    ],
)
def test_terms_of_a_label_selector(wanted, fits):
    assert matches({"gpu": "H100"}, "gpu", wanted) is fits
    assert matches({}, "gpu", wanted) is wanted.startswith("!")


def test_nodes_as_ray_lists_them():
    found = alive_nodes([{"NodeID": "a", "Alive": True}, {"NodeID": "b", "Alive": False}])
    assert found == [RayNode("a", {}, {})]
