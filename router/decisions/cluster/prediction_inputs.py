"""What predictions need of one worker: what its steps cost, the prompts ahead, and what decodes there."""

from collections import Counter
from collections.abc import Iterable
from math import exp
from typing import NamedTuple

from baton.core.costs import StepCosts, median_costs
from baton.core.messages import LoadReport, Phase, Role, WorkerHello
from baton.core.sharing import UnreportedLoad
from router.decisions.cluster.backlog import Backlog
from router.decisions.cluster.load_account import Reservation

COLD = StepCosts(base_s=0.005, prompt_token_s=2e-4, decode_s=1e-3, context_token_s=1e-7, pair_s=1e-8)
"""Costs of a worker that says nothing, in a fleet where nobody does: slow rather than fast."""
BUSY_S = 10.0
"""The share of time that goes to prompts is averaged over this long."""
BUSY_MAX = 0.95
TOKENS_PER_STEP_MAX = 64.0
USUAL_S = 20.0
"""The number of sequences that decode is averaged over this long."""


class PredictionInputs(NamedTuple):
    """One worker at one moment, as predictions see it."""

    costs: StepCosts
    tokens_per_step: float
    backlog: Backlog
    """This router's prompts that are not computed."""
    head_since_s: float
    """When the worker began with the first of them, as far as is known."""
    decode_count: int
    """This router's sequences that decode here or will."""
    decode_context: int
    """Their tokens."""
    joining_count: int
    """Those of them that do not decode yet."""
    tpot_slos: tuple[tuple[float, int], ...]
    """Objectives of these, and how many have each; sequences without one are left out."""
    strictest_tpot_slo_s: float
    """What steps with prompts keep for the sake of those that decode there; 0: nothing decodes, or nothing
    that has an objective."""
    others_tokens: float
    """Prompt tokens that other routers sent and that are not computed."""
    others_decodes: float
    """Sequences of other routers that decode here, or will."""
    others_context: float
    """Their tokens, as far as the last report has them."""
    usual_decodes: float | None
    """Sequences of all routers that decode there, averaged over time; None: the worker has not reported."""
    busy: float
    """Share of its time that prompts sent lately take, at `busy_at_s`."""
    busy_at_s: float

    def busy_share(self, now_s: float) -> float:
        """Share of its time that prompts sent lately take; what was sent long ago counts less."""
        return min(BUSY_MAX, self.busy * exp(min(0.0, self.busy_at_s - now_s) / BUSY_S))


