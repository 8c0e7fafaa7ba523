"""Imports point downwards between the rooms, never in circles, and no room grows too large."""

import ast
from collections import Counter

from tests.tidy.imports import SOURCES, circles, graph, imported_names, parents

LAYERS = (
    "commands",
    "benchmarks",
    "simulator",
    "worker",
    "control_plane loadgen",
    "router prefill_worker decode_worker",
    "kv_store",
    "kv_transfer engine",
    "baton.wire",
    "baton.telemetry",
    "baton.files",
    "baton.config",
    "baton.core",
)
"""Rooms from the roof to the cellar. Those of one line are neighbours, which do not import each other."""
HEIGHT = {room: -line for line, names in enumerate(LAYERS) for room in names.split()}
ENTRY_POINT = "baton.__main__"
ROOM_SHARE_MAX = 0.25


def room_of(module):
    return next((part for part in parents(module) if part in HEIGHT), None)


def arrows(edges):
    """(importer, imported) of every import from one room to another."""
    for module, imported in edges.items():
        for other in imported:
            if room_of(module) != room_of(other):
                yield module, other


def upward(edges):
    return [
        f"{module} -> {other}"
        for module, other in sorted(arrows(edges))
        if module != ENTRY_POINT and HEIGHT[room_of(module)] <= HEIGHT[room_of(other)]
    ]


def test_every_module_lies_in_a_room():
    assert [m for m in SOURCES if room_of(m) is None and m not in ("baton", ENTRY_POINT)] == []


def test_no_import_points_upwards_except_from_the_entry_point():
    assert upward(graph()) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circles(graph()) == []


def test_rooms_do_not_import_each_other_in_circles():
    rooms = {}
    for module, other in arrows(graph()):
        if module != ENTRY_POINT:
            rooms.setdefault(room_of(module), set()).add(room_of(other))
    assert circles(rooms) == []


def test_folders_of_a_room_do_not_import_each_other_in_circles():
    folders = {}
    for module, imported in graph().items():
        for other in imported:
            one, two = (".".join(name.split(".")[:2]) for name in (module, other))
            if one != two and one.split(".")[0] == two.split(".")[0] and ENTRY_POINT not in (one, two):
                folders.setdefault(one, set()).add(two)
    assert circles(folders) == []


def test_no_room_holds_more_than_a_quarter_of_the_lines():
    lines = Counter()
    for module, path in SOURCES.items():
        lines[module.split(".")[0]] += path.read_text().count("\n")
    large = {room: count for room, count in lines.items() if count > ROOM_SHARE_MAX * lines.total()}
    assert large == {}


# --- the checks themselves ------------------------------------------------------------------------------


def test_imports_are_seen_wherever_they_stand():
    text = """
import a.b
from typing import TYPE_CHECKING
from . import sibling
from ..above import thing
if TYPE_CHECKING:
    from c import D
def late():
    from e.f import g
"""
    assert set(imported_names(ast.parse(text), "room.cellar")) == {
        *("a.b", "typing.TYPE_CHECKING", "room.cellar.sibling", "room.above.thing", "c.D", "e.f.g"),
    }


def test_a_circle_is_found_and_a_tree_is_none():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_an_arrow_upwards_is_found():
    edges = {
        "router.http.app": {"commands.serve"},
        "router.a": {"decode_worker.b"},
        "worker.core": {"router.a"},
    }
    assert upward(edges) == ["router.a -> decode_worker.b", "router.http.app -> commands.serve"]
