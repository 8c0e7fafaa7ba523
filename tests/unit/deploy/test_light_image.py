"""What runs in the image without torch is importable without it, and without all else that workers need."""

import re
import subprocess
import sys

from tests.unit.deploy.chart import ROOT

HIDE = """
import sys
from importlib.machinery import PathFinder
gone, found = set(sys.argv[1].split(",")), PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.split(".")[0] in gone else found(name, path, target)
PathFinder.find_spec = staticmethod(find_spec)
"""
PROCESSES = (
    *("router.process", "control_plane.launch", "loadgen.cli", "commands.serve", "commands.doctor"),
    *("worker.actor", "worker.leave", "ray"),
)


def test_processes_of_the_light_image_need_nothing_of_the_workers():
    extra = re.search(r"^worker = \[(.+)\]$", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    names = [re.match(r"[A-Za-z]+", name)[0] for name in re.findall(r'"([^"]+)"', extra)]
    assert {"torch", "nixl", "triton", "xgrammar"} <= set(names)
    code = (
        HIDE + "".join(f"import {name}\n" for name in PROCESSES) + "print(sorted(gone & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, ",".join(names)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]
