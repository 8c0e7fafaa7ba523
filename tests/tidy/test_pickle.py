"""Bytes that come over a network never decide what code runs here."""

import ast

from tests.tidy.test_tidy import PYTHON, ROOT

MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {
    *("load_module", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "send_pyobj", "recv_pyobj"),
}
"""Functions of torch.distributed and others that pickle."""

PIPES = {
    # Pipes between a process and its own children: no socket, nobody else has an end.
    *(
        "simulator/faults/runner.py",
        "benchmarks/hedging.py",
        "benchmarks/placement.py",
        "benchmarks/autoscale.py",
        "benchmarks/experts/processes.py",
        "benchmarks/transfer.py",
    ),
    *("loadgen/sender_processes.py", "loadgen/senders.py"),
}
CODE = [p for p in PYTHON if p.relative_to(ROOT).parts[0] != "tests"]


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}


def test_nothing_of_ours_pickles():
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in CODE
        for name in imports(ast.parse(path.read_text()))
        if name.split(".")[0] in MODULES
    ]
    assert found == []


def test_multiprocessing_is_for_pipes_to_children():
    users = {
        str(path.relative_to(ROOT))
        for path in CODE
        if any(name.split(".")[0] == "multiprocessing" for name in imports(ast.parse(path.read_text())))
    }
    assert users == PIPES
    for path in CODE:
        names = {name.split(".")[-1] for name, _ in calls(ast.parse(path.read_text()))}
        assert not names & {"Listener", "Client"} or str(path.relative_to(ROOT)) not in PIPES


def test_what_loads_objects_from_bytes_is_not_called():
    bad = []
    for path in CODE:
        for name, options in calls(ast.parse(path.read_text())):
            last = name.rsplit(".", 1)[-1]
            loads = name == "torch.load" and options.get("weights_only") != "True"
            arrays = options.get("allow_pickle") == "True"
            unsafe_yaml = name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load")
            if last in CALLS or loads or arrays or unsafe_yaml or name in ("eval", "exec"):
                bad.append(f"{path.relative_to(ROOT)}: {name}")
    assert bad == []
