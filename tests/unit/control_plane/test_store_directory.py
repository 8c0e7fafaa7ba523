import asyncio

from baton.config import StoreConfig
from baton.core.messages import INFO_NOTE
from baton.core.store import NodeRef, StoreChanges, StoreMember, Tier
from baton.telemetry import catalogue
from baton.telemetry.metrics import Meter
from baton.wire.core_driver import PAUSE_S
from control_plane.store_directory import StoreDirectory
from kv_store.directory.book import NodeJoined, NodeLapsed
from kv_store.directory.memory import MemoryDirectory


def member(name, **fields):
    return StoreMember(NodeRef(name, f"{name}:1"), **fields)


async def test_who_comes_and_goes_is_logged_and_counted(caplog):
    caplog.set_level("INFO")
    meter = Meter()
    directory = StoreDirectory(StoreConfig(directory_entries_max=2), meter=meter)
    notes = ("slow disk", INFO_NOTE + "direct IO")
    await directory.renew(member("a", metrics_address="h:9", notes=notes), lease_s=60)
    stored = tuple((bytes([i]) * 16, Tier.HOST) for i in range(5))
    await directory.publish(StoreChanges("a", 1, stored=stored, is_snapshot=True))
    directory.count()
    directory.count()
    assert meter.value(catalogue.STORE_NODES) == 1
    assert meter.value(catalogue.DIRECTORY_ENTRIES) == 2
    assert meter.value(catalogue.DIRECTORY_DROPPED) == 3
    await directory.leave("a")
    await directory.close()
    said = {(r.levelname, r.getMessage()) for r in caplog.records}
    assert said == {
        ("INFO", "store node a joined at a:1, metrics at http://h:9/metrics"),
        ("WARNING", "store node a: slow disk"),
        ("INFO", "store node a: direct IO"),
        ("INFO", "store node a left"),
    }


async def test_a_silent_node_is_noticed_without_anybody_asking():
    changes = asyncio.Queue()
    directory = MemoryDirectory(entries_max=9, on_change=changes.put_nowait)
    await directory.renew(member("a"), lease_s=0.02)
    async with asyncio.timeout(5):
        assert [await changes.get(), await changes.get()] == [
            NodeJoined(member("a")),
            NodeLapsed(member("a")),
        ]
    await directory.close()


async def test_no_node_is_silent_while_the_directory_was_held_up():
    now_s, changes = 0.0, asyncio.Queue()
    directory = MemoryDirectory(entries_max=9, clock=lambda: now_s, on_change=changes.put_nowait)
    await directory.renew(member("a"), lease_s=1.0)
    now_s = 1.0 + 2 * PAUSE_S  # the machine slept, so the timer is late
    directory._timer_fired(2 * PAUSE_S)
    assert await directory.members() == (member("a"),)
    now_s += 5.0
    directory.tick()
    assert await directory.members() == ()
    await directory.close()
