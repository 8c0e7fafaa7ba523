from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.core.ids import WorkerId, replica_name
from baton.core.messages import Member, Role
from baton.core.operate import ClusterState, Pool, ReplicaState, Version
from control_plane.reconcile import KILL_CONFIRM_S, Reconciler
from control_plane.reconcile_events import (
    Adopted,
    DrainReplica,
    DrainWanted,
    KillReplica,
    LeaseLapsed,
    MemberSilent,
    ReconcileTick,
    ReplicaExited,
    RestartPolicy,
    SetDesired,
    StartReplica,
    SwitchReplicaRole,
)
from control_plane.reconcile_events import MemberSeen as Seen

POLICY = RestartPolicy(
    backoff_s=0.5, backoff_max_s=8.0, start_timeout_s=60.0, drain_timeout_s=10.0, stable_s=30.0
)


def want(counts, version="1", **fields):
    return SetDesired((Pool("m", counts, Version(version)),), **fields)


def MemberSeen(worker_id, role=None, **fields):
    role = role or Role(replica_name(worker_id).split("-")[0])
    return Seen(Member(worker_id, role, "h:1", "m", "f", **fields))


def one_decode():
    r = Reconciler(policy=POLICY, life="x")
    (start,) = r.handle(want({Role.DECODE: 1}), now_s=0.0)
    return r, start


def running(counts):
    """Start all replicas, and return their ids by name."""
    r = Reconciler(policy=POLICY, life="x")
    ids = {replica_name(a.worker_id): a.worker_id for a in r.handle(want(counts), now_s=0.0)}
    for worker_id in ids.values():
        assert r.handle(MemberSeen(worker_id), now_s=1.0) == []
    assert r.is_settled
    return r, ids


def test_the_shape_of_a_replica_is_that_of_its_process():
    r, start = one_decode()
    assert r.status()[0].shape == "", "nobody knows it before the worker says it"
    r.handle(MemberSeen(start.worker_id, shape="tp2"), now_s=1.0)
    assert r.status()[0].shape == "tp2"


def test_what_is_desired_is_started_at_once_under_its_name_and_role():
    r = Reconciler(policy=POLICY, life="x")
    actions = r.handle(want({Role.PREFILL: 1, Role.DECODE: 2}), now_s=0.0)
    assert [(replica_name(a.worker_id), a.role) for a in actions] == [
        ("prefill-0", Role.PREFILL),
        ("decode-0", Role.DECODE),
        ("decode-1", Role.DECODE),
    ]
    assert r.handle(want({Role.PREFILL: 1, Role.DECODE: 2}), now_s=0.0) == []
    assert not r.is_settled
    for a in actions:
        r.handle(MemberSeen(a.worker_id), now_s=1.0)
    assert r.is_settled


def test_a_dead_replica_starts_anew_with_a_new_id_after_the_backoff():
    r, first = one_decode()
    r.handle(MemberSeen(first.worker_id), now_s=1.0)
    assert r.handle(ReplicaExited(first.worker_id, "killed"), now_s=5.0) == []
    assert r.next_tick_s == 5.5
    (again,) = r.handle(ReconcileTick(), now_s=5.5)
    assert isinstance(again, StartReplica)
    assert again.worker_id != first.worker_id
    assert "killed" in again.reason


def test_backoff_doubles_up_to_its_bound_and_a_stable_life_ends_the_row():
    r, start = one_decode()
    now_s, delays = 0.0, []
    for _ in range(7):
        r.handle(ReplicaExited(start.worker_id, "dies at once"), now_s=now_s)
        delays.append(r.next_tick_s - now_s)
        now_s = r.next_tick_s
        (start,) = r.handle(ReconcileTick(), now_s=now_s)
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
    (again,) = r.handle(ReconcileTick(), now_s=3.0 + KILL_CONFIRM_S)
    assert isinstance(again, KillReplica)
    assert r.handle(MemberSeen(start.worker_id), now_s=6.0) == []
    assert r.handle(ReplicaExited(start.worker_id, "SIGKILL"), now_s=6.0) == []
    (restart,) = r.handle(ReconcileTick(), now_s=6.5)
    assert isinstance(restart, StartReplica)


