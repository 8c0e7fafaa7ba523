"""Tenants over their fair share, against a simple model."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.core.ids import SequenceId
from router.decisions.admission.tenant_usage import ACTIVE_S, TenantUsage

TENANTS = st.sampled_from(["a", "b", "c"])
NAMES = st.sampled_from([SequenceId(c) for c in "pqrstuvw"])
TOKENS = st.integers(1, 1000)


class HoldingsMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.usage, self.now_s = TenantUsage(), 0.0
        self.held, self.asked = {}, {}

    @rule(tenant=TENANTS, weight=st.sampled_from([0.5, 1.0, 3.0]), passed_s=st.floats(0, ACTIVE_S))
    def ask(self, tenant, weight, passed_s):
        self.now_s += passed_s
        self.usage.on_request(tenant, weight, self.now_s)
        self.asked[tenant] = weight, self.now_s

    @rule(name=NAMES, tenant=TENANTS, tokens=TOKENS)
    def place(self, name, tenant, tokens):
        self.usage.placed(name, tenant, tokens)
        self.held.setdefault(name, (tenant, tokens))

    @rule(name=NAMES)
    def leave(self, name):
        self.usage.left(name)
        self.held.pop(name, None)

    @rule(tenant=TENANTS)
    def ask_who_is_beyond(self, tenant):
        active = {t: w for t, (w, at_s) in self.asked.items() if at_s + ACTIVE_S > self.now_s}
        mine = sum(n for t, n in self.held.values() if t == tenant)
        total = sum(n for _, n in self.held.values())
        weights = sum(active.values())
        others = {t for t in active if t != tenant}
        share = active.get(tenant, 0.0) / weights if weights else 1.0
        expected = bool(others) and mine > share * total
        assert self.usage.is_over_share(tenant, self.now_s) == expected

    @invariant()
    def sums_agree(self):
        self.usage.check(set(self.held))


TestHoldings = HoldingsMachine.TestCase


@given(st.lists(st.tuples(NAMES, TOKENS)))
def test_who_is_alone_is_never_beyond(placed):
    usage = TenantUsage()
    usage.on_request("a", 1.0, 0.0)
    for name, one in placed:
        usage.placed(name, "a", one)
    assert not usage.is_over_share("a", 1.0)


def test_others_count_while_they_ask_for_something():
    usage = TenantUsage()
    usage.on_request("flood", 1.0, 0.0)
    usage.placed(SequenceId("f"), "flood", 100)
    usage.on_request("quiet", 1.0, 1.0)
    usage.on_request("flood", 1.0, 2.0)
    assert usage.is_over_share("flood", 2.0)
    assert not usage.is_over_share("quiet", 2.0)
    assert not usage.is_over_share("flood", 1.0 + ACTIVE_S)
