"""Budgets of tenants: requests and tokens per minute, and requests at once. This module is pure.

GCRA (the generic cell rate algorithm, ITU-T I.371) keeps the rates: one number per budget, the instant at
which the budget would be whole again. A whole budget is a minute's worth, so a tenant may spend that at once
and has its rate from then on. The holder of the ledger has the clock; `router.tenants.redis_budgets` is the
same in Lua.
"""

import math
from collections import OrderedDict
from enum import StrEnum, auto

import msgspec

from baton.core.wire_types import SInt64, UInt64

WINDOW_S = 60.0
SETTLE_S = 60.0
"""A request may be settled this much later than the end of its lease. After that it keeps its charge."""
TENANTS_MAX = 100_000
LEASES_SWEPT_MIN = 64
ROUTER_SEEN_S = 30.0
"""A router that took nothing for this long is not counted among those that share a budget."""


class Scarce(StrEnum):
    """The budget that is used up."""

    REQUESTS = auto()
    TOKENS = auto()
    CONCURRENT = auto()


class Ask(msgspec.Struct, frozen=True):
    """One request of a tenant. A limit of 0 bounds nothing."""

    tenant: str
    lease: str
    """The name of the request, which `settle` repeats."""
    lease_s: float
    """The time after which it no longer counts as running, whether it was settled or not."""
    tokens: UInt64
    """Tokens of the prompt, and as many as may be generated."""
    requests_per_minute: UInt64 = 0
    tokens_per_minute: UInt64 = 0
    concurrent_max: UInt64 = 0
    router_id: str = ""


class Grant(msgspec.Struct, frozen=True):
    """The ledger's answer. Nothing is taken unless it `is_granted`."""

    scarce: Scarce | None = None
    """The budget that is used up; None: granted."""
    retry_after_s: float = 0.0
    """The time until the same request would be granted, if the tenant sends nothing else; infinite: the
    request is larger than the whole budget."""
    requests_left_s: float = 0.0
    """The time until the budget of requests is whole again."""
    tokens_left_s: float = 0.0
    """The time until the budget of tokens is whole again."""
    router_count: int = 1
    """The number of routers that took from any budget lately."""

    @property
    def is_granted(self) -> bool:
        return self.scarce is None


class Settle(msgspec.Struct, frozen=True):
    """The request is over. A second copy, or one for a request that took nothing, has no effect, so it may be
    sent again when it is not known whether it arrived."""

    tenant: str
    lease: str
    refund_tokens: SInt64
    """Tokens that were taken and not used; negative: more were used."""
    tokens_per_minute: UInt64


def remaining(limit: int, whole_in_s: float) -> int:
    """What is left of a budget of `limit` per minute that is whole again in `whole_in_s`."""
    return max(0, math.floor(limit * (1.0 - whole_in_s / WINDOW_S) + 1e-6))


class _Account:
    __slots__ = ("leases", "requests_whole_s", "swept_at", "tokens_whole_s")

    def __init__(self) -> None:
        self.requests_whole_s = self.tokens_whole_s = 0.0
        self.leases: dict[str, float] = {}
        """Requests that were not settled, and when they no longer count as running."""
        self.swept_at = LEASES_SWEPT_MIN
        """Number of leases at which those that can no longer be settled are dropped."""

    def running(self, now_s: float) -> int:
        return sum(end_s > now_s for end_s in self.leases.values())

    def add(self, lease: str, end_s: float, *, now_s: float) -> None:
        if len(self.leases) >= self.swept_at:
            leases = self.leases.items()
            self.leases = {name: end_s for name, end_s in leases if end_s + SETTLE_S > now_s}
            self.swept_at = max(LEASES_SWEPT_MIN, 2 * len(self.leases))
        self.leases[lease] = end_s


class Ledger:
    def __init__(self) -> None:
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        """Accounts by tenant; the one used last is at the end."""
        self._routers: dict[str, float] = {}

    def take(self, ask: Ask, *, now_s: float) -> Grant:
        account = self._account(ask.tenant)
        requests_s = max(account.requests_whole_s, now_s)
        tokens_s = max(account.tokens_whole_s, now_s)
        after_requests_s = requests_s + _cost_s(1, ask.requests_per_minute)
        after_tokens_s = tokens_s + _cost_s(ask.tokens, ask.tokens_per_minute)
        scarce, wait_s = None, 0.0
        if 0 < ask.concurrent_max <= account.running(now_s):
            scarce, wait_s = Scarce.CONCURRENT, 1.0
        if _over_s(ask.tokens, ask.tokens_per_minute, after_tokens_s - now_s) > 0:
            scarce, wait_s = Scarce.TOKENS, _over_s(ask.tokens, ask.tokens_per_minute, after_tokens_s - now_s)
        if after_requests_s - now_s - WINDOW_S > max(1e-9, wait_s):
            scarce, wait_s = Scarce.REQUESTS, after_requests_s - now_s - WINDOW_S
        if scarce is None:
            account.requests_whole_s, account.tokens_whole_s = after_requests_s, after_tokens_s
            if ask.concurrent_max or ask.tokens_per_minute:
                account.add(ask.lease, now_s + ask.lease_s, now_s=now_s)
            requests_s, tokens_s = after_requests_s, after_tokens_s
        count = self._count_router(ask.router_id, now_s)
        return Grant(scarce, wait_s, requests_s - now_s, tokens_s - now_s, count)

    def settle(self, settle: Settle, *, now_s: float) -> None:
        account = self._accounts.get(settle.tenant)
        end_s = None if account is None else account.leases.pop(settle.lease, None)
        if account is None or end_s is None or end_s + SETTLE_S <= now_s:
            return
        refund_s = _cost_s(settle.refund_tokens, settle.tokens_per_minute)
        account.tokens_whole_s = max(account.tokens_whole_s, now_s) - refund_s

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account()
            if len(self._accounts) > TENANTS_MAX:
                self._accounts.popitem(last=False)
        else:
            self._accounts.move_to_end(tenant)
        return account

    def _count_router(self, router_id: str, now_s: float) -> int:
        if router_id:
            self._routers[router_id] = now_s
            seen = self._routers.items()
            self._routers = {name: at_s for name, at_s in seen if now_s - at_s <= ROUTER_SEEN_S}
        return max(1, len(self._routers))


def _cost_s(count: int, per_minute: int) -> float:
    return count * WINDOW_S / per_minute if per_minute > 0 else 0.0


def _over_s(tokens: int, per_minute: int, whole_in_s: float) -> float:
    """The time to wait for so many tokens; infinite if they are more than a whole budget."""
    if per_minute <= 0:
        return 0.0
    if tokens > per_minute:
        return math.inf
    over_s = whole_in_s - WINDOW_S
    return over_s if over_s > 1e-9 else 0.0