def test_a_replica_that_never_serves_is_killed_at_the_start_timeout():
    r, start = one_decode()
    assert r.next_tick_s == POLICY.start_timeout_s
    assert [type(a) for a in r.handle(ReconcileTick(), now_s=POLICY.start_timeout_s)] == [KillReplica]
    assert r.status()[0].worker_id == start.worker_id


def test_scaling_down_drains_and_then_kills_and_the_exit_is_final():
    r, start = one_decode()
    r.handle(MemberSeen(start.worker_id), now_s=1.0)
    (drain,) = r.handle(want({}), now_s=2.0)
    assert isinstance(drain, DrainReplica)
    (kill,) = r.handle(ReconcileTick(), now_s=2.0 + POLICY.drain_timeout_s)
    assert isinstance(kill, KillReplica)
    assert r.handle(ReplicaExited(start.worker_id, "killed"), now_s=13.0) == []
    assert r.status() == []
    assert r.next_tick_s is None


def test_news_of_an_earlier_life_change_nothing():
    r, first = one_decode()
    r.handle(ReplicaExited(first.worker_id, "dead"), now_s=0.0)
    (second,) = r.handle(ReconcileTick(), now_s=0.5)
    for late in (
        ReplicaExited(first.worker_id, "again"),
        LeaseLapsed(first.worker_id),
        MemberSeen(first.worker_id),
    ):
        assert r.handle(late, now_s=0.6) == []
    assert r.status()[0].worker_id == second.worker_id
    assert r.status()[0].state is ReplicaState.STARTING


def test_when_one_role_shrinks_and_another_grows_a_running_worker_switches_and_nothing_starts_or_stops():
    r, ids = running({Role.PREFILL: 2, Role.DECODE: 1})
    (switch_role,) = r.handle(want({Role.PREFILL: 1, Role.DECODE: 2}), now_s=2.0)
    assert switch_role == SwitchReplicaRole(ids["prefill-1"], Role.DECODE, switch_role.reason)
    assert not r.is_settled
    # Reports from before the role switch change nothing, nor does its drain.
    assert r.handle(MemberSeen(ids["prefill-1"], Role.PREFILL), now_s=2.1) == []
    assert r.handle(MemberSeen(ids["prefill-1"], Role.PREFILL, is_draining=True), now_s=2.2) == []
    assert not r.is_settled
    assert r.handle(MemberSeen(ids["prefill-1"], Role.DECODE), now_s=2.3) == []
    assert r.is_settled
    (state,) = (s for s in r.status() if s.name == "prefill-1")
    assert (state.role, state.worker_id) == (Role.DECODE, ids["prefill-1"])


def test_a_switch_that_is_taken_back_meanwhile_is_told_again():
    r, ids = running({Role.PREFILL: 2, Role.DECODE: 1})
    r.handle(want({Role.PREFILL: 1, Role.DECODE: 2}), now_s=2.0)
    (back,) = r.handle(want({Role.PREFILL: 2, Role.DECODE: 1}), now_s=2.1)
    assert back == SwitchReplicaRole(ids["prefill-1"], Role.PREFILL, back.reason)
    assert r.handle(MemberSeen(ids["prefill-1"], Role.PREFILL), now_s=2.2) == []
    assert r.is_settled


