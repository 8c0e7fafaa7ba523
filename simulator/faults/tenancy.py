"""Tenants, service classes and adapters of one seed."""

import random

from baton.config.router import SloClass, SloConfig
from baton.core.messages import AdapterRef
from router.tenants.keys import KeyBook, KeyRecord, Tenant, digest_of

ADAPTERS = tuple(AdapterRef(f"lora-{i}", f"/adapters/{i}", f"digest-{i}") for i in range(3))
OWNERS_PER_TENANT = len(ADAPTERS) + 1
"""KV may be shared by the requests of one tenant that use the same adapter, or none."""


def owner_of(tenant: str, adapter: AdapterRef | None) -> int:
    """Return the number of those whose requests may use each other's KV."""
    number = int(tenant.removeprefix("t"))
    return number * OWNERS_PER_TENANT + (0 if adapter is None else 1 + ADAPTERS.index(adapter))


def tenant_of_owner(owner: int) -> int:
    return owner // OWNERS_PER_TENANT


def key_of(tenant: str) -> str:
    return f"sk-sim-{tenant}"


def key_book(tenants: dict[str, Tenant]) -> KeyBook:
    return KeyBook(tenants, tuple(KeyRecord(sha256=digest_of(key_of(name)), tenant=name) for name in tenants))


def draw_tenants(rng: random.Random) -> dict[str, Tenant]:
    """Draw one to three tenants. Some have limits."""
    count = rng.choice((1, 2, 2, 3))
    return {f"t{i}": _draw_tenant(rng) for i in range(count)}


def _draw_tenant(rng: random.Random) -> Tenant:
    is_limited = rng.random() < 0.15
    return Tenant(
        weight=rng.choice((1.0, 1.0, 2.0, 4.0)),
        slo_class=rng.choice(("", "", "patient")),
        requests_per_minute=rng.choice((0, 8, 20)) if is_limited else 0,
        tokens_per_minute=rng.choice((0, 600, 1500, 1500)) if is_limited else 0,
        concurrent_max=rng.choice((0, 2, 5)) if is_limited else 0,
    )


def draw_slo(rng: random.Random) -> SloConfig:
    """Draw the service classes. Their objectives are met by an idle cluster, and missed by a busy one."""
    return SloConfig(
        classes={
            "quick": SloClass(
                ttft_s=rng.choice((0.1, 0.4, 1.0)),
                tpot_s=rng.choice((0.0, 0.05, 0.2)),
                late=rng.choice(("serve", "refuse", "refuse")),
            ),
            "patient": SloClass(
                ttft_s=rng.choice((0.0, 3.0)), priority=1, queue_max=rng.choice((0, 0, 3)), late="serve"
            ),
        },
        late=rng.choice(("serve", "refuse")),
    )
