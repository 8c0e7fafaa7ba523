from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.core.ids import replica_name
from baton.core.messages import Role
from control_plane.reconcile import (
    KILL_CONFIRM_S,
    DrainReplica,
    KillReplica,
    LeaseLapsed,
    MemberSeen,
    Reconciler,
    ReplicaExited,
    ReplicaPhase,
    RestartPolicy,
    SetDesired,
    StartReplica,
    Tick,
)

POLICY = RestartPolicy(
    backoff_s=0.5, backoff_max_s=8.0, start_timeout_s=60.0, drain_timeout_s=10.0, stable_s=30.0
)


def one_decode():
    r = Reconciler(policy=POLICY, life="x")
    (start,) = r.handle(SetDesired({Role.DECODE: 1}), now_s=0.0)
    return r, start


def test_what_is_desired_is_started_at_once_under_its_name_and_role():
    r = Reconciler(policy=POLICY, life="x")
    actions = r.handle(SetDesired({Role.PREFILL: 1, Role.DECODE: 2}), now_s=0.0)
    assert [(replica_name(a.worker_id), a.role) for a in actions] == [
        ("prefill-0", Role.PREFILL),
        ("decode-0", Role.DECODE),
        ("decode-1", Role.DECODE),
    ]
    assert r.handle(SetDesired({Role.PREFILL: 1, Role.DECODE: 2}), now_s=0.0) == []
    assert not r.is_settled
    for a in actions:
        r.handle(MemberSeen(a.worker_id), now_s=1.0)
    assert r.is_settled


def test_a_dead_replica_starts_anew_with_a_new_id_after_the_backoff():
    r, first = one_decode()
    r.handle(MemberSeen(first.worker_id), now_s=1.0)
    assert r.handle(ReplicaExited(first.worker_id, "killed"), now_s=5.0) == []
    assert r.next_tick_s == 5.5
    (again,) = r.handle(Tick(), now_s=5.5)
    assert isinstance(again, StartReplica)
    assert again.worker_id != first.worker_id
    assert "killed" in again.because


def test_backoff_doubles_up_to_its_bound_and_a_stable_life_ends_the_row():
    r, start = one_decode()
    now_s, delays = 0.0, []
    for _ in range(7):
        r.handle(ReplicaExited(start.worker_id, "dies at once"), now_s=now_s)
        delays.append(r.next_tick_s - now_s)
        now_s = r.next_tick_s
        (start,) = r.handle(Tick(), now_s=now_s)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    r.handle(MemberSeen(start.worker_id), now_s=now_s)
    now_s += POLICY.stable_s
    r.handle(ReplicaExited(start.worker_id, "after a good life"), now_s=now_s)
    assert r.next_tick_s == now_s + POLICY.backoff_s


def test_a_silent_replica_is_killed_until_its_end_is_known_and_only_then_replaced():
    r, start = one_decode()
    r.handle(MemberSeen(start.worker_id), now_s=1.0)
    (kill,) = r.handle(LeaseLapsed(start.worker_id), now_s=3.0)
    assert kill == KillReplica(start.worker_id, "its lease lapsed")
    assert r.handle(LeaseLapsed(start.worker_id), now_s=3.1) == []
    (again,) = r.handle(Tick(), now_s=3.0 + KILL_CONFIRM_S)
    assert isinstance(again, KillReplica)
    assert r.handle(MemberSeen(start.worker_id), now_s=6.0) == []
    assert r.handle(ReplicaExited(start.worker_id, "SIGKILL"), now_s=6.0) == []
    (restart,) = r.handle(Tick(), now_s=6.5)
    assert isinstance(restart, StartReplica)


def test_a_replica_that_never_serves_is_killed_at_the_start_timeout():
    r, start = one_decode()
    assert r.next_tick_s == POLICY.start_timeout_s
    assert [type(a) for a in r.handle(Tick(), now_s=POLICY.start_timeout_s)] == [KillReplica]
    assert r.status()[0].worker_id == start.worker_id


def test_scaling_down_drains_and_then_kills_and_the_exit_is_final():
    r, start = one_decode()
    r.handle(MemberSeen(start.worker_id), now_s=1.0)
    (drain,) = r.handle(SetDesired({}), now_s=2.0)
    assert isinstance(drain, DrainReplica)
    (kill,) = r.handle(Tick(), now_s=2.0 + POLICY.drain_timeout_s)
    assert isinstance(kill, KillReplica)
    assert r.handle(ReplicaExited(start.worker_id, "killed"), now_s=13.0) == []
    assert r.status() == []
    assert r.next_tick_s is None