def test_what_does_not_switch_in_time_is_killed_and_comes_back_in_its_new_role():
    r, ids = running({Role.PREFILL: 2})
    r.handle(want({Role.PREFILL: 1, Role.DECODE: 1}), now_s=2.0)
    (kill,) = r.handle(ReconcileTick(), now_s=2.0 + POLICY.drain_timeout_s + KILL_CONFIRM_S)
    assert kill.worker_id == ids["prefill-1"]
    r.handle(ReplicaExited(kill.worker_id, "killed"), now_s=20.0)
    (start,) = r.handle(ReconcileTick(), now_s=21.0)
    assert (replica_name(start.worker_id), start.role) == ("prefill-1", Role.DECODE)


def test_a_certain_worker_switches_or_goes_if_it_was_named():
    r, ids = running({Role.PREFILL: 3})
    (switch_role,) = r.handle(
        want({Role.PREFILL: 2, Role.DECODE: 1}, roles={"prefill-0": Role.DECODE}), now_s=2.0
    )
    assert switch_role.worker_id == ids["prefill-0"]
    leaving = frozenset({ids["prefill-1"]})
    (drain,) = r.handle(want({Role.PREFILL: 1, Role.DECODE: 1}, leaving=leaving), now_s=2.1)
    assert drain == DrainReplica(ids["prefill-1"], drain.reason)


def test_a_drained_worker_comes_back_at_once_and_without_a_mark():
    r, start = one_decode()
    r.handle(MemberSeen(start.worker_id), now_s=1.0)
    assert r.handle(DrainWanted(start.worker_id, "reason"), now_s=2.0) == [
        DrainReplica(start.worker_id, "reason")
    ]
    (again,) = r.handle(ReplicaExited(start.worker_id, "drained"), now_s=3.0)
    assert replica_name(again.worker_id) == "decode-0"
    assert r.status()[0].deaths_in_a_row == 0


def test_a_worker_that_missed_heartbeats_is_suspect_until_it_is_heard_and_dies_only_with_its_lease():
    r, start = one_decode()
    assert r.handle(MemberSilent(start.worker_id), now_s=0.5) == []  # the worker has not served yet
    r.handle(MemberSeen(start.worker_id), now_s=1.0)
    assert r.handle(MemberSilent(start.worker_id), now_s=2.0) == []
    assert r.status()[0].state is ReplicaState.SUSPECT
    assert not r.is_settled
    r.handle(MemberSeen(start.worker_id), now_s=3.0)
    assert r.is_settled
    r.handle(MemberSilent(start.worker_id), now_s=4.0)
    assert isinstance(r.handle(LeaseLapsed(start.worker_id), now_s=9.0)[0], KillReplica)


def test_an_upgrade_waits_for_old_workers_that_missed_heartbeats():
    """A short pause of a network or a machine makes all workers suspect; none of them may go for that."""
    r, ids = running({Role.DECODE: 3})
    (extra,) = r.handle(want({Role.DECODE: 3}, version="2"), now_s=2.0)
    for old in ids.values():
        assert r.handle(MemberSilent(old), now_s=5.0) == []
    for old in ids.values():
        assert r.handle(MemberSeen(old), now_s=6.0) == []
    (drain,) = r.handle(MemberSeen(extra.worker_id), now_s=7.0)
    assert isinstance(drain, DrainReplica)
    r.handle(MemberSilent(ids["decode-0"]), now_s=8.0)
    assert isinstance(r.handle(LeaseLapsed(ids["decode-0"]), now_s=13.0)[0], KillReplica)
    later = r.handle(ReplicaExited(ids["decode-0"], "killed"), now_s=13.1)
    later += r.handle(ReconcileTick(), now_s=30.0)
    assert [a.version.name for a in later if isinstance(a, StartReplica)] == ["2"]


def test_a_drained_node_is_left_and_not_used_again():
    r, ids = running({Role.DECODE: 2})
    r.handle(MemberSeen(ids["decode-0"], node="n0"), now_s=1.0)
    r.handle(MemberSeen(ids["decode-1"], node="n1"), now_s=1.0)
    (drain,) = r.handle(want({Role.DECODE: 2}, avoid=frozenset({"n1"})), now_s=2.0)
    assert drain.worker_id == ids["decode-1"]
    (again,) = r.handle(ReplicaExited(ids["decode-1"], "drained"), now_s=3.0)
    assert again.avoid == ("n1",)
    # Ray may have placed it before the order arrived, so it is drained once more.
    (drain,) = r.handle(MemberSeen(again.worker_id, node="n1"), now_s=4.0)
    assert isinstance(drain, DrainReplica)


