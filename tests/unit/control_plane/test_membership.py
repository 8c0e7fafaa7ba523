from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import WorkerId
from baton.core.messages import Member, Role
from control_plane.membership import (
    Appeared,
    ClusterMembership,
    DirectoryPaused,
    Lapsed,
    LeaseRenewed,
    MembershipTick,
    Suspected,
    Updated,
    ViewChanged,
    WorkerLeft,
)

LEASE_S = 2.0


def member(worker_id="decode-0.a", *, role=Role.DECODE, is_draining=False):
    return Member(
        worker_id=WorkerId(worker_id),
        role=role,
        address="127.0.0.1:1",
        model="m",
        fingerprint="f",
        is_draining=is_draining,
    )


def book():
    return ClusterMembership(directory_life="life", lease_s=LEASE_S)


def test_a_renewal_makes_a_member_and_silence_ends_it():
    b = book()
    assert b.handle(LeaseRenewed(member()), now_s=0.0)[0] == Appeared(member())
    assert b.view.members == (member(),)
    assert b.handle(MembershipTick(), now_s=LEASE_S - 0.01) == []
    changes = b.handle(MembershipTick(), now_s=LEASE_S)
    assert changes[0] == Lapsed(member())
    assert changes[-1] == ViewChanged(b.view)
    assert b.view.members == ()


def test_renewing_keeps_the_version_until_a_field_changes():
    b = book()
    b.handle(LeaseRenewed(member()), now_s=0.0)
    version = b.version
    assert b.handle(LeaseRenewed(member()), now_s=1.0) == []
    assert b.version == version
    (updated, change) = b.handle(LeaseRenewed(member(is_draining=True)), now_s=1.5)
    assert updated == Updated(member(is_draining=True))
    assert isinstance(change, ViewChanged)
    assert change.view.version == version + 1
    assert change.view.members[0].is_draining


def test_who_left_does_not_come_back_by_a_late_renewal():
    b = book()
    b.handle(LeaseRenewed(member()), now_s=0.0)
    b.handle(WorkerLeft(WorkerId("decode-0.a")), now_s=0.5)
    assert b.handle(LeaseRenewed(member()), now_s=0.6) == []
    assert b.view.members == ()
    assert b.handle(LeaseRenewed(member("decode-0.b")), now_s=0.6)


def test_who_lapsed_may_come_back():
    b = book()
    b.handle(LeaseRenewed(member()), now_s=0.0)
    b.handle(MembershipTick(), now_s=3.0)
    assert b.handle(LeaseRenewed(member()), now_s=3.1)[0] == Appeared(member())


def test_nobody_lapses_for_a_pause_of_the_directory_itself():
    b = book()
    b.handle(LeaseRenewed(member()), now_s=0.0)
    b.handle(DirectoryPaused(10.0), now_s=11.0)
    assert b.handle(MembershipTick(), now_s=11.0) == []
    assert b.handle(MembershipTick(), now_s=10.0 + LEASE_S)[0] == Lapsed(member())


def test_departed_ids_are_forgotten_in_the_end():
    b = book()
    b.handle(WorkerLeft(WorkerId("decode-0.a")), now_s=0.0)
    assert b.next_tick_s is not None
    b.handle(MembershipTick(), now_s=b.next_tick_s)
    assert b.next_tick_s is None


events = st.one_of(
    st.builds(
        LeaseRenewed,
        st.builds(member, st.sampled_from(["a.1", "a.2", "b.1"]), is_draining=st.booleans()),
    ),
    st.builds(WorkerLeft, st.sampled_from([WorkerId("a.1"), WorkerId("b.1")])),
    st.just(MembershipTick()),
)


@given(st.lists(st.tuples(events, st.floats(0, 3)), max_size=40))
def test_versions_only_rise_and_every_change_of_the_view_has_its_own(script):
    b, now_s, seen = book(), 0.0, {}
    for event, wait_s in script:
        now_s += wait_s
        before = b.view
        changes = b.handle(event, now_s=now_s)
        views = [c.view for c in changes if isinstance(c, ViewChanged)]
        assert len(views) == (b.view != before)
        assert b.version >= before.version
        assert seen.setdefault(b.version, b.view) == b.view
        if isinstance(event, MembershipTick):
            assert b.next_tick_s is None or b.next_tick_s > now_s


def listed_as_suspect(b):
    return [m.worker_id for m in b.view.members if m.is_suspect]


def test_who_misses_heartbeats_is_suspect_before_its_lease_is_over_and_until_it_is_heard():
    b = ClusterMembership("x", lease_s=8.0, suspect_s=3.0)
    for name in ("a.1", "b.1"):
        b.handle(LeaseRenewed(member(name)), now_s=0.0)
    b.handle(LeaseRenewed(member("b.1")), now_s=2.5)
    assert b.next_tick_s == 3.0
    suspected, changed = b.handle(MembershipTick(), now_s=3.0)
    assert isinstance(suspected, Suspected)
    assert isinstance(changed, ViewChanged)
    assert listed_as_suspect(b) == ["a.1"]
    b.handle(MembershipTick(), now_s=3.1)  # once
    updated, _ = b.handle(LeaseRenewed(member("a.1")), now_s=4.0)
    assert updated == Updated(member("a.1"))
    assert listed_as_suspect(b) == []


def test_nobody_is_suspect_when_nobody_at_all_is_heard():
    b = ClusterMembership("x", lease_s=8.0, suspect_s=3.0)
    for name in ("a.1", "b.1"):
        b.handle(LeaseRenewed(member(name)), now_s=0.0)
    assert b.handle(MembershipTick(), now_s=3.0) == []
    assert b.next_tick_s > 3.0
    b.handle(DirectoryPaused(4.0), now_s=3.0)
    b.handle(LeaseRenewed(member("b.1")), now_s=5.0)
    assert b.handle(MembershipTick(), now_s=6.5) == []  # it may have renewed while nobody received
    b.handle(LeaseRenewed(member("b.1")), now_s=9.5)
    assert len(b.handle(MembershipTick(), now_s=10.0)) == 2
    assert listed_as_suspect(b) == ["a.1"]
