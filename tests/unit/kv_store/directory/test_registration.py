"""A node's registration against a directory that is lost, forgets, answers late and comes back."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.store import BlockLocation, NodeRef, StoreChanges, Tier
from kv_store.directory.backlog import TOGETHER_MAX, PublishBacklog
from kv_store.directory.interface import DirectoryLost
from kv_store.directory.memory import MemoryDirectory
from kv_store.directory.registration import LOOK_UPS_MAX
from kv_store.node.events import LookedUp, LookUp, PeersChanged
from tests.unit.kv_store.directory.dull_node import Node, h, member, running, until


class Moody:
    """A directory that can be away, hang, forget, or hear without being able to answer."""

    def __init__(self):
        self.forget()
        self.is_away = self.answers_get_lost = self.hangs = self.hears_no_news = False
        self.heard = []

    def forget(self):
        self.inner = MemoryDirectory(entries_max=1000)

    def __getattr__(self, name):
        async def call(*args, **kwargs):
            if self.hangs:
                await asyncio.Event().wait()
            if (self.is_away and name != "close") or (self.hears_no_news and name == "publish"):
                raise DirectoryLost("away")
            self.heard.append((name, *args))
            answer = await getattr(self.inner, name)(*args, **kwargs)
            if self.answers_get_lost and name == "publish":
                raise DirectoryLost("no answer")
            return answer

        return call


def listed(directory, node, universe=range(20)):
    """Whether the directory lists exactly what the node has."""

    def agrees():
        found = directory.inner.book.look_up(map(h, universe))
        return [bool(x) for x in found] == [h(number) in node.blocks for number in universe]

    return agrees


async def test_what_a_node_has_and_gets_is_listed():
    directory = Moody()
    async with running(directory) as node:
        node.blocks = {h(i): Tier.SSD for i in range(8)}
        await until(listed(directory, node))
        node.store(10, 11)
        node.remove(3)
        await until(listed(directory, node))
        assert node.registration.forgot_count == node.forgot_count() == 1


async def test_a_directory_that_forgot_is_told_all_again():
    directory = Moody()
    async with running(directory) as node:
        node.blocks = {h(i): Tier.SSD for i in range(8)}
        await until(listed(directory, node))
        directory.forget()
        await until(listed(directory, node))
        node.store(9)
        await until(listed(directory, node))
        assert node.forgot_count() == 2


async def test_what_happens_while_the_directory_is_away_is_told_when_it_is_back(caplog):
    caplog.set_level("INFO")
    directory = Moody()
    async with running(directory, lease_s=60) as node:
        node.store(1)
        await until(listed(directory, node))
        directory.is_away = True
        node.store(2)
        await until(lambda: node.registration.trouble)
        node.remove(1)
        directory.is_away = False
        await until(listed(directory, node))
        assert node.registration.trouble == ""
        assert node.forgot_count() == 1  # its lease ran on: nothing was missed
    assert "going on without: away" in caplog.text
    assert "the directory answers again" in caplog.text


async def test_a_directory_that_starts_together_with_the_node_is_not_missed(caplog):
    caplog.set_level("INFO")
    directory = Moody()
    directory.is_away = True
    async with running(directory, lease_s=60, patience_s=60.0) as node:
        await until(lambda: node.registration.trouble)
        directory.is_away = False
        node.store(1)
        await until(listed(directory, node))
        assert caplog.text == ""
        directory.is_away = True  # from now on it is
        node.store(2)
        await until(lambda: node.registration.trouble)
    assert "going on without: away" in caplog.text


async def test_a_message_whose_answer_was_lost_is_told_again_and_does_no_harm():
    directory = Moody()
    async with running(directory) as node:
        await until(listed(directory, node))
        directory.answers_get_lost = True
        node.store(1)
        await until(lambda: node.registration.trouble)
        directory.answers_get_lost = False
        node.remove(1)
        node.store(2)
        await until(listed(directory, node))


async def test_too_much_to_tell_becomes_a_snapshot():
    directory = Moody()
    async with running(directory, changes_max=4, lease_s=60) as node:
        await until(lambda: node.forgot_count())
        await until(lambda: not len(node.registration._backlog))
        directory.is_away = True
        node.store(0)
        await until(lambda: node.registration.trouble)
        for number in range(1, 10):
            node.store(number)
        assert len(node.registration._backlog) == 0
        directory.is_away = False
        await until(listed(directory, node))
        assert node.forgot_count() == 2


async def test_a_snapshot_that_still_waits_is_not_asked_for_again():
    directory = Moody()
    directory.hears_no_news = True
    async with running(directory, lease_s=0.03) as node:
        node.store(1)
        await until(lambda: [call[0] for call in directory.heard].count("renew") > 3)
        assert node.forgot_count() == 1
        directory.hears_no_news = False
        await until(listed(directory, node))


async def test_a_node_that_left_does_not_keep_the_directory_busy():
    directory = Moody()
    await directory.inner.leave("a")
    async with running(directory, lease_s=1000) as node:
        node.store(1)
        await until(lambda: any(call[0] == "publish" for call in directory.heard))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert node.forgot_count() == 1
        assert len(directory.heard) < 5


async def test_peers_are_told_when_they_change():
    directory = Moody()
    async with running(directory) as node:
        await directory.inner.renew(member("b"), lease_s=60)
        await until(lambda: node.registration.peers)
        await directory.inner.leave("b")
        await until(lambda: not node.registration.peers)
    told = [event for event in node.events if isinstance(event, PeersChanged)]
    assert told == [PeersChanged((NodeRef("b", "b"),)), PeersChanged(())]


def answers(node):
    return [event for event in node.events if isinstance(event, LookedUp)]


async def test_look_ups_are_answered_also_when_the_directory_hangs_or_is_away():
    directory = Moody()
    ask = LookUp(7, (h(1), h(2)), 0.01)
    nothing = LookedUp(7, ((), ()))
    async with running(directory, lease_s=60) as node:
        node.store(1)
        await until(listed(directory, node))
        node.registration.look_up(ask)
        await until(lambda: answers(node))
        assert answers(node) == [LookedUp(7, ((BlockLocation(NodeRef("a", "a"), Tier.HOST),), ()))]
        directory.hangs = True
        for _ in range(LOOK_UPS_MAX + 1):
            node.registration.look_up(ask)
        assert answers(node)[1:] == [nothing]  # the one too many, at once
        await until(lambda: len(answers(node)) == LOOK_UPS_MAX + 2)
        directory.hangs, directory.is_away = False, True
        for _ in range(2):
            node.registration.look_up(ask)
            await until(lambda: node.registration.trouble)
        await until(lambda: len(answers(node)) == LOOK_UPS_MAX + 4)
        assert set(answers(node)[1:]) == {nothing}


async def test_leaving_takes_a_second_at_most():
    directory = Moody()
    node = Node(directory)
    await node.registration.leave()
    assert ("leave", "a") in directory.heard
    directory.is_away = True
    await Node(directory).registration.leave()


async def test_a_node_alone_has_nobody_to_tell_or_ask():
    node = Node(None)
    await node.registration.run()
    node.store(1)
    node.registration.look_up(LookUp(1, (h(1),), 1.0))
    await node.registration.leave()
    assert node.events == [LookedUp(1, ((),))]


def test_a_backlog_takes_a_snapshot_whole_whatever_its_bound():
    backlog = PublishBacklog(changes_max=2)
    parts = [StoreChanges("a", i, is_snapshot=True, is_first=i == 0, is_last=i == 9) for i in range(10)]
    for part in parts:
        backlog.put(part)
    assert len(backlog) == 10
    backlog.put(StoreChanges("a", 10, stored=((h(1), Tier.HOST),)))
    backlog.put(StoreChanges("a", 11, removed=(h(2),)))
    assert not backlog.needs_snapshot
    backlog.put(StoreChanges("a", 12, removed=(h(3),)))
    assert backlog.needs_snapshot
    assert len(backlog) == 0


BLOCKS = st.lists(st.integers(0, 5), max_size=4, unique=True)
NEWS = st.tuples(BLOCKS, BLOCKS, st.sampled_from(Tier), st.booleans())


@settings(max_examples=300, deadline=None)
@given(st.lists(NEWS, max_size=12))
def test_changes_that_are_told_together_come_to_the_same(news):
    """`begins` sends the first message that waits, whose answer comes only after the next change."""
    each, together = MemoryDirectory(entries_max=1000), MemoryDirectory(entries_max=1000)
    backlog = PublishBacklog(changes_max=1000)
    sent = []

    async def play():
        for directory in (each, together):
            await directory.renew(member("a"), lease_s=1e9)
        changes = [StoreChanges("a", 1, is_snapshot=True)]
        for number, (stored, removed, tier, _) in enumerate(news, start=2):
            stored = tuple((h(i), tier) for i in stored if i not in removed)
            changes.append(StoreChanges("a", number, stored=stored, removed=tuple(map(h, removed))))
        under_way = None
        for one, begins in zip(changes, [True, *(begins for *_, begins in news)], strict=True):
            assert await each.publish(one)
            backlog.put(one)
            if under_way is not None:
                backlog.on_published(under_way)
                under_way = None
            if begins and (under_way := backlog.begin()) is not None:
                sent.append(under_way)
                assert await together.publish(under_way)
        if under_way is not None:
            backlog.on_published(under_way)
        while (left := backlog.begin()) is not None:
            sent.append(left)
            assert await together.publish(left)
            backlog.on_published(left)
        universe = [h(i) for i in range(6)]
        assert await together.look_up(universe) == await each.look_up(universe)

    asyncio.run(play())
    assert [one.sequence_number for one in sent] == list(range(1, len(sent) + 1))
    assert len(sent) <= 2 + sum(begins for *_, begins in news)


async def test_what_comes_soon_after_a_message_goes_together():
    directory = Moody()

    def told():
        return [call[1] for call in directory.heard if call[0] == "publish"]

    async with running(directory, lease_s=60, publish_every_s=60) as node:
        await until(told)
        for number in range(5):
            node.store(number)
            for _ in range(20):
                await asyncio.sleep(0)
        assert len(told()) == len(node.registration._backlog) == 1
        node.registration._publish_s = 0.0  # the time is over
        node.remove(3)
        await until(listed(directory, node))
    assert [(len(one.stored), len(one.removed)) for one in told()] == [(0, 0), (4, 1)]


async def test_a_snapshot_a_repeat_and_what_is_full_wait_for_nothing():
    directory = Moody()
    directory.inner = MemoryDirectory(entries_max=10_000)

    def has(number):
        return lambda: bool(directory.inner.book.look_up([h(number)])[0])

    async with running(directory, lease_s=1, publish_every_s=60) as node:
        node.blocks = {h(i): Tier.SSD for i in range(100)}
        await until(listed(directory, node, range(100)))  # in parts
        node.store(*range(1000, 1000 + TOGETHER_MAX))
        node.store(100)
        await until(has(1000))  # since it is full, and another one waits
        assert not has(100)()
        directory.answers_get_lost = True
        node.registration._publish_s = 0.0  # the time is over
        node.store(101)
        await until(lambda: node.registration.trouble)
        assert has(100)()
        assert len(node.registration._backlog) == 1
        directory.answers_get_lost = False
        await until(lambda: not len(node.registration._backlog))


async def test_too_many_changes_while_the_directory_is_there_ask_for_a_snapshot_at_once():
    directory = Moody()
    async with running(directory, changes_max=4, lease_s=1000) as node:
        await until(lambda: any(call[0] == "publish" for call in directory.heard))
        node.store(*range(10))
        await until(listed(directory, node))
        assert node.forgot_count() == 2


def test_a_message_under_way_is_dropped_with_the_others():
    backlog = PublishBacklog(changes_max=4)
    backlog.put(StoreChanges("a", 1, is_snapshot=True))
    begun = backlog.begin()
    backlog.drop()
    backlog.put(StoreChanges("a", 2, is_snapshot=True))
    backlog.on_published(begun)
    assert len(backlog) == 1
    assert backlog.begin().sequence_number == 2


def test_long_messages_are_not_put_together():
    backlog = PublishBacklog(changes_max=10 * TOGETHER_MAX)
    backlog.put(StoreChanges("a", 1, is_snapshot=True))
    many = tuple((h(i), Tier.HOST) for i in range(TOGETHER_MAX))
    backlog.put(StoreChanges("a", 2, stored=many[1:]))
    backlog.put(StoreChanges("a", 3, stored=many[:1]))
    assert len(backlog) == 2
    backlog.put(StoreChanges("a", 4, removed=(h(0),)))
    assert len(backlog) == 3


CHANGE = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 9)),
    st.tuples(st.just("remove"), st.integers(0, 9)),
    st.sampled_from([("away",), ("back",), ("forget",), ("lossy",), ("sure",), ("let run",)]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(CHANGE, max_size=30))
def test_whatever_happens_in_the_end_the_directory_knows(changes):
    async def play():
        directory = Moody()
        async with running(directory, changes_max=3) as node:
            for what, *args in changes:
                match what:
                    case "store":
                        node.store(*args)
                    case "remove" if h(args[0]) in node.blocks:
                        node.remove(*args)
                    case "away" | "back":
                        directory.is_away = what == "away"
                    case "forget":
                        directory.forget()
                    case "lossy" | "sure":
                        directory.answers_get_lost = what == "lossy"
                    case _:
                        for _ in range(20):
                            await asyncio.sleep(0)
            directory.is_away = directory.answers_get_lost = False
            await until(listed(directory, node))

    asyncio.run(play())


@pytest.mark.parametrize("lease_s", [0.03, 3.0])
async def test_the_lease_is_renewed_well_before_its_end(lease_s):
    directory = Moody()
    async with running(directory, lease_s=lease_s) as node:
        await until(lambda: any(call[0] == "renew" for call in directory.heard))
        left_s = node.registration._renewal_s - asyncio.get_running_loop().time()
        assert left_s <= lease_s / 3