def test_survivors_are_adopted_with_role_and_version_and_only_what_is_missing_is_started():
    r = Reconciler(policy=POLICY, life="y")
    survivor = WorkerId("prefill-0.x1")
    assert r.handle(Adopted(survivor, "m", Role.DECODE, "1"), now_s=0.0) == []
    (start,) = r.handle(want({Role.PREFILL: 1, Role.DECODE: 1}), now_s=0.0)
    assert (replica_name(start.worker_id), start.role) == ("prefill-1", Role.PREFILL)
    r.handle(MemberSeen(survivor, Role.DECODE), now_s=0.3)
    r.handle(MemberSeen(start.worker_id), now_s=5.0)
    assert r.is_settled
    assert isinstance(
        r.handle(Adopted(WorkerId("prefill-0.z9"), "m", Role.DECODE, "1"), now_s=6.0)[0], KillReplica
    )


def test_a_survivor_is_as_old_as_it_says_until_something_befalls_it():
    r = Reconciler(policy=POLICY, life="y")
    survivor = WorkerId("decode-0.x1")
    r.handle(Adopted(survivor, "m", Role.DECODE, "1", age_s=500.0), now_s=0.0)
    r.handle(want({Role.DECODE: 1}), now_s=0.0)
    assert [s.for_s for s in r.status(now_s=0.1)] == [0.1]
    r.handle(MemberSeen(survivor, Role.DECODE), now_s=0.3)
    assert [s.for_s for s in r.status(now_s=1.0)] == [501.0]
    r.handle(MemberSilent(survivor), now_s=4.0)
    assert [s.for_s for s in r.status(now_s=5.0)] == [1.0]
    r.handle(MemberSeen(survivor, Role.DECODE), now_s=6.0)
    assert [s.for_s for s in r.status(now_s=8.0)] == [2.0]


def test_what_a_worker_says_of_its_memory_is_in_its_status():
    r, start = one_decode()
    notes = ("info: kernels: native", "info: memory: weights 1 MB", "store: none")
    r.handle(MemberSeen(start.worker_id, Role.DECODE, notes=notes), now_s=1.0)
    assert [s.memory for s in r.status(now_s=2.0)] == ["weights 1 MB"]


def test_models_have_pools_and_names_of_their_own():
    r = Reconciler(policy=POLICY, life="x")
    pools = (
        Pool("m", {Role.AGGREGATED: 1}),
        Pool("org/other.v2", {Role.AGGREGATED: 1}, Version("1", ("model.path=o",))),
    )
    first, second = r.handle(SetDesired(pools), now_s=0.0)
    assert [(replica_name(a.worker_id), a.model) for a in (first, second)] == [
        ("m-aggregated-0", "m"),
        ("org-other-v2-aggregated-0", "org/other.v2"),
    ]
    assert second.version.sets == ("model.path=o",)
    for a in (first, second):
        r.handle(Seen(Member(a.worker_id, Role.AGGREGATED, "h:1", a.model, "f")), now_s=1.0)
    (drain,) = r.handle(SetDesired(pools[:1]), now_s=2.0)
    assert drain.worker_id == second.worker_id


@given(st.integers(1, 10_000))
def test_backoff_stays_in_its_bounds(deaths):
    assert POLICY.backoff_s <= POLICY.delay_s(deaths) <= POLICY.backoff_max_s
    assert POLICY.delay_s(deaths) <= POLICY.delay_s(deaths + 1)


