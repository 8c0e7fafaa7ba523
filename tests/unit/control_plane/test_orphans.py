"""Adopted orphans leave no zombie behind, and children that somebody waits for keep their status. Each case
is a process of its own, since a process that adopts cannot give that up."""

import subprocess
import sys
from pathlib import Path

import pytest

START = """
import asyncio, os, select, subprocess, sys, time
import psutil
import control_plane.orphans
from control_plane.orphans import OrphanWatch, adopt_orphans

def zombies():
    return [c.pid for c in psutil.Process().children() if c.status() == psutil.STATUS_ZOMBIE]

def until(holds):
    ends_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < ends_s
        select.select((), (), (), 0.01)

def python(script):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", script], **pipes)

adopt_orphans()
"""

ORPHAN = """
watch = OrphanWatch()
parent = python('''
import os, sys
if os.fork() == 0:
    os.read(0, 1)  # until the grandparent closes the pipe
    os._exit(3)
os.write(1, b".")
os.kill(os.getpid(), 9)
''')
parent.stdout.read(1)
parent.wait()
parent.stdin.close()
until(zombies)
watch.look()
assert zombies(), "somebody may still ask for its status"
watch.look()
assert not zombies()
watch.look()  # there is no child at all
"""

RUNS_AT_THE_START = """
child = python("import os; os.read(0, 1); raise SystemExit(7)")
watch = OrphanWatch()
child.stdin.close()
until(zombies)
for _ in range(3):
    watch.look()
assert child.wait() == 7
"""

ASYNCIO = """
async def main():
    watch = asyncio.create_task(OrphanWatch().run())
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(7)")
    assert await child.wait() == 7
    watch.cancel()

control_plane.orphans.LOOK_S = 0.2
asyncio.run(main())
"""


@pytest.mark.parametrize("case", [ORPHAN, RUNS_AT_THE_START, ASYNCIO], ids=["orphan", "popen", "asyncio"])
def test_the_status_of_orphans_and_of_nobody_else_is_taken(case):
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", START + case]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
