"""A child process knows whether its parent is there, also where the parent is process 1 of a container."""

import os
import subprocess
import sys

import pytest

from commands.serve import die_with_parent
from control_plane.child import PARENT_VARIABLE, Child
from control_plane.reconcile_events import RestartPolicy

REPORT = f"import os; print('ready', os.environ['{PARENT_VARIABLE}'], os.getppid(), flush=True)"


@pytest.fixture(autouse=True)
def no_signal(monkeypatch):
    """The tests' own process must not be ended with its parent."""
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: (_ for _ in ()).throw(OSError()))


@pytest.mark.parametrize(("named", "parent"), [("1", 1), ("77", 77), ("", 1)])
def test_a_child_of_any_living_parent_goes_on(monkeypatch, named, parent):
    monkeypatch.setenv(PARENT_VARIABLE, named)
    monkeypatch.setattr(os, "getppid", lambda: parent)
    die_with_parent()


def test_a_child_whose_parent_is_gone_ends(monkeypatch):
    monkeypatch.setenv(PARENT_VARIABLE, "77")
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(SystemExit):
        die_with_parent()


class _Short(Child):
    def live_url(self, ready):
        return "http://127.0.0.1:9"


async def test_a_supervisor_names_itself_to_its_children():
    policy = RestartPolicy(0.1, 0.1, 60.0, 1.0, 1.0)
    child = _Short([sys.executable, "-c", REPORT], environment=os.environ, policy=policy, silence_s=60)
    await child._run_once()
    named, parent = (await child.ready).split()
    assert named == parent == str(os.getpid())


def test_process_one_may_be_the_parent():
    """The real thing: a shell that is process 1 of its namespace starts a child, which goes on."""
    child = f"{sys.executable} -c 'from commands.serve import *; die_with_parent()'"
    script = f"{PARENT_VARIABLE}=$$ {child} && echo on"
    command = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unshare" in done.stderr:
        pytest.skip(f"namespaces are not allowed here: {done.stderr.strip()}")
    assert done.stdout == "on\n", done.stderr
