"""The tokens that each tenant has at workers, and which tenants hold more than their fair share. Pure.

The admission queue shares out room that comes free. That is too late for a tenant with few requests, because
long answers of others hold their KV blocks until they end, and a long prompt finds no room whoever's turn it
is. A tenant that holds more than its share, by weight among recently active tenants, therefore leaves some
room to those that do not. A tenant that is alone cannot exceed its share.
"""

from collections.abc import Iterator
from typing import NamedTuple

from baton.core.ids import SequenceId

ACTIVE_S = 30.0
"""A tenant is active for this long after its last request."""


class _Held(NamedTuple):
    tenant: str
    tokens: int


class TenantUsage:
    def __init__(self) -> None:
        self._held: dict[SequenceId, _Held] = {}
        self._tokens: dict[str, int] = {}
        """Tokens by tenant. Tenants without any are left out."""
        self._total = 0
        self._active: dict[str, tuple[float, float]] = {}
        """Tenant -> weight, and when it last asked; in the order of the latter."""
        self._weights = 0.0

    def on_request(self, tenant: str, weight: float, now_s: float) -> None:
        """`now_s` never falls."""
        self._forget(tenant)
        self._active[tenant] = weight, now_s
        self._weights += weight

    def placed(self, seq_id: SequenceId, tenant: str, tokens: int) -> None:
        """Note that the sequence has this many tokens at workers. A second time changes nothing."""
        if seq_id in self._held:
            return
        self._held[seq_id] = _Held(tenant, tokens)
        self._tokens[tenant] = self._tokens.get(tenant, 0) + tokens
        self._total += tokens

    def left(self, seq_id: SequenceId) -> None:
        """Note that the sequence holds nothing at workers any more. It may have held nothing before."""
        held = self._held.pop(seq_id, None)
        if held is None:
            return
        self._total -= held.tokens
        self._tokens[held.tenant] -= held.tokens
        if not self._tokens[held.tenant]:
            del self._tokens[held.tenant]

    def is_contended(self, now_s: float) -> bool:
        """Whether more than one tenant is active."""
        self._expire(now_s)
        return len(self._active) > 1

    def is_over_share(self, tenant: str, now_s: float) -> bool:
        """Whether the tenant holds more than its share while others are active."""
        self._expire(now_s)
        weight = self._active[tenant][0] if tenant in self._active else 0.0
        if self._weights - weight <= 0.0:
            return False
        share = weight / self._weights
        return self._tokens.get(tenant, 0) > share * self._total

    def below_share(self, now_s: float) -> Iterator[str]:
        """Yield the active tenants that hold no more than their shares."""
        self._expire(now_s)
        for tenant, (weight, _) in self._active.items():
            if self._tokens.get(tenant, 0) <= weight / self._weights * self._total:
                yield tenant

    def _expire(self, now_s: float) -> None:
        while self._active:
            tenant = next(iter(self._active))
            if self._active[tenant][1] + ACTIVE_S > now_s:
                return
            self._forget(tenant)

    def _forget(self, tenant: str) -> None:
        known = self._active.pop(tenant, None)
        if known is not None:
            # Exactly nothing when nobody is left: sums of floats drift.
            self._weights = self._weights - known[0] if self._active else 0.0

    def check(self, placed: set[SequenceId]) -> None:
        """Raises AssertionError unless exactly these hold something, and the sums agree."""
        assert self._held.keys() == placed
        assert self._total == sum(held.tokens for held in self._held.values()) == sum(self._tokens.values())
        assert all(self._tokens.values())
        assert abs(self._weights - sum(weight for weight, _ in self._active.values())) < 1e-6
