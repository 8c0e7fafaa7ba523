"""Calls that a device carries out later, with a device that the test pretends to have."""

import contextlib
import threading

import pytest
import torch

from engine.parallel.enqueued import EnqueuedCalls
from engine.parallel.group import GroupBroken
from engine.parallel.torch_group import TorchGroup
from tests.unit.engine.parallel.threads import on_all, shared_memory_groups, values

WAIT_S = 60.0


class Watched:
    """An `EnqueuedCalls` with a clock that stands still until it is set."""

    def __init__(self, deadline_s=5.0):
        self.now_s, self.reason = 0.0, ""
        self.ended, self.reasons, self.looked = threading.Event(), [], threading.Semaphore(0)
        self.calls = EnqueuedCalls(self._look, self._end, deadline_s=deadline_s, clock=lambda: self.now_s)

    def _look(self):
        self.looked.release()
        return self.reason

    def _end(self, reason):
        self.reasons.append(reason)
        self.ended.set()

    def look_twice(self):
        """The second look began after this was called."""
        while self.looked.acquire(blocking=False):
            pass
        assert self.looked.acquire(timeout=WAIT_S)
        assert self.looked.acquire(timeout=WAIT_S)


@pytest.fixture
def watched():
    made = Watched()
    yield made
    made.calls.close()


def test_a_lost_rank_ends_what_is_enqueued(watched):
    watched.reason = "rank 1 has died"
    assert watched.ended.wait(WAIT_S)
    assert watched.reasons == ["rank 1 has died"]


def test_what_is_enqueued_ends_at_the_deadline_of_the_first_call(watched):
    watched.calls.begun("all_reduce")
    watched.now_s = 4.0
    watched.calls.begun("gather")
    watched.look_twice()
    assert not watched.ended.is_set()
    watched.now_s = 5.5
    assert watched.ended.wait(WAIT_S)
    assert "in time: all_reduce" in watched.reasons[0]


def test_what_has_ended_has_no_deadline(watched):
    watched.calls.begun("all_reduce")
    watched.calls.settled()
    watched.now_s = 100.0
    watched.calls.begun("gather")
    watched.look_twice()
    assert not watched.ended.is_set()


# --- a group on a device --------------------------------------------------------------------------------


class PretendedEvent:
    """A device that is done with everything while `is_done` is set."""

    is_done = True

    def record(self):
        pass

    def query(self):
        return type(self).is_done


@pytest.fixture
def device_groups(monkeypatch):
    """Two ranks that take host memory, and gloo, for a device's: what is tested is who waits for whom."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", PretendedEvent)
    monkeypatch.setattr(PretendedEvent, "is_done", True)
    made = []

    def make(deadline_s):
        options = {"device": torch.device("cpu"), "host": "127.0.0.1", "deadline_s": deadline_s}
        groups = [TorchGroup(control, **options) for control in shared_memory_groups(2)]
        made.extend(groups)
        values(on_all(groups, lambda group: group.wait_for_all(timeout_s=WAIT_S)))
        for group in groups:
            group._is_cuda = True
            group._enqueued = EnqueuedCalls(group._control.watch, group._end, deadline_s=deadline_s)
        return groups

    yield make
    for group in made:
        group.close()


def test_calls_of_a_device_need_no_agreement_of_the_hosts(device_groups):
    groups = device_groups(WAIT_S)
    for group in groups:
        group._control.all_gather = None

    def run(group):
        x = group.all_reduce_(torch.full((5,), group.rank + 1.0))
        rows = group.gather(torch.full((2, 1 + group.rank), float(group.rank)), 1, sizes=[1, 2])
        group.settle()
        return x.tolist(), None if rows is None else rows.tolist()

    assert values(on_all(groups, run)) == [([3.0] * 5, [[0.0, 1.0, 1.0]] * 2), ([3.0] * 5, None)]


def test_settle_raises_when_the_device_is_not_done_in_time(device_groups):
    groups = device_groups(0.01)
    PretendedEvent.is_done = False
    groups[0]._enqueued.begun("all_reduce")
    with pytest.raises(GroupBroken, match="in time: all_reduce"):
        groups[0].settle()
    with pytest.raises(GroupBroken, match="in time"):
        groups[0].all_reduce_(torch.ones(3))


def test_settle_raises_when_another_rank_gives_up_or_leaves(device_groups):
    groups = device_groups(WAIT_S)
    PretendedEvent.is_done = False
    results = on_all(groups, lambda g: g.settle() if g.rank == 0 else g.abort("rank 1 has had enough"))
    assert str(results[0]) == "rank 1 has had enough"
    with pytest.raises(GroupBroken, match="had enough"):
        groups[1].settle()


def test_what_a_device_sends_is_kept_until_it_has_left(device_groups):
    groups = device_groups(WAIT_S)

    class Sent:
        is_done = False

        def is_completed(self):
            return self.is_done

    sent = []

    class Library:
        def send(self, tensors, to, tag):
            sent.append(Sent())
            return sent[-1]

        def abort(self):
            pass

    groups[0]._library = Library()
    groups[0].send(torch.ones(3), 1)
    groups[0].send(torch.ones(3), 1)
    assert list(groups[0]._unsent) == sent
    sent[0].is_done = True
    groups[0].send(torch.ones(3), 1)
    assert list(groups[0]._unsent) == sent[1:]
