"""Tenants share an engine, whatever names their clients have."""

import random

from baton.core.ids import fairness_key, tenant_of
from engine.scheduling.order import FAIR_QUANTUM_TOKENS, TwoLevels


def test_a_key_tells_its_tenant():
    assert tenant_of(fairness_key("acme", "u/1")) == "acme"
    assert tenant_of(fairness_key("acme", "")) == "acme"
    assert tenant_of(fairness_key("", "somebody")) == "somebody"


def test_many_names_get_no_more_than_one():
    """The tenant that floods has a hundred users, the other one; both always have work."""
    rng = random.Random(3)
    shares = TwoLevels()
    flood = [fairness_key("flood", f"u{i}") for i in range(100)]
    clients = [*flood, fairness_key("meek", "u")]
    for client in clients:
        shares.join(client)
    served = {"flood": 0, "meek": 0}
    for _ in range(4000):
        client = min(clients, key=lambda c: (shares.level(c), c))
        tokens = rng.randint(1, 400)
        shares.charge(client, tokens)
        served[tenant_of(client)] += tokens
    assert abs(served["flood"] - served["meek"]) <= FAIR_QUANTUM_TOKENS + 2 * 400
    one = [shares.level(c)[1] for c in flood]
    assert max(one) - min(one) <= 2
    for client in clients:
        shares.leave(client)
