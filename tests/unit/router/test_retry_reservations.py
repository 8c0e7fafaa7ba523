"""A refused client that was promised a place gets it, and nobody is shut out by others' reservations."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.config.router import RouterConfig, SloConfig
from baton.core.ids import RequestId, SequenceId
from baton.core.messages import Role
from baton.core.sampling import SamplingParams
from router.decisions.admission.retry_reservations import (
    CLIENTS_MAX,
    EARLY_S,
    GRACE_S,
    RESERVATIONS_MAX,
    RetryReservations,
)
from router.decisions.core import RouterCore
from router.decisions.events import ClientGone, Failed, FailureKind, SequencePart, Submit, Tick
from tests.unit.router.script import Script

WEIGHTS = {"t1": 1.0, "t2": 3.0, "t3": 2.0}
TIMES = {"wait_s": 2.0, "work_s": 0.0, "most_s": 60.0}


def test_reservations_of_tenants_that_do_not_come_back_end():
    reservations = RetryReservations()
    for i in range(100):
        reservations.book(f"tenant{i}", "k", now_s=0.0, **TIMES)
    assert len(reservations) == 100
    reservations.book("last", "k", now_s=2.1 + GRACE_S, **TIMES)
    assert len(reservations) == 1
    assert reservations._books.keys() == {"last"}
    reservations.check()


def test_a_tenant_that_is_refused_all_the_time_leaves_room_for_others():
    reservations = RetryReservations()
    for i in range(2 * RESERVATIONS_MAX):
        assert reservations.book("flood", f"k{i}", now_s=0.0, **TIMES) == 2.0
    assert len(reservations) == RESERVATIONS_MAX / 2
    for i in range(100):
        reservations.book(f"tenant{i}", "k", now_s=0.0, **TIMES)
        assert reservations.take(f"tenant{i}", "k", 2.0)
    reservations.check()


def test_those_that_came_back_and_wait_still_use_their_places():
    reservations = RetryReservations(places_max=4)
    for i in range(3):
        reservations.book(f"t{i}", "k", now_s=0.0, **TIMES)
        assert reservations.take(f"t{i}", "k", 2.0)
        reservations.returned(f"s{i}", f"t{i}", "")
    for i in range(3, 6):
        reservations.book(f"t{i}", "k", now_s=2.0, **TIMES)
    assert len(reservations) == 1
    reservations.placed("s0")
    reservations.placed("s0")
    reservations.book("t6", "k", now_s=2.0, **TIMES)
    assert len(reservations) == 2
    reservations.check()


def test_clients_with_the_same_request_each_have_their_place():
    reservations = RetryReservations()
    for i in range(CLIENTS_MAX + 5):
        reservations.book("t", "k", now_s=0.0, client=f"c{i}", **TIMES)
        reservations.book("t", "k", now_s=0.5, client=f"c{i}", **TIMES)
    assert len(reservations) == CLIENTS_MAX
    reservations.check()
    came = [reservations.take("t", "k", 2.0) for _ in range(CLIENTS_MAX + 5)]
    assert came == [True] * CLIENTS_MAX + [False] * 5
    assert len(reservations) == 0
    reservations.check()


# --- at the core ----------------------------------------------------------------------------------


def submit(script, seq, *, tenant="t", digest="", part=SequencePart.REQUEST, request="", **fields):
    script.do(
        Submit(
            SequenceId(seq),
            RequestId(request or seq),
            (1, 2, 3),
            SamplingParams(max_tokens=4),
            salt=b"",
            deadline_s=1e9,
            tenant=tenant,
            request_digest=digest,
            part=part,
            **fields,
        )
    )


def test_who_comes_back_in_time_is_admitted_to_a_full_queue_and_stays():
    script = Script(queue_requests_max=2)
    submit(script, "a", tenant="other")
    submit(script, "b")
    submit(script, "c", digest="x")
    refused = script.ends["c"]
    assert isinstance(refused, Failed)
    script.now_s += refused.retry_after_s
    submit(script, "c2", digest="x")
    assert "c2" not in script.ends
    assert script.ends["b"].kind is FailureKind.QUEUE_FULL  # The tenant's own last request makes room.
    for i in range(20):
        submit(script, f"more{i}", tenant="third")
    assert "c2" not in script.ends
    script.join("w", Role.AGGREGATED)
    assert "c2" in script.starts


def test_who_came_back_is_not_refused_when_its_objective_is_over():
    script = Script(queue_requests_max=1)
    submit(script, "a")
    for seq in ("b", "b2"):
        submit(script, seq, digest="x", ttft_slo_s=1.0, refuse_late=True)
        script.now_s += 1.0
    assert "b2" not in script.ends
    script.at(10.0)
    assert "b2" not in script.ends
    script.join("w", Role.AGGREGATED)
    assert "b2" in script.starts


def test_all_sequences_of_a_request_that_came_back_are_admitted():
    script = Script(queue_requests_max=6)
    for i in range(6):
        submit(script, f"a{i}")
    submit(script, "b/0", request="b", digest="x")
    script.now_s += 1.0
    for i in range(3):
        part = SequencePart.ANSWER if i else SequencePart.REQUEST
        submit(script, f"c/{i}", request="c", digest="x", part=part)
    assert not any(seq.startswith("c/") for seq in script.ends)
    assert sum(seq.startswith("a") for seq in script.ends) == 3


def test_a_request_with_many_sequences_that_fail_is_promised_one_place():
    script = Script(queue_wait_s=5.0)
    for i in range(3):
        part = SequencePart.ANSWER if i else SequencePart.REQUEST
        submit(script, f"c/{i}", request="c", digest="x", part=part)
    script.at(6.0)
    assert len(script.ends) == 3
    assert len(script.core._waiting._hints._reservations) == 1


class Promises(RuleBasedStateMachine):
    """Clients of several tenants and classes at a router without workers, whose bounds are small. Those that
    were promised a place come back in time, or never."""

    def __init__(self):
        super().__init__()
        self.now_s, self.count = 0.0, 0
        self.promised = {}
        """Refused client -> (its first request, when it is due)."""
        self.kept = set()
        """Sequences that came back in time."""
        self.live = {}
        slo = SloConfig.model_validate({"classes": {"a": {"queue_max": 3}, "b": {}}})
        config = RouterConfig(queue_requests_max=6, queue_tenant_max=4, queue_wait_s=86400.0)
        self.core = RouterCore(config=config, rng=random.Random(1), now_s=0.0, slo=slo)

    @property
    def reservations(self):
        return self.core._waiting._hints._reservations

    def do(self, event):
        for action in self.core.handle(event, now_s=self.now_s):
            if isinstance(action, Failed):
                assert action.seq_id not in self.kept, "a promise was broken"
                asked = self.live.pop(action.seq_id)
                for book in self.reservations._books.values():
                    for reservation in book.by_key.values():
                        if asked.request_id in reservation.clients:
                            self.promised[asked.request_id] = asked, self.now_s + action.retry_after_s

    def ask(self, tenant, slo_class, digest):
        self.count += 1
        name = f"s{self.count}"
        event = Submit(
            SequenceId(name), RequestId(name), (1, 2, 3), SamplingParams(max_tokens=4), b"", 1e9,
            tenant=tenant, slo_class=slo_class, request_digest=digest, weight=WEIGHTS[tenant],
        )  # fmt: skip
        self.live[event.seq_id] = event
        return event

    @rule(tenant=st.sampled_from(["t1", "t2", "t3"]), slo_class=st.sampled_from("ab"), n=st.integers(1, 4))
    def arrive(self, tenant, slo_class, n):
        for _ in range(n):
            self.do(self.ask(tenant, slo_class, f"d{self.count}"))

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 8.0]))
    def wait(self, seconds):
        self.now_s += seconds
        self.do(Tick())

    @precondition(lambda self: self.promised)
    @rule(data=st.data(), late_s=st.floats(0.0, GRACE_S - 1.0))
    def come_back(self, data, late_s):
        client = data.draw(st.sampled_from(sorted(self.promised)))
        first, due_s = self.promised.pop(client)
        if self.now_s > due_s:
            return
        self.now_s = due_s + late_s
        event = self.ask(first.tenant, first.slo_class, first.request_digest)
        self.kept.add(event.seq_id)
        self.do(event)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[seq_id]
        self.kept.discard(seq_id)
        self.do(ClientGone(seq_id))

    @invariant()
    def accounts_agree(self):
        self.core.check()


TestPromises = Promises.TestCase
TestPromises.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_time_is_kept_from_a_little_before_to_a_little_after_it():
    for at_s, is_kept in ((1.4, False), (2.0 - EARLY_S, True), (2.0 + GRACE_S, True), (7.1, False)):
        reservations = RetryReservations()
        reservations.book("t", "k", now_s=0.0, **TIMES)
        assert reservations.take("t", "k", at_s) is is_kept


@pytest.mark.parametrize("places", [0, 1, 2, 7])
def test_there_are_never_more_reservations_than_places(places):
    reservations = RetryReservations(places_max=places)
    for i in range(20):
        reservations.book(f"t{i}", "k", now_s=0.0, **TIMES)
    assert len(reservations) == places
    reservations.check()
