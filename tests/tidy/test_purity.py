"""Decisions ask nobody for the time, for chance or for the contents of a file.

The import contract in pyproject.toml keeps modules out that do IO. Some things need no import that it could
see, because the same module has pure uses: `random.Random(seed)` is a value, `random.random()` is a global.
"""

import ast
import tomllib

from tests.tidy.imports import ROOT, SOURCES, chain, graph, reachable, tree_of

CONTRACT = "Decisions are pure"
BUILTINS = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}
ALLOWED = {
    "random": {"Random"},
    "np.random": {"default_rng", "Generator"},
    "numpy.random": {"default_rng", "Generator"},
}
"""What may be used of a module whose other names share hidden state."""
CLOCKS = {"now", "utcnow", "today"}
DATES = {"datetime", "date"}


def pure_modules():
    """The contract's modules, and everything of ours that they import."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    roots = next(c["source_modules"] for c in contracts if c["name"].startswith(CONTRACT))
    starts = [m for m in SOURCES for root in roots if m == root or m.startswith(f"{root}.")]
    assert all(root in SOURCES for root in roots)
    return reachable(graph(), starts)


def hidden_state(tree):
    """Uses of a global random generator, of today's date, or of a builtin that does IO."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=attr) if (owner := ast.unparse(value)) in ALLOWED:
                if attr not in ALLOWED[owner]:
                    yield f"line {node.lineno}: {owner}.{attr}"
            case ast.ImportFrom(module=module, names=names) if module in ALLOWED:
                if bad := {alias.name for alias in names} - ALLOWED[module]:
                    yield f"line {node.lineno}: {module}.{min(bad)}"
            case ast.Attribute(value=value, attr=attr) if attr in CLOCKS:
                if ast.unparse(value).rsplit(".", 1)[-1] in DATES:
                    yield f"line {node.lineno}: {ast.unparse(node)}"
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                yield f"line {node.lineno}: {name}()"
            case _:
                pass


def test_decisions_have_no_hidden_state():
    modules = pure_modules()
    found = [f"{chain(modules, m)} {what}" for m in modules for what in hidden_state(tree_of(m))]
    assert found == []


def test_hidden_state_is_found():
    text = """
import random, datetime as dt
from random import choice, Random
from datetime import datetime
a = random.Random(7).random()
b = random.random()
c = datetime.now()
d = dt.date.today()
e = open("file")
f = np.random.default_rng(3)
g = np.random.rand()
"""
    found = [what.split(": ")[1] for what in hidden_state(ast.parse(text))]
    assert sorted(found) == [
        *("datetime.now", "dt.date.today", "np.random.rand", "open()", "random.choice", "random.random"),
    ]
