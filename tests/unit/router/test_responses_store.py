"""Kept responses: bounds in number, bytes and time, per tenant, and what became of those that are gone."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.responses.store import Absence, ResponseStore, StoreBounds, StoredResponse

BOUNDS = StoreBounds(count_max=3, bytes_max=400, keep_s=10.0)


def of(size):
    return StoredResponse(b"r" * size, b"")


def test_a_response_is_its_tenants_own():
    store = ResponseStore(BOUNDS)
    store.put("a", "resp_1", of(10), 0.0)
    assert store.get("a", "resp_1", 1.0) == of(10)
    assert store.get("b", "resp_1", 1.0) is Absence.UNKNOWN
    assert store.delete("b", "resp_1", 1.0) is Absence.UNKNOWN
    assert store.get("a", "resp_1", 1.0) == of(10)


def test_the_store_says_what_became_of_a_response():
    store = ResponseStore(BOUNDS)
    for number in range(4):
        store.put("a", f"resp_{number}", of(10), 0.0)
    assert store.get("a", "resp_0", 1.0) is Absence.EVICTED
    store.delete("a", "resp_1", 1.0)
    assert store.get("a", "resp_1", 1.0) is Absence.DELETED
    assert store.get("a", "resp_2", 10.0) is Absence.EXPIRED
    assert store.get("a", "resp_9", 10.0) is Absence.UNKNOWN
    assert len(store) == 0


def test_the_least_recently_used_makes_room():
    store = ResponseStore(BOUNDS)
    for number in range(3):
        store.put("a", f"resp_{number}", of(10), 0.0)
    store.get("a", "resp_0", 1.0)
    store.put("a", "resp_3", of(10), 1.0)
    assert store.get("a", "resp_0", 1.0) == of(10)
    assert store.get("a", "resp_1", 1.0) is Absence.EVICTED


def test_the_tenant_that_holds_most_makes_room():
    store = ResponseStore(BOUNDS)
    store.put("small", "resp_s", of(50), 0.0)
    for number in range(3):
        store.put("large", f"resp_{number}", of(100), 0.0)
    store.put("small", "resp_t", of(60), 0.0)
    assert store.get("small", "resp_s", 1.0) == of(50)
    assert store.get("large", "resp_0", 1.0) is Absence.EVICTED


def test_one_response_may_not_fill_the_store():
    store = ResponseStore(BOUNDS)
    assert not store.put("a", "resp_1", of(101), 0.0)
    assert store.get("a", "resp_1", 0.0) is Absence.EVICTED


class StoreMachine(RuleBasedStateMachine):
    """Bounds hold, and what is there is what was put there."""

    def __init__(self):
        super().__init__()
        self.store, self.now_s, self.put = ResponseStore(BOUNDS), 0.0, {}

    @rule(tenant=st.sampled_from("abc"), number=st.integers(0, 5), size=st.integers(1, 120))
    def keep(self, tenant, number, size):
        if self.store.put(tenant, f"resp_{number}", of(size), self.now_s):
            self.put[tenant, number] = (size, self.now_s)

    @rule(tenant=st.sampled_from("abc"), number=st.integers(0, 5))
    def read(self, tenant, number):
        found = self.store.get(tenant, f"resp_{number}", self.now_s)
        if isinstance(found, StoredResponse):
            size, put_s = self.put[tenant, number]
            assert found.size == size
            assert self.now_s < put_s + BOUNDS.keep_s

    @rule(tenant=st.sampled_from("abc"), number=st.integers(0, 5))
    def forget(self, tenant, number):
        self.store.delete(tenant, f"resp_{number}", self.now_s)
        assert isinstance(self.store.get(tenant, f"resp_{number}", self.now_s), Absence)

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds):
        self.now_s += seconds

    @invariant()
    def bounds_hold(self):
        entries = self.store._tenants
        held = [entry.stored.size for one in entries.values() for entry in one.values()]
        assert self.store.size == sum(held) <= BOUNDS.bytes_max
        assert all(len(one) <= BOUNDS.count_max for one in entries.values())
        assert self.store._sizes.keys() == entries.keys()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