class PredictionAccount:
    """Follows one worker's reservations and reports, and freezes them into `PredictionInputs`."""

    def __init__(self, hello: WorkerHello, fleet_costs: Iterable[StepCosts]) -> None:
        """`fleet_costs`: what other workers of the fingerprint measured."""
        self._default_tpot_slo_s = hello.tpot_slo_s
        own = hello.costs if hello.costs is not None and hello.costs.is_usable else None
        self.are_costs_measured = own is not None
        """False: `costs` are those of others, or the cold ones."""
        self.costs = own or median_costs(fleet_costs) or COLD
        self.tokens_per_step = 1.0
        self.backlog = Backlog()
        self._head_since_s = 0.0
        self.decode_count = self.decode_context = self.joining_count = 0
        self._aggregated_prompts = 0
        """Prompts of sequences that will decode here and are computed here first."""
        self._tpot_slos: Counter[float] = Counter()
        self._reported_tokens = self._reported_decodes = self._reported_context = 0.0
        """Other routers' load, from the last report."""
        self._usual_decodes: float | None = None
        self._busy = self._busy_at_s = 0.0
        self._frozen: PredictionInputs | None = None

    def inputs(self, role: Role, elsewhere: UnreportedLoad) -> PredictionInputs:
        """The inputs as they are now: the same object until something changes."""
        if self._frozen is None:
            self._frozen = self.freeze(role, elsewhere)
        return self._frozen

    def freeze(self, role: Role, elsewhere: UnreportedLoad) -> PredictionInputs:
        others_decodes = self._reported_decodes + (elsewhere.sequences if role.decodes else 0)
        return PredictionInputs(
            self.costs,
            self.tokens_per_step,
            self.backlog,
            self._head_since_s,
            self.decode_count,
            self.decode_context,
            self.joining_count,
            tuple(self._tpot_slos.items()),
            self._strictest_tpot_slo_s(others_decodes),
            self._reported_tokens + elsewhere.tokens,
            others_decodes,
            self._reported_context,
            self._usual_decodes,
            self._busy,
            self._busy_at_s,
        )

    def changed(self) -> None:
        """The role, or what other routers have here, is different."""
        self._frozen = None

    def _strictest_tpot_slo_s(self, others_decodes: float) -> float:
        limits = list(self._tpot_slos)
        has_others = self.decode_count > self._tpot_slos.total() or others_decodes > 0
        if self._default_tpot_slo_s and has_others:
            limits.append(self._default_tpot_slo_s)
        return min(limits, default=0.0)

    # --- reports ------------------------------------------------------------------------------------

    def on_report(self, report: LoadReport, *, since_s: float) -> None:
        """`since_s`: time since the report before."""
        self._frozen = None
        if self._usual_decodes is None:
            self._usual_decodes = float(report.decoding_count)
        else:
            weight = 1.0 - exp(-max(0.0, since_s) / USUAL_S)
            self._usual_decodes += weight * (report.decoding_count - self._usual_decodes)
        if report.costs is not None and report.costs.is_usable:
            self.costs, self.are_costs_measured = report.costs, True
        self.tokens_per_step = min(TOKENS_PER_STEP_MAX, max(1.0, report.tokens_per_step))
        self._count_others(report)

    def _count_others(self, report: LoadReport) -> None:
        """What the report has beyond this router's own; prompts are reported with their cached part."""
        backlog = self.backlog
        fresh_share = backlog.tokens / backlog.full_tokens if backlog.full_tokens else 1.0
        self._reported_tokens = max(0, report.waiting_tokens - backlog.full_tokens) * fresh_share
        reported = report.decoding_count + report.incoming_count
        self._reported_decodes = max(0, reported - (self.decode_count - self._aggregated_prompts))
        mean_context = report.context_tokens / max(1, report.decoding_count)
        self._reported_context = self._reported_decodes * mean_context

    # --- reservations -------------------------------------------------------------------------------

    def reserved(self, made: Reservation, *, now_s: float) -> None:
        if made.tokens:
            if not self.backlog.prompts:
                self._head_since_s = now_s
            self._change_backlog(made, is_new=True)
        if made.phase is not Phase.PREFILL:
            self._change_decodes(made, 1)
            self.joining_count += 1

    def begun(self, reservation: Reservation, *, now_s: float) -> None:
        """The prompt is computed, or the KV is there. Its tokens are still in the reservation."""
        self._frozen = None
        if reservation.phase is not Phase.PREFILL:
            self.joining_count -= 1
        if reservation.tokens:
            self._change_backlog(reservation, is_new=False)
            self._head_since_s = now_s

    def released(self, reservation: Reservation) -> None:
        if reservation.tokens:
            self._change_backlog(reservation, is_new=False)
        if reservation.phase is not Phase.PREFILL:
            self._change_decodes(reservation, -1)
            self.joining_count -= not reservation.has_begun

    def prompt_sent(self, seconds: float, now_s: float) -> None:
        """A prompt was placed here that takes so long to compute."""
        self._frozen = None
        self._busy = self._busy * exp(min(0.0, self._busy_at_s - now_s) / BUSY_S) + seconds / BUSY_S
        self._busy_at_s = now_s

    def _change_backlog(self, reservation: Reservation, *, is_new: bool) -> None:
        self._frozen = None
        self._aggregated_prompts += (1 if is_new else -1) * (reservation.phase is Phase.AGGREGATED)
        change = self.backlog.plus if is_new else self.backlog.minus
        self.backlog = change(
            priority=reservation.profile.priority,
            full_tokens=reservation.full_tokens,
            tokens=reservation.tokens,
            pairs=reservation.pairs,
        )

    def _change_decodes(self, reservation: Reservation, sign: int) -> None:
        self._frozen = None
        profile = reservation.profile
        self.decode_count += sign
        self.decode_context += sign * profile.full_tokens
        if profile.tpot_slo_s:
            self._tpot_slos[profile.tpot_slo_s] += sign
            if not self._tpot_slos[profile.tpot_slo_s]:
                del self._tpot_slos[profile.tpot_slo_s]

    def check(self, reservations: Iterable[Reservation]) -> None:
        """Raises AssertionError if the sums are not those of the reservations."""
        listed = list(reservations)
        fresh = [r for r in listed if r.tokens]
        assert self.backlog[:4] == (
            sum(r.tokens for r in fresh),
            sum(r.pairs for r in fresh),
            len(fresh),
            sum(r.full_tokens for r in fresh),
        )
        decodes = [r for r in listed if r.phase is not Phase.PREFILL]
        assert self.decode_count == len(decodes)
        assert self.joining_count == sum(not r.has_begun for r in decodes)
        assert self._aggregated_prompts == sum(r.phase is Phase.AGGREGATED for r in fresh)
        assert self.decode_context == sum(r.profile.full_tokens for r in decodes)
        assert self._tpot_slos == Counter(r.profile.tpot_slo_s for r in decodes if r.profile.tpot_slo_s)