@given(
    counts=st.dictionaries(st.sampled_from(Role), st.integers(1, 4), min_size=1),
    surge=st.integers(0, 2),
    unavailable=st.integers(0, 2),
    data=st.data(),
)
def test_versions_are_exchanged_with_no_more_processes_and_no_fewer_workers_than_allowed(
    counts, surge, unavailable, data
):
    surge = surge or int(not unavailable)
    r, ids = running(counts)
    alive = {worker_id: Role(name.split("-")[0]) for name, worker_id in ids.items()}
    serving, leaving, new = set(alive), [], []

    def act(actions):
        for a in actions:
            if isinstance(a, StartReplica):
                assert a.version.name == "2"
                alive[a.worker_id] = a.role
                new.append(a.worker_id)
            else:
                assert isinstance(a, DrainReplica), a  # neither kills nor role switches
                leaving.append(a.worker_id)
                serving.discard(a.worker_id)
        for role, count in counts.items():
            assert sum(x is role for x in alive.values()) <= count + surge
            assert sum(alive[w] is role for w in serving) >= count - unavailable

    pool = Pool("m", counts, Version("2"), surge, unavailable)
    act(r.handle(SetDesired((pool,)), now_s=2.0))
    while not r.is_settled:
        if leaving and (not new or data.draw(st.booleans())):
            worker_id = leaving.pop(data.draw(st.integers(0, len(leaving) - 1)))
            del alive[worker_id]
            act(r.handle(ReplicaExited(worker_id, "drained"), now_s=3.0))
        else:
            worker_id = new.pop(data.draw(st.integers(0, len(new) - 1)))  # fails if nothing goes on
            serving.add(worker_id)
            act(r.handle(MemberSeen(worker_id, alive[worker_id]), now_s=3.0))
    assert {s.version for s in r.status()} == {"2"}
    assert sorted(alive.values()) == sorted(role for role, n in counts.items() for _ in range(n))


def test_a_version_that_does_not_start_stops_the_exchange_and_can_be_taken_back():
    r, ids = running({Role.DECODE: 2})
    (start,) = r.handle(want({Role.DECODE: 2}, "2"), now_s=2.0)
    for now_s in (3.0, 30.0, 60.0):
        r.handle(ReplicaExited(start.worker_id, "no weights"), now_s=now_s)
        (start,) = r.handle(ReconcileTick(), now_s=now_s + 10)
        assert isinstance(start, StartReplica)
    assert {s.worker_id for s in r.status() if s.state is ReplicaState.RUNNING} == set(ids.values())
    (kill,) = r.handle(want({Role.DECODE: 2}, "1"), now_s=80.0)
    assert kill.worker_id == start.worker_id
    r.handle(ReplicaExited(kill.worker_id, "killed"), now_s=81.0)
    assert r.is_settled


