from baton.core.store import NodeRef, StoreChanges, StoreMember, Tier
from kv_store.directory.book import DirectoryBook, NodeJoined, NodeLapsed, NodeLeft
from kv_store.directory.interface import GONE_S


def member(name):
    return StoreMember(NodeRef(name, name))


def h(number):
    return number.to_bytes(16, "big")


def told(name, number, *blocks, **fields):
    return StoreChanges(name, number, stored=tuple((h(b), Tier.HOST) for b in blocks), **fields)


def book_of(entries_max, **blocks):
    book = DirectoryBook(entries_max)
    for name, numbers in blocks.items():
        book.renew(member(name), lease_s=10, now_s=0)
        assert book.publish(told(name, 1, *numbers, is_snapshot=True))
    return book


def held(book, *numbers):
    return ["".join(x.node.node_id for x in found) for found in book.look_up(map(h, numbers))]


def test_beyond_its_bound_the_largest_node_loses_what_nobody_asked_for_the_longest():
    book = book_of(6, a=(1, 2, 3, 4), b=(1, 5))
    assert held(book, 1, 2) == ["ab", "a"]
    assert book.publish(told("b", 2, 6, 7))
    assert held(book, *range(1, 8)) == ["ab", "a", "", "", "b", "b", "b"]
    assert (book.entry_count, book.dropped_count) == (6, 2)
    book.check()


def test_a_snapshot_beyond_the_bound_keeps_its_end():
    book = book_of(3, a=range(10))
    assert held(book, 6, 7, 8, 9) == ["", "a", "a", "a"]
    assert book.dropped_count == 7
    assert book.publish(told("a", 2, 1, is_snapshot=True))
    assert book.entry_count == 1
    book.check()


def test_what_was_dropped_may_be_told_again_or_removed():
    book = book_of(2, a=(1, 2, 3))
    assert book.publish(StoreChanges("a", 2, removed=(h(1), h(2))))
    assert book.entry_count == 1
    assert book.publish(told("a", 3, 1))
    assert held(book, 1, 2, 3) == ["a", "", "a"]
    book.check()


def test_the_end_of_a_node_gives_its_room_back():
    book = book_of(4, a=(1, 2), b=(3, 4))
    assert book.tick(now_s=9.9) == []
    book.renew(member("b"), lease_s=10, now_s=9)
    assert book.next_tick_s == 10
    assert book.tick(now_s=10) == [NodeLapsed(member("a"))]
    assert book.entry_count == 2
    assert book.leave("b", now_s=11) == [NodeLeft(member("b"))]
    assert book.entry_count == 0
    book.check()


def test_a_departed_id_is_remembered_for_a_while():
    book = book_of(4, a=(1,))
    book.leave("a", now_s=1)
    assert book.leave("a", now_s=2) == []
    assert book.renew(member("a"), lease_s=10, now_s=3) == (False, [])
    assert book.next_tick_s == 2 + GONE_S
    book.tick(now_s=2 + GONE_S)
    assert book.renew(member("a"), lease_s=10, now_s=70) == (False, [NodeJoined(member("a"))])


def test_no_lease_ends_while_the_directory_could_not_listen():
    book = book_of(4, a=(1,))
    book.paused(100)
    assert book.tick(now_s=105) == []
    assert held(book, 1) == ["a"]
    assert book.tick(now_s=110) == [NodeLapsed(member("a"))]
