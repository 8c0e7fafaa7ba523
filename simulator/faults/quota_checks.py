"""The limits of tenants, counted from what clients got, whatever place counts for the routers."""

from collections import defaultdict

from baton.core.budgets import WINDOW_S
from simulator.faults.client import Ending, RequestKind, SimClient
from simulator.faults.run_context import RunContext, Violation
from simulator.faults.scenario import Scenario

CLOCK_SLACK = 1.02


class QuotaChecks:
    """The limits of all tenants of a run."""

    def __init__(self, run: RunContext, scenario: Scenario) -> None:
        self._run, self._scenario = run, scenario
        self._granted: defaultdict[str, dict[str, SimClient]] = defaultdict(dict)
        self._passed_s: dict[str, float] = {}
        """Instants at which requests had passed the limits, and were charged."""
        self._places = 0
        """Places that counted: a router that cannot reach the shared place counts its own part."""

    def router_started(self, *, is_shared: bool) -> None:
        """A router that shares a place counts a part by itself while that is away."""
        self._places += 1
        if is_shared:
            self._places = max(2, self._places)

    def submitted(self, client: SimClient) -> None:
        """A request passed its tenant's limits."""
        tenant = self._scenario.tenants[client.tenant]
        granted = self._granted[client.tenant]
        if client.name in granted:
            return
        granted[client.name] = client
        self._passed_s[client.name] = self._run.clock.now_s
        whole = 1.0 + CLOCK_SLACK * self._run.clock.now_s / WINDOW_S
        most = tenant.requests_per_minute * whole * self._places
        if tenant.requests_per_minute and len(granted) > most + 1:
            raise Violation(6, f"{client.tenant}: {len(granted)} requests, {most:.1f} allowed")
        at_once = sum(map(self._is_served, granted.values()))
        if tenant.concurrent_max and at_once > tenant.concurrent_max * self._places:
            raise Violation(6, f"{client.tenant}: {at_once} at once, {tenant.concurrent_max} allowed")

    def _is_served(self, client: SimClient) -> bool:
        """Return whether a request is computed. After its deadline at most its answer is still being read."""
        limit_s = self._scenario.hasty_s if client.is_hasty else self._scenario.router.request_timeout_s
        is_in_time = self._run.clock.now_s < self._passed_s[client.name] + limit_s
        return client.exchange is not None and not client.exchange.is_done and is_in_time

    def at_rest(self, tenant: str, owed_s: float) -> None:
        """Check that the one place which counts charged no more than was used. `owed_s` is the time until the
        tenant's budget of tokens is whole again."""
        rate = self._scenario.tenants[tenant].tokens_per_minute / WINDOW_S
        debt, at_s = 0.0, 0.0
        for client in self._granted[tenant].values():
            passed_s = self._passed_s[client.name]
            debt = max(0.0, debt - rate * (passed_s - at_s)) + _used_by(client)
            at_s = passed_s
        debt = max(0.0, debt - rate * (self._run.clock.now_s - at_s))
        self._run.counts["budgets of tokens compared"] += 1
        if owed_s * rate > debt * CLOCK_SLACK + 2.0:
            raise Violation(8, f"{tenant} owes at most {debt:.0f} tokens, and is charged {owed_s * rate:.0f}")


def _used_by(client: SimClient) -> int:
    """Return the most tokens that a request used."""
    if client.ending is Ending.FINISHED and client.kind is not RequestKind.EMBEDDING:
        return sum(map(len, client.prompts)) + client.completion_tokens
    placed = [sequence for sequence in client.sequences if sequence.placements]
    return sum(len(s.submit.prompt) + len(s.received) for s in placed)
