from types import SimpleNamespace

import pytest

from baton.wire.guard import Guard, is_local, parties_in
from baton.wire.parties import CALLERS, OPERATING, Party, callers_of, name_of, parties_named, server_of
from baton.wire.proto import baton_pb2 as pb

DOMAIN = "baton.internal"


def methods():
    return [
        f"{name}/{method.name}"
        for name, service in pb.DESCRIPTOR.services_by_name.items()
        for method in service.methods
    ]


def test_every_method_that_is_listed_exists():
    assert set(CALLERS) <= set(methods())


def test_what_is_not_listed_is_for_those_who_operate():
    assert callers_of("/baton.v1.Something/New") == OPERATING
    assert callers_of("/another.Package/Session") == OPERATING


def test_drain_and_role_are_for_those_who_operate():
    for method in ("Worker/Drain", "Worker/SetRole", "StoreNode/Ask"):
        assert callers_of(f"/baton.v1.{method}") == OPERATING


def test_a_worker_may_not_speak_as_a_router():
    assert Party.WORKER not in callers_of("/baton.v1.Worker/Session")
    assert Party.WORKER not in callers_of("/baton.v1.Budgets/Take")


def test_services_are_served_by_somebody():
    assert server_of("Worker") is server_of("Peer") is Party.WORKER
    assert server_of("StoreNode") is Party.STORE
    assert server_of("Directory") is server_of("Budgets") is server_of("Operate") is Party.CONTROL


def test_names_of_another_domain_name_nobody():
    assert parties_named(["worker.baton.internal", "ROUTER.baton.internal"], DOMAIN) == {
        Party.WORKER,
        Party.ROUTER,
    }
    assert not parties_named(["worker.other", "baton.internal", "x.worker.baton.internal", "worker"], DOMAIN)


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:4711", True),
        ("ipv6:%5B::1%5D:4711", True),
        ("ipv6:[::1]:4711", True),
        ("unix:/run/x", True),
        ("ipv4:10.0.0.1:4711", False),
        ("ipv4:10.0.0.7:4711", True),
        ("ipv6:[fe80::7]:4711", True),
        ("ipv6:[2001:db8::1]:4711", False),
        ("nonsense", False),
        ("", False),
    ],
)
def test_whether_a_peer_is_on_this_machine(peer, local, monkeypatch):
    of_lo = [SimpleNamespace(address="127.0.0.1"), SimpleNamespace(address="00:00:00:00:00:00")]
    of_eth = [SimpleNamespace(address="10.0.0.7"), SimpleNamespace(address="fe80::7%eth0")]
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": of_lo, "eth0": of_eth})
    assert is_local(peer) is local


def certificate(*parties):
    return {"x509_subject_alternative_name": [name_of(p, DOMAIN).encode() for p in parties]}


class Tokens:
    def holder_of(self, token, *, scope):
        return "ada" if token == "right" else None


LOCAL, FAR = "ipv4:127.0.0.1:1", "ipv4:10.0.0.9:1"


def test_who_may_operate():
    tls, tokens, both, neither = (
        Guard(DOMAIN, None),
        Guard("", Tokens()),
        Guard(DOMAIN, Tokens()),
        Guard("", None),
    )
    assert tls.refusal(FAR, certificate(Party.CONTROL), "") is None
    assert tls.refusal(FAR, certificate(Party.OPERATOR), "") is None
    assert tls.refusal(LOCAL, certificate(Party.WORKER), "") is not None
    assert tokens.refusal(FAR, {}, "right") is None
    assert "access.token" in tokens.refusal(LOCAL, {}, "")
    assert "not among" in tokens.refusal(LOCAL, {}, "wrong")
    assert both.refusal(FAR, certificate(Party.WORKER), "right") is None
    assert neither.refusal(LOCAL, {}, "") is None
    assert "mutual TLS" in neither.refusal(FAR, {}, "right")


def test_a_plain_caller_that_claims_names_in_a_plain_cluster_is_nobody():
    assert Guard("", None).refusal(FAR, certificate(Party.CONTROL), "") is not None
    assert not parties_in({}, DOMAIN)
