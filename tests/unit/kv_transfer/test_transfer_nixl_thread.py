"""The thread that talks to NIXL, over an agent of ours: it outlives bad jobs, and its end is bounded."""

import asyncio
import dataclasses
import os
import subprocess
import sys
import threading

import pytest

from kv_transfer.backends import nixl
from kv_transfer.backends.nixl import NixlBackend, NixlOffer
from kv_transfer.backends.nixl_thread import Job, TransferThread
from tests.contract.transfer_peer import Pool
from tests.fake_device import FakeDevice


class Agent:
    """Every request completes when posted."""

    def post(self, request):
        return True

    def is_done(self, request):
        return True

    def release(self, request):
        pass


class Ended:
    def __init__(self):
        self.job, self.event = None, threading.Event()

    def __call__(self, job):
        self.job = job
        self.event.set()


def good(ended):
    def steps():
        yield 1
        return [7]

    return Job(steps(), on_end=ended)


@pytest.fixture
def thread():
    made = TransferThread(Agent(), name="under test")
    made.start()
    yield made
    assert made.close()


def test_a_job_that_raises_fails_alone(thread):
    def steps():
        yield 1
        raise ZeroDivisionError("a bug of ours")

    first, second = Ended(), Ended()
    thread.submit(Job(steps(), on_end=first))
    thread.submit(good(second))
    assert first.event.wait(5)
    assert second.event.wait(5)
    assert "a bug of ours" in first.job.error
    assert (second.job.error, second.job.result) == ("", [7])


def test_a_control_call_that_raises_does_not_end_the_thread(thread):
    ended = Ended()
    thread.submit(lambda: 1 // 0)
    thread.submit(good(ended))
    assert ended.event.wait(5)
    assert (ended.job.error, ended.job.result) == ("", [7])


def test_closing_does_not_wait_for_a_call_that_hangs():
    hangs = threading.Event()
    thread = TransferThread(Agent(), name="under test")
    thread.start()
    thread.submit(lambda: hangs.wait(30) and None)
    assert not thread.close(timeout_s=0.01)
    hangs.set()
    assert thread.close(timeout_s=5)


async def test_removing_a_peer_never_fails_and_what_cannot_be_let_go_of_now_is_not_forgotten():
    backend = NixlBackend("w.1", Pool(0).memory)
    backend._thread = TransferThread(Agent(), name="never started, takes no work")
    peer = nixl._NixlPeer("p.1", NixlOffer(1, "a", b"", 4096, 32, 4, 8192, "cpu"), 1, 2)
    backend._peers["p.1"] = backend._by_agent["a"] = peer
    await backend.remove_peer("p.1")
    assert "p.1" not in backend._peers
    assert backend._by_agent == {"a": peer}


async def test_a_peer_taken_up_too_late_leaves_no_handles_behind(monkeypatch):
    monkeypatch.setattr(nixl, "CONTROL_TIMEOUT_S", 0.01)
    held, changed, release = set(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    class Handles(Agent):
        def add_remote(self, metadata):
            release.wait(5)
            held.add("remote")
            return "a"

        def remove_remote(self, name):
            held.discard("remote")
            loop.call_soon_threadsafe(changed.set)

        def pieces(self, owner, address, *_):
            held.add(address)
            return address

        def release_pieces(self, pieces):
            held.discard(pieces)

    backend = NixlBackend("w.1", Pool(0).memory)
    backend._agent, backend._loop = Handles(), loop
    backend._thread = TransferThread(backend._agent, name="under test")
    backend._thread.start()
    offer = NixlOffer(1, "a", b"", 4096, 32, 4, 8192, "cpu")
    with pytest.raises(nixl.TransferFailed, match="in time"):
        await backend._connect("p.1", offer)
    release.set()
    await asyncio.wait_for(changed.wait(), 5)
    assert not held
    assert backend._thread.close()


def test_an_agent_without_a_thread_of_its_own_progresses_while_nobody_reads():
    class Sleeper(Agent):
        def __init__(self):
            self.count, self.progressed = 0, threading.Event()

        def progress(self):
            self.count += 1
            if self.count >= 3:
                self.progressed.set()

    agent = Sleeper()
    thread = TransferThread(agent, name="under test", progresses_agent=True)
    thread.start()
    assert agent.progressed.wait(5)
    assert thread.close()


async def test_every_call_for_a_pool_on_a_gpu_is_made_with_that_gpu_current(monkeypatch):
    devices, calls = [], []

    class Watched(Agent):
        def __init__(self, name, *, progresses_itself):
            self.note("open")
            self.progresses_itself, self.progressed = progresses_itself, threading.Event()

        def note(self, name, *_):
            (device,) = devices
            calls.append((name, device.is_current, device.index))

        def progress(self):
            self.note("progress")
            self.progressed.set()

        def metadata(self):
            return b""

        def __getattr__(self, name):
            return lambda *_: self.note(name)

    def open_device(index):
        devices.append(FakeDevice(index))
        return devices[-1]

    monkeypatch.setattr(nixl, "NixlAgent", Watched)
    memory = dataclasses.replace(Pool(0).memory, device="cuda:2")
    backend = NixlBackend("w.1", memory, open_device=open_device)
    await backend.start()
    assert not backend._agent.progresses_itself
    assert await asyncio.to_thread(backend._agent.progressed.wait, 5)
    await backend.close()
    assert {"open", "register", "pieces", "progress", "close"} <= {name for name, *_ in calls}
    assert {(is_current, index) for _, is_current, index in calls} == {(True, 2)}
    assert devices[0].log == [("close",)]


async def test_for_a_pool_in_host_memory_no_device_is_looked_for():
    def open_device(index):
        raise AssertionError("no GPU is concerned")

    pool = Pool(0)
    backend = NixlBackend("w.1", pool.memory, host="127.0.0.1", open_device=open_device)
    await backend.start()
    await backend.close()


REWRITTEN = """
import asyncio, ctypes

from kv_transfer.backends.nixl import NixlBackend
from tests.contract.transfer_peer import Pool

def code():
    return ctypes.string_at(ctypes.cast(ctypes.CDLL(None).mmap, ctypes.c_void_p).value, 16)

async def open_and_close():
    pool = Pool(0)
    backend = NixlBackend("w.1", pool.memory, host="127.0.0.1")
    await backend.start()
    await backend.close()

before = code()
asyncio.run(open_and_close())
print(code() != before)
"""


@pytest.mark.parametrize("own", [None, "bistro"])
def test_an_agent_for_host_memory_rewrites_no_code_unless_it_is_told_to(own):
    """UCX takes 0.4 s of a core for it at each start of a worker."""
    environment = {name: value for name, value in os.environ.items() if name != "UCX_MEM_MMAP_HOOK_MODE"}
    environment |= {"UCX_MEM_MMAP_HOOK_MODE": own} if own else {}
    done = subprocess.run(
        [sys.executable, "-c", REWRITTEN], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [str(own is not None)], done.stderr
