"""The book of members by lease, which workers, store nodes and routers are all kept in."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.membership import MembershipBook, Renewal


def book(lease_s=8.0, gone_s=60.0, suspect_s=3.0):
    return MembershipBook[str, str](lease_s, gone_s, suspect_s)


def test_a_member_stays_while_it_renews_and_lapses_after_a_whole_lease():
    b = book()
    assert b.renew("a", "first", now_s=0.0) is Renewal.JOINED
    assert b.renew("a", "first", now_s=5.0) is Renewal.UNCHANGED
    assert b.renew("a", "second", now_s=6.0) is Renewal.CHANGED
    assert b["a"] == "second"
    assert b.tick(13.9).lapsed == {}
    assert b.tick(14.0).lapsed == {"a": "second"}
    assert "a" not in b
    assert b.renew("a", "first", now_s=15.0) is Renewal.JOINED


def test_an_id_that_left_stays_away_until_it_is_forgotten():
    b = book()
    b.renew("a", "", now_s=0.0)
    assert b.leave("a", now_s=1.0)
    assert not b.leave("a", now_s=2.0)
    assert b.renew("a", "", now_s=61.9) is Renewal.LEFT_BEFORE
    b.tick(62.0)
    assert b.renew("a", "", now_s=62.0) is Renewal.JOINED


def test_a_book_that_remembers_nobody_takes_back_at_once_who_left():
    b = book(gone_s=0.0)
    b.renew("a", "", now_s=0.0)
    assert b.leave("a", now_s=1.0)
    assert b.renew("a", "", now_s=1.0) is Renewal.JOINED


def test_the_silent_are_suspect_while_others_are_heard_and_nobody_is_when_nobody_is():
    b = book()
    b.renew("a", "", now_s=0.0)
    b.renew("b", "", now_s=2.0)
    assert b.tick(3.0).suspects == ["a"]
    assert b.is_suspect("a")
    assert not b.is_suspect("b")
    assert b.renew("a", "", now_s=3.5) is Renewal.CHANGED
    assert not b.is_suspect("a")
    assert b.tick(7.0).suspects == []  # neither was heard for three seconds


def test_a_lease_of_a_members_own_counts_in_place_of_the_books():
    b = book()
    b.renew("a", "", now_s=0.0, lease_s=1.0)
    b.renew("b", "", now_s=0.0)
    assert list(b.tick(1.0).lapsed) == ["a"]
    assert list(b) == ["b"]


def test_no_silence_counts_while_the_keeper_was_held_up():
    b = book()
    b.renew("a", "", now_s=0.0)
    b.paused(100.0)
    assert b.tick(107.0) == ({}, [])
    assert b.tick(108.0).lapsed == {"a": ""}


@given(
    st.lists(st.tuples(st.sampled_from("rlt"), st.sampled_from("abc"), st.floats(0, 9)), max_size=60),
)
def test_the_book_agrees_with_a_list_of_what_was_said(events):
    """Members are those whose last renewal is younger than the lease and who did not leave since."""
    b, now_s = book(gone_s=0.0), 0.0
    heard: dict[str, float] = {}
    for kind, name, step_s in events:
        now_s += step_s
        if kind == "r":
            b.renew(name, "", now_s=now_s)
            heard[name] = now_s
        elif kind == "l":
            b.leave(name, now_s=now_s)
            heard.pop(name, None)
        else:
            heard = {n: at_s for n, at_s in heard.items() if at_s + b.lease_s > now_s}
            b.tick(now_s)
        assert set(b) == set(heard)
        b.check()
