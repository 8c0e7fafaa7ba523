"""NetworkPolicies as rules of iptables in a pod's network, and Services with addresses of their own. Pure.

Kubernetes lets the node itself reach its pods, for probes; everything else needs a policy that allows it.
"""

from collections.abc import Iterable
from typing import Any

from tests.pods.manifests import PodPlan, Release, endpoints, matches

Rule = tuple[str, ...]


def rules(release: Release, pod: PodPlan) -> list[Rule]:
    """Arguments of iptables, in order."""
    found: list[Rule] = []
    policies = [d for d in release.docs if d["kind"] == "NetworkPolicy"]
    mine = [p["spec"] for p in policies if matches(p["spec"]["podSelector"], pod.labels)]
    for chain, key, side, flag in (("INPUT", "ingress", "from", "-s"), ("OUTPUT", "egress", "to", "-d")):
        if not any(key.capitalize() in policy["policyTypes"] for policy in mine):
            continue
        found.append(("-A", chain, "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT"))
        own = ["127.0.0.0/8", pod.address, *([release.gateway] if chain == "INPUT" else [])]
        found += [("-A", chain, flag, one, "-j", "ACCEPT") for one in own]
        for policy in mine:
            for allowed in policy.get(key) or ():
                found += _allowed(release, chain, flag, allowed, allowed.get(side))
        # A refusal is heard at once and is no time-out, so that a missing rule shows as what it is.
        found.append(("-A", chain, "-j", "REJECT"))
    return found


def _allowed(release: Release, chain: str, flag: str, allowed: Any, peers: Any) -> Iterable[Rule]:
    addresses = [None] if not peers else [a for peer in peers for a in _addresses(release, peer)]
    for address in addresses:
        for port in allowed.get("ports") or [None]:
            who = (flag, address) if address else ()
            what = ("-p", port["protocol"].lower(), "--dport", str(port["port"])) if port else ()
            yield ("-A", chain, *who, *what, "-j", "ACCEPT")


def _addresses(release: Release, peer: Any) -> list[str]:
    """Pods of other namespaces, such as Prometheus and DNS, do not exist here."""
    if "ipBlock" in peer:
        return [peer["ipBlock"]["cidr"]]
    if "namespaceSelector" in peer:
        return []
    return [p.address for p in release.pods if matches(peer["podSelector"], p.labels)]


def service_rules(release: Release, ready: frozenset[str]) -> list[Rule]:
    """Connections to a Service's own address go to the first of its pods that is `ready`."""
    found: list[Rule] = []
    for doc in release.docs:
        name = doc["metadata"]["name"]
        if doc["kind"] != "Service" or name not in release.virtual:
            continue
        for pod, port in endpoints(release, name):
            if pod.name in ready:
                service_port = str(doc["spec"]["ports"][0]["port"])
                to = ("-d", release.virtual[name], "-p", "tcp", "--dport", service_port)
                found.append(
                    ("-t", "nat", "-A", "OUTPUT", *to, "-j", "DNAT", "--to", f"{pod.address}:{port}")
                )
                break
    return found
