"""The graph of imports between our modules, read from their syntax.

Every import statement counts: those at the head of a file, those inside a function and those under
TYPE_CHECKING. A circle that only the last two hide is a circle for its reader all the same.
"""

import ast
from functools import cache

from tests.tidy.test_tidy import PYTHON, ROOT


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for path in PYTHON
    if path.relative_to(ROOT).parts[0] not in ("tests", "docs", "deploy")
}
"""Production modules by name; what is generated is not among them, and neither are examples and the scripts
of images."""


@cache
def tree_of(module):
    return ast.parse(SOURCES[module].read_text())


def imported_names(tree, package):
    """Dotted names that a file imports: `from a import b` gives `a.b`, whether b is a module or not.

    `package` is the dotted name of the folder that the file lies in.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folders = package.split(".") if node.level else []
            base = [*folders[: len(folders) - node.level + 1], *([node.module] if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)


def names_imported_by(module):
    path = SOURCES[module]
    return set(imported_names(tree_of(module), ".".join(path.parent.relative_to(ROOT).parts)))


def parents(name):
    """A dotted name and all names above it, the longest first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


@cache
def graph():
    """Module -> modules of ours that it imports."""
    return {
        module: {
            found
            for name in names_imported_by(module)
            if (found := next((part for part in parents(name) if part in SOURCES), None))
        }
        - {module}
        for module in SOURCES
    }


def circles(edges):
    """The strongly connected components of more than one node (Tarjan), each sorted."""
    order, low, stack, found = {}, {}, [], []

    def visit(node):
        order[node] = low[node] = len(order)
        stack.append(node)
        for after in sorted(edges.get(node, ())):
            if after not in order:
                visit(after)
                low[node] = min(low[node], low[after])
            elif after in stack:
                low[node] = min(low[node], order[after])
        if low[node] == order[node]:
            component = [stack.pop()]
            while component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(edges):
        if node not in order:
            visit(node)
    return found


def reachable(edges, starts):
    """Node -> the node that led to it, for all nodes that can be reached; None for the starts."""
    came_from = dict.fromkeys(starts)
    pending = list(starts)
    for node in pending:
        for after in sorted(edges.get(node, ())):
            if after not in came_from:
                came_from[after] = node
                pending.append(after)
    return came_from


def chain(came_from, node):
    """How `node` was reached, as text."""
    steps = [node]
    while came_from[steps[-1]] is not None:
        steps.append(came_from[steps[-1]])
    return " <- ".join(steps)