def test_news_of_an_earlier_life_change_nothing():
    r, first = one_decode()
    r.handle(ReplicaExited(first.worker_id, "dead"), now_s=0.0)
    (second,) = r.handle(Tick(), now_s=0.5)
    for late in (
        ReplicaExited(first.worker_id, "again"),
        LeaseLapsed(first.worker_id),
        MemberSeen(first.worker_id),
    ):
        assert r.handle(late, now_s=0.6) == []
    assert r.status()[0].worker_id == second.worker_id
    assert r.status()[0].phase is ReplicaPhase.STARTING


@given(st.integers(1, 10_000))
def test_backoff_stays_in_its_bounds(deaths):
    assert POLICY.backoff_s <= POLICY.delay_s(deaths) <= POLICY.backoff_max_s
    assert POLICY.delay_s(deaths) <= POLICY.delay_s(deaths + 1)


class ClusterUnderChaos(RuleBasedStateMachine):
    """A cluster where processes die, hang, ignore kills and report late. `alive` is the truth: the
    processes that exist. The reconciler only knows what it is told."""

    def __init__(self):
        super().__init__()
        self.r = Reconciler(policy=POLICY, life="x")
        self.now_s = 0.0
        self.alive, self.dead_untold, self.doomed = {}, [], set()
        self.desired = {}

    def act(self, actions):
        for a in actions:
            if isinstance(a, StartReplica):
                assert a.worker_id not in self.alive, "a worker id lives once"
                self.alive[a.worker_id] = "starting"
            elif isinstance(a, KillReplica | DrainReplica):
                self.doomed.add(a.worker_id)

    def tell(self, event):
        self.act(self.r.handle(event, now_s=self.now_s))

    @rule(prefill=st.integers(0, 2), decode=st.integers(0, 2))
    def want(self, prefill, decode):
        self.desired = {Role.PREFILL: prefill, Role.DECODE: decode}
        self.tell(SetDesired(self.desired))

    @rule(seconds=st.floats(0.01, 70))
    def time_passes(self, seconds):
        self.now_s += seconds
        self.tell(Tick())

    @rule(data=st.data())
    def one_serves(self, data):
        if self.alive:
            worker_id = data.draw(st.sampled_from(sorted(self.alive)))
            self.alive[worker_id] = "serving"
            self.tell(MemberSeen(worker_id))

    @rule(data=st.data())
    def one_falls_silent(self, data):
        if self.alive:
            self.tell(LeaseLapsed(data.draw(st.sampled_from(sorted(self.alive)))))

    @rule(data=st.data())
    def one_dies(self, data):
        if self.alive:
            worker_id = data.draw(st.sampled_from(sorted(self.alive)))
            del self.alive[worker_id]
            self.dead_untold.append(worker_id)

    @rule()
    def the_deaths_become_known(self):
        for worker_id in self.dead_untold:
            self.tell(ReplicaExited(worker_id, "died"))
            self.tell(ReplicaExited(worker_id, "died"))  # heard twice: changes nothing
        self.dead_untold.clear()

    @invariant()
    def never_two_lives_of_one_name(self):
        names = [replica_name(w) for w in [*self.alive, *self.dead_untold]]
        assert len(names) == len(set(names))

    @invariant()
    def nothing_waits_for_ever(self):
        if not self.r.is_settled:
            assert self.r.next_tick_s is not None

    def teardown(self):
        """Once processes stop dying on their own, the desired state is reached, and soon."""
        for _ in range(12):
            for worker_id in [w for w in self.alive if w in self.doomed]:
                del self.alive[worker_id]
                self.dead_untold.append(worker_id)
            self.the_deaths_become_known()
            for worker_id in list(self.alive):
                self.tell(MemberSeen(worker_id))
            if self.r.is_settled:
                break
            self.now_s = max(self.now_s, self.r.next_tick_s)
            self.tell(Tick())
        assert self.r.is_settled
        have = sorted(replica_name(w) for w in self.alive)
        assert have == sorted(f"{role}-{i}" for role, n in self.desired.items() for i in range(n))


TestClusterUnderChaos = ClusterUnderChaos.TestCase
TestClusterUnderChaos.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
