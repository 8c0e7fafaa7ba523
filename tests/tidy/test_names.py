"""Each class name stands for one class, so that a name alone says which thing is meant."""

import ast
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_OURS = ("tests/", "baton/wire/proto/")


def classes(source):
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def shared_names(sources):
    places = defaultdict(list)
    for path, source in sources.items():
        for name in classes(source):
            places[name].append(path)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_each_class_name_exists_once():
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [
        path for path in listed.stdout.split() if not path.startswith(NOT_OURS) and (ROOT / path).exists()
    ]
    assert len(paths) > 300
    assert shared_names({path: (ROOT / path).read_text() for path in paths}) == {}


def test_a_shared_name_is_noticed():
    assert shared_names({"a.py": "class A: ...", "b.py": "class A: ...\nclass B: ..."}) == {
        "A": ["a.py", "b.py"]
    }