class ClusterUnderChaos(RuleBasedStateMachine):
    """A cluster where processes die, hang, ignore kills and report late. `alive` is the truth: the
    processes that exist, with their roles. The reconciler only knows its events."""

    def __init__(self):
        super().__init__()
        self.r = Reconciler(policy=POLICY, life="x")
        self.now_s = 0.0
        self.alive, self.dead_untold, self.doomed = {}, [], set()
        self.desired, self.version = {}, "1"

    def act(self, actions):
        for a in actions:
            if isinstance(a, StartReplica):
                assert a.worker_id not in self.alive, "a worker id lives once"
                self.alive[a.worker_id] = a.role
            elif isinstance(a, SwitchReplicaRole):
                if a.worker_id in self.alive:
                    self.alive[a.worker_id] = a.role
            elif isinstance(a, KillReplica | DrainReplica):
                self.doomed.add(a.worker_id)

    def handle(self, event):
        self.act(self.r.handle(event, now_s=self.now_s))

    @rule(prefill=st.integers(0, 3), decode=st.integers(0, 3))
    def want(self, prefill, decode):
        self.desired = {Role.PREFILL: prefill, Role.DECODE: decode}
        self.handle(want(self.desired, self.version))

    @rule(version=st.sampled_from("123"))
    def roll_out(self, version):
        self.version = version
        self.handle(want(self.desired, version))

    @rule(seconds=st.floats(0.01, 70))
    def time_passes(self, seconds):
        self.now_s += seconds
        self.handle(ReconcileTick())

    @rule(data=st.data(), is_draining=st.booleans())
    def one_is_heard(self, data, is_draining):
        if self.alive:
            worker_id = data.draw(st.sampled_from(sorted(self.alive)))
            self.handle(MemberSeen(worker_id, self.alive[worker_id], is_draining=is_draining))

    @rule(data=st.data(), event=st.sampled_from([LeaseLapsed, MemberSilent]))
    def one_falls_silent(self, data, event):
        if self.alive:
            self.handle(event(data.draw(st.sampled_from(sorted(self.alive)))))

    @rule(data=st.data())
    def one_is_drained(self, data):
        if self.alive:
            self.handle(DrainWanted(data.draw(st.sampled_from(sorted(self.alive))), "by order"))

    @rule(data=st.data())
    def one_dies(self, data):
        if self.alive:
            worker_id = data.draw(st.sampled_from(sorted(self.alive)))
            del self.alive[worker_id]
            self.dead_untold.append(worker_id)

    @rule()
    def the_deaths_become_known(self):
        for worker_id in self.dead_untold:
            self.handle(ReplicaExited(worker_id, "died"))
            self.handle(ReplicaExited(worker_id, "died"))  # a repeated report changes nothing
        self.dead_untold.clear()

    @invariant()
    def never_two_lives_of_one_name(self):
        names = [replica_name(w) for w in [*self.alive, *self.dead_untold]]
        assert len(names) == len(set(names))

    @invariant()
    def nothing_waits_for_ever(self):
        if not self.r.is_settled and not any(s.state is ReplicaState.SUSPECT for s in self.r.status()):
            waits_for_others = all(s.state is ReplicaState.RUNNING for s in self.r.status())
            assert self.r.next_tick_s is not None or waits_for_others

    def teardown(self):
        """Once processes stop dying on their own, the desired state is reached, and soon."""
        for _ in range(60):
            for worker_id in [w for w in self.alive if w in self.doomed]:
                del self.alive[worker_id]
                self.dead_untold.append(worker_id)
            self.the_deaths_become_known()
            for worker_id, role in list(self.alive.items()):
                self.handle(MemberSeen(worker_id, role))
            if self.r.is_settled:
                break
            self.now_s = max(self.now_s, self.r.next_tick_s or 0.0)
            self.handle(ReconcileTick())
        assert self.r.is_settled
        have = sorted(self.alive.values())
        assert have == sorted(role for role, n in self.desired.items() for _ in range(n))
        assert {s.version for s in self.r.status()} <= {self.version}


TestClusterUnderChaos = ClusterUnderChaos.TestCase
TestClusterUnderChaos.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_models_whose_names_differ_in_signs_only_have_workers_of_different_names():
    models = ("x/y", "x-y", "x.y", "z/y")
    r = Reconciler(policy=POLICY, life="a")
    begun = r.handle(SetDesired(tuple(Pool(model, {Role.DECODE: 2}) for model in models)), now_s=0.0)
    names = {model: sorted(replica_name(s.worker_id) for s in begun if s.model == model) for model in models}
    assert names["x-y"] == ["x-y-decode-0", "x-y-decode-1"]
    assert names["z/y"] == ["z-y-decode-0", "z-y-decode-1"]
    assert all(len(of_model) == 2 for of_model in names.values())
    state = ClusterState("x", tuple(Pool(model, {Role.DECODE: 2}) for model in models), tuple(r.status()))
    for model in models:
        found = state.replica("decode-0", model=model)
        assert found is not None
        assert found.name == names[model][0]
