"""Ranks as processes, which `tests.forked` forks, and a client for tests.

It may send a signal to one rank when all ranks are at work.
"""

import json
import os
import signal
from pathlib import Path

from tests.forked import fork_server

NAME = "baton-ranks"
"""The shared memory's name in /proc."""
BE_RANK = "tests.unit.engine.parallel.scenarios:be_rank"


class RankProcesses:
    def run(self, scenario, size, *, victim=None, signal_name="", **options):
        """What each rank says at its end: {"result": …}, {"broken": reason}, or {"died": signal}.

        The rank `victim` gets the signal when all ranks have said that they are at work.
        """

        def started(rank, address):
            arguments = [scenario, json.dumps([rank, size, address]), json.dumps(options)]
            return fork_server().start(BE_RANK, arguments, pipes=True)

        ranks = [started(0, None)]
        address = json.loads(ranks[0].stdout.readline())["address"]
        ranks += [started(rank, address) for rank in range(1, size)]
        if victim is not None:
            for rank in ranks:
                line = rank.stdout.readline()
                assert "at_work" in line, line
            os.kill(ranks[victim].pid, getattr(signal, signal_name))
        told = {rank: ranks[rank].stdout.read().splitlines() for rank in range(size) if rank != victim}
        if victim is not None:
            if signal_name == "SIGSTOP":
                os.kill(ranks[victim].pid, signal.SIGCONT)
            told[victim] = ranks[victim].stdout.read().splitlines()
        outcomes = []
        for number, rank in enumerate(ranks):
            rank.communicate()
            last = json.loads(told[number][-1]) if told[number] else {}
            outcomes.append({"died": -rank.returncode} if rank.returncode < 0 else last)
        return outcomes


class Teller:
    """A rank's line to the test."""

    def tell(self, **what):
        print(json.dumps(what), flush=True)

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
