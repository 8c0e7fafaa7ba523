"""The reaper ends what a killed process leaves, and nothing else."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from control_plane.reaper import RUN_VARIABLE, Reaper, end_run, of_run

BOUND_S = 30.0
WAITS = "import sys; print(flush=True); sys.stdin.read()"
STARTS_ANOTHER = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {WAITS!r}], stdin=subprocess.PIPE, env={{}})
print(child.pid, flush=True)
child.wait()
"""
PARENT = f"""
import subprocess, sys
from pathlib import Path
from control_plane.reaper import Reaper
reaper = Reaper(Path(sys.argv[1]))
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
child = subprocess.Popen([sys.executable, "-c", {WAITS!r}], **pipes)
print(reaper.pid, child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start():
    """Start programs, and return them with their first line of output."""
    begun = []

    def begin(program, *args, **variables):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        env = {**os.environ, **variables}
        process = subprocess.Popen([sys.executable, "-c", program, *args], env=env, **pipes)
        begun.append(process)
        return process, process.stdout.readline().split()

    yield begin
    for process in begun:
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(process.pid).children(recursive=True):
                one.kill()
        process.kill()
        process.communicate()


ENDS_IN_ORDER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1], "w").close(), sys.exit()))
print(flush=True)
sys.stdin.read()
"""


def test_a_stopped_process_ends_in_order_too(start, tmp_path):
    process, _ = start(ENDS_IN_ORDER, str(tmp_path / "ended"), **{RUN_VARIABLE: "a3"})
    process.send_signal(signal.SIGSTOP)
    end_run("a3", steps=((signal.SIGTERM, BOUND_S),))
    assert (process.wait(BOUND_S), (tmp_path / "ended").exists()) == (0, True)


def test_marked_processes_and_all_below_them_are_of_a_run_and_are_ended(start):
    first, (below,) = start(STARTS_ANOTHER, **{RUN_VARIABLE: "a1"})
    other, _ = start(WAITS, **{RUN_VARIABLE: "a2"})
    assert of_run("a1").keys() == {first.pid, int(below)}
    end_run("a1", steps=((9, BOUND_S),))
    assert of_run("a1") == {}
    assert first.wait(BOUND_S) == -9
    assert of_run("a2").keys() == {other.pid}


def test_who_is_killed_is_followed_by_what_it_started_and_its_folder_goes(start, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "dashboard.token").write_text("secret")
    parent, pids = start(PARENT, str(folder))
    reaper, child = (psutil.Process(int(pid)) for pid in pids)
    parent.kill()
    child.wait(BOUND_S)
    reaper.wait(BOUND_S)
    assert not folder.exists()


def test_who_ends_in_good_order_leaves_what_it_wants(start, monkeypatch, tmp_path):
    monkeypatch.setenv(RUN_VARIABLE, "before")
    reaper = Reaper(tmp_path)
    run = os.environ[RUN_VARIABLE]
    other, _ = start(WAITS)
    assert of_run(run).keys() == {other.pid}
    reaper.close()
    reaper.close()
    assert os.environ[RUN_VARIABLE] == "before"
    assert of_run(run).keys() == {other.pid}
    assert tmp_path.exists()
