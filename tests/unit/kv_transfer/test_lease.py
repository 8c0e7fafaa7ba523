import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.lease import LeaseBook, ReaderLease

LEASE_S = 6.0


def lease(patience_end_s=20.0):
    return ReaderLease(lease_s=LEASE_S, patience_end_s=patience_end_s)


def test_before_the_first_grant_patience_ends_it():
    reader = lease(patience_end_s=12.0)
    reader.request(now_s=1.0)
    assert (reader.end_s, reader.is_granted) == (12.0, False)


def test_the_lease_counts_from_when_the_answered_request_was_sent():
    reader = lease()
    assert reader.request(now_s=1.0) == 0
    reader.granted(0, lease_s=LEASE_S, slack_s=0.5)
    assert reader.end_s == 1.0 + LEASE_S - 0.5


def test_a_first_grant_may_end_it_before_patience_would():
    reader = lease(patience_end_s=100.0)
    reader.request(now_s=0.0)
    reader.granted(0, lease_s=LEASE_S, slack_s=0.0)
    assert reader.end_s == LEASE_S


def test_an_answer_that_a_later_one_overtook_changes_nothing():
    reader = lease()
    reader.request(now_s=0.0)
    reader.request(now_s=2.0)
    reader.granted(1, lease_s=LEASE_S, slack_s=0.0)
    assert not reader.was_sent(0)
    reader.granted(0, lease_s=100.0, slack_s=0.0)
    assert reader.end_s == 2.0 + LEASE_S


def test_a_later_grant_of_a_shorter_lease_never_shortens_what_was_promised():
    reader = lease()
    reader.request(now_s=0.0)
    reader.granted(0, lease_s=LEASE_S, slack_s=0.0)
    reader.request(now_s=1.0)
    reader.granted(1, lease_s=1.0, slack_s=0.0)
    assert reader.end_s == LEASE_S


def test_renewal_is_due_thrice_in_a_lease_and_sooner_in_a_shorter_one():
    reader = lease()
    reader.request(now_s=3.0)
    assert reader.renew_s == 3.0 + LEASE_S / 3
    reader.granted(0, lease_s=1.5, slack_s=0.0)
    assert reader.renew_s == 3.5


@given(
    delays=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20),
    slack_s=st.floats(0, 1),
)
def test_a_reader_always_stops_before_its_owner_lets_go(delays, slack_s):
    """Whatever the network does to requests and grants, on clocks that run alike."""
    book, reader = LeaseBook(lease_s=LEASE_S), lease()
    book.open("k")
    now_s = 0.0
    for there_s, back_s in delays:
        number = reader.request(now_s=now_s)
        assert book.request("k", "r", number)
        book.renew("k", now_s=now_s + there_s)
        owner = book.get("k")
        reader.granted(owner.number, lease_s=book.lease_s, slack_s=slack_s)
        assert reader.end_s <= owner.end_s
        now_s += there_s + back_s


@pytest.fixture
def book():
    made = LeaseBook(lease_s=LEASE_S)
    made.open("k")
    return made


def test_the_first_reader_that_requests_has_the_lease(book):
    assert book.request("k", "r", 0)
    assert not book.request("k", "other", 9)
    assert book.is_of("k", "r")
    assert not book.is_of("k", "other")
    assert book.get("k").number == 0


def test_the_latest_request_is_the_one_that_is_answered(book):
    for number in (0, 2, 1):
        book.request("k", "r", number)
    assert book.get("k").number == 2


def test_a_lease_ends_when_its_time_is_over_and_is_counted(book):
    ended = []
    book.renew("k", now_s=1.0)
    assert book.next_end_s == 1.0 + LEASE_S
    book.expire(now_s=6.9, lapse=ended.append)
    assert ended == []
    book.expire(now_s=7.0, lapse=lambda key: (ended.append(key), book.close(key)))
    assert (ended, book.expired_count, len(book)) == (["k"], 1, 0)


def test_a_renewal_keeps_it_running(book):
    book.renew("k", now_s=0.0)
    book.renew("k", now_s=4.0)
    book.expire(now_s=LEASE_S, lapse=book.close)
    assert "k" in book


def test_a_lease_that_holds_nothing_does_not_end(book):
    book.request("k", "r", 0)
    book.expire(now_s=1e9, lapse=book.close)
    assert (book.next_end_s, "k" in book) == (None, True)


def test_a_vacated_lease_is_the_next_readers(book):
    book.request("k", "r", 3)
    book.renew("k", now_s=0.0)
    book.vacate("k")
    assert book.request("k", "other", 0)
    assert (book.next_end_s, book.get("k").number) == (None, 0)
