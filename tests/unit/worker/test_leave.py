import pytest

from baton.wire.link import LinkBroken
from baton.wire.services import WorkerStatusReply
from worker import leave as module
from worker.core_status import WorkerCounts
from worker.leave import arguments, leave, still_held


class Worker:
    """As the pod's own one answers; each look takes the next of `accounts`, the last one stays."""

    def __init__(self, *accounts):
        self.accounts, self.drained = list(accounts), []

    async def drain(self, address):
        self.drained.append(address)

    async def status(self, address):
        assert self.drained == [address], "asked before it was told"
        accounts = self.accounts.pop(0) if len(self.accounts) > 1 else self.accounts[0]
        if accounts is None:
            raise LinkBroken("gone")
        return WorkerStatusReply("w", "decode", True, "f", accounts, ())


@pytest.fixture
def played(monkeypatch):
    def play(*accounts):
        worker = Worker(*accounts)
        monkeypatch.setattr(module, "drain_worker", worker.drain)
        monkeypatch.setattr(module, "worker_status", worker.status)
        monkeypatch.setattr(module, "LOOK_S", 0.001)
        return worker

    return play


async def test_it_waits_until_the_worker_holds_nothing(played):
    worker = played({"running_count": 2.0}, {"lease_count": 1.0}, {"running_count": 0.0, "held_blocks": 0.0})
    assert await leave("w:1", timeout_s=30) == "empty"
    assert len(worker.accounts) == 1, "it looked until it was empty"


async def test_it_ends_in_time_and_says_what_is_left(played):
    played({"running_count": 2.0, "free_blocks": 9.0})
    assert await leave("w:1", timeout_s=0.02) == "not empty after 0.02 s: {'running_count': 2.0}"


async def test_a_worker_that_ends_meanwhile_or_is_not_there_is_no_error(played):
    played({"running_count": 2.0}, None)
    assert await leave("w:1", timeout_s=30) == "no worker: gone"


async def test_nobody_there():
    assert (await leave("127.0.0.1:1", timeout_s=10)).startswith("no worker: ")


def test_what_counts_as_held_are_accounts_that_workers_have():
    assert set(module.HELD) <= set(WorkerCounts.__struct_fields__)
    assert still_held({"running_count": 0.0, "waiting_count": 1.0, "pid": 7.0}) == {"waiting_count": 1.0}
    assert arguments().parse_args(["h:1"]).timeout_s == 30
