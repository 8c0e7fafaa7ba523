"""Ranks as processes: a server that forks them, and a client for tests.

The server imports torch once, starts no thread, and forks each rank of each run from itself, which takes
milliseconds. It may send a signal to one rank when all ranks are at work.

`python -m tests.unit.engine.parallel.rank_processes` is the server: a line of JSON in, a line of JSON out.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[4]
NAME = "baton-ranks"
"""The shared memory's name in /proc."""


class RankProcesses:
    """The client."""

    def __init__(self):
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.engine.parallel.rank_processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def run(self, scenario, size, *, victim=None, signal_name="", **options):
        """What each rank says at its end: {"result": …}, {"broken": reason}, or {"died": signal}.

        The rank `victim` gets the signal when all ranks have said that they are at work.
        """
        request = {
            "scenario": scenario,
            "size": size,
            "victim": victim,
            "signal": signal_name,
            "options": options,
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        assert line, "the server of ranks has ended"
        return json.loads(line)

    def close(self):
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()


class Teller:
    """A rank's line to the server."""

    def __init__(self, fd):
        self._fd = fd

    def tell(self, **what):
        os.write(self._fd, json.dumps(what).encode() + b"\n")

    def at_work(self):
        self.tell(at_work=True)


def traces():
    """Where this process still has shared memory of ranks."""
    maps = Path("/proc/self/maps").read_text().count(NAME)
    return maps + sum(NAME in _opened(fd) for fd in os.listdir("/proc/self/fd"))


def _opened(fd):
    """The path behind a descriptor, or "" if another thread has closed it meanwhile."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def _fork(request, rank, address):
    """(process, the end of its pipe to read from) of a new rank."""
    from tests.unit.engine.parallel import scenarios

    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return process, os.fdopen(reader)
    try:
        os.close(reader)
        teller = Teller(writer)
        try:
            scenario = getattr(scenarios, request["scenario"])
            scenario(teller, rank, request["size"], address, **request["options"])
        except Exception:
            teller.tell(error=traceback.format_exc())
    finally:
        os._exit(0)


def _serve_one(request):
    ranks = [_fork(request, 0, None)]
    address = json.loads(ranks[0][1].readline())["address"]
    ranks += [_fork(request, rank, address) for rank in range(1, request["size"])]
    victim = request["victim"]
    if victim is not None:
        for _, pipe in ranks:
            line = pipe.readline()
            assert "at_work" in line, line
        os.kill(ranks[victim][0], getattr(signal, request["signal"]))
    told = {rank: ranks[rank][1].read().splitlines() for rank in range(len(ranks)) if rank != victim}
    if victim is not None:
        if request["signal"] == "SIGSTOP":
            os.kill(ranks[victim][0], signal.SIGCONT)
        told[victim] = ranks[victim][1].read().splitlines()
    outcomes = []
    for rank, (process, pipe) in enumerate(ranks):
        pipe.close()
        status = os.waitpid(process, 0)[1]
        last = json.loads(told[rank][-1]) if told[rank] else {}
        outcomes.append({"died": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else last)
    return outcomes


def main():
    import torch

    from engine.parallel import order_channel, shared_memory
    from tests.certificates import secure_tests

    secure_tests()
    torch.set_num_threads(1)
    shared_memory._functions()
    order_channel._functions()
    for line in sys.stdin:
        print(json.dumps(_serve_one(json.loads(line))), flush=True)
    assert not traces()


if __name__ == "__main__":
    main()
