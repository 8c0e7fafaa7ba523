"""The router's demand report to the control plane, and when requests are counted for it. Pure."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.demand import DemandReport, Traits, WorkerLoad
from baton.core.ids import RequestId, RouterId, SequenceId
from router.decisions.arrival_counters import ArrivalCounters, context_of, is_slow
from router.decisions.cluster.view import ClusterView
from router.decisions.cluster.worker import WorkerView
from router.decisions.events import FailureKind, SequencePart
from router.decisions.flow import Flow
from router.decisions.request_state import RequestState

OWN_FAULT = frozenset({FailureKind.TOO_LONG, FailureKind.UNSUPPORTED})
"""Failures that more workers would not have prevented."""


SEARCHES_MAX = 1024
"""Largest number of beam searches whose end was counted that are remembered."""


@dataclass(slots=True)
class _Tally:
    """A request of which sequences are live."""

    arrived_s: float
    ttft_slo_s: float
    live: set[SequenceId]
    """Sequences by the names that clients know."""
    has_first: bool = False
    failure: FailureKind | None = None
    """Failure of a sequence, those that more workers would have prevented first."""
    has_output: bool = False
    """True if an answer has more than one token."""
    is_slow: bool = False


class RequestCounter:
    """Counts requests for the autoscaler. One request of a client is one arrival with one verdict.

    It may have any number of sequences, at once or one after another. Its prompts count once each, whatever
    the number of answers, and its TTFT is that of the first token of any sequence."""

    def __init__(self) -> None:
        self.counters = ArrivalCounters()
        self._live: dict[RequestId, _Tally] = {}
        self._searches: OrderedDict[RequestId, None] = OrderedDict()
        """Beam searches whose end was counted. Their later steps count as output alone."""

    @property
    def is_idle(self) -> bool:
        return not self._live

    def submitted(self, flow: Flow) -> None:
        submit, tokens = flow.submit, len(flow.submit.prompt)
        tally = self._live.get(submit.request_id)
        if submit.part is SequencePart.REQUEST and tally is None:
            self.counters.arrived(submit.slo_class, tokens)
        elif submit.part in _NEW_PROMPTS:
            self.counters.further_prompt(submit.slo_class, tokens)
        if tally is None:
            # A sequence that comes after all others of its request have ended adds nothing to the verdict.
            is_judged = submit.part is not SequencePart.REQUEST
            tally = _Tally(flow.arrived_s, submit.ttft_slo_s, set(), has_first=is_judged)
            self._live[submit.request_id] = tally
        tally.live.add(submit.seq_id)

    def on_first_token(self, flow: Flow, *, now_s: float) -> frozenset[SequenceId]:
        """Count the first token of a sequence. Return the other live sequences of the request if this is the
        request's first token, because its TTFT objective is settled."""
        submit = flow.submit
        if submit.part in _NEW_PROMPTS:
            self.counters.prefilled(
                submit.slo_class, prompt_tokens=len(submit.prompt), cached_tokens=flow.cached_tokens
            )
        tally = self._live[submit.request_id]
        if tally.has_first:
            return frozenset()
        tally.has_first = True
        ttft_s = now_s - tally.arrived_s
        self.counters.started(submit.slo_class, ttft_s=ttft_s, objective_s=tally.ttft_slo_s)
        return frozenset(tally.live - {submit.seq_id})

    def ended(self, flow: Flow, *, now_s: float) -> frozenset[SequenceId]:
        """Count a sequence that has ended, once for all its attempts. Return what `on_first_token` does."""
        submit, settled = flow.submit, frozenset[SequenceId]()
        tally = self._live[submit.request_id]
        if not flow.generated and flow.state is RequestState.DONE:
            settled = self.on_first_token(flow, now_s=now_s)  # an embedding
        elif flow.failure is not None and (tally.failure is None or tally.failure in OWN_FAULT):
            tally.failure = flow.failure
        self._count_output(flow, tally, now_s=now_s)
        tally.live.discard(submit.seq_id)
        if tally.live:
            return settled
        del self._live[submit.request_id]
        if not tally.has_first and _is_missed(tally, now_s=now_s):
            self.counters.gave_up(submit.slo_class)
        if tally.has_output:
            self.counters.ended(submit.slo_class, is_slow=tally.is_slow)
        return settled

    def _count_output(self, flow: Flow, tally: _Tally, *, now_s: float) -> None:
        """Count the tokens of an answer. A single token says nothing about decoding and is not counted,
        except that every step of a beam search adds one."""
        submit, count = flow.submit, len(flow.generated)
        if submit.part is SequencePart.STEP:
            if not count:
                return
            if submit.request_id not in self._searches:
                self._searches[submit.request_id] = None
                tally.has_output = True
                if len(self._searches) > SEARCHES_MAX:
                    self._searches.popitem(last=False)
        elif count < 2:
            return
        else:
            tally.has_output = True
        context_tokens = context_of(len(submit.prompt), count)
        self.counters.generated(submit.slo_class, output_tokens=count, context_tokens=context_tokens)
        span_s = now_s - (flow.clock.first_s or now_s)
        tally.is_slow |= is_slow(count, span_s=span_s, objective_s=submit.tpot_slo_s)


_NEW_PROMPTS = (SequencePart.REQUEST, SequencePart.PROMPT)


def _is_missed(tally: _Tally, *, now_s: float) -> bool:
    """Whether a request that ended without a token missed its objective."""
    if tally.failure is not None:
        return tally.failure not in OWN_FAULT
    # The client may have given up because its objective was missed.
    return 0 < tally.ttft_slo_s < now_s - tally.arrived_s


def demand_of(
    router_id: RouterId,
    requests: RequestCounter,
    cluster: ClusterView,
    flows: Iterable[Flow],
    *,
    up_s: float,
    now_s: float,
) -> DemandReport:
    queued = [flow for flow in flows if flow.state is RequestState.QUEUED]
    return DemandReport(
        router_id=router_id,
        up_s=up_s,
        classes=requests.counters.totals(),
        queued=len(queued),
        queued_prompt_tokens=sum(map(_tokens_to_compute, queued)),
        workers=tuple(_load(worker, now_s) for worker in cluster),
    )


def _tokens_to_compute(flow: Flow) -> int:
    """Return the tokens that wait. Answers and steps find the prompt that they share in a cache."""
    return flow.token_count if flow.submit.part in _NEW_PROMPTS else 1 + len(flow.generated)


def _load(worker: WorkerView, now_s: float) -> WorkerLoad:
    hello, report, prediction = worker.hello, worker.load.report, worker.prediction
    traits = Traits(
        prediction.costs,
        hello.step_tokens_max,
        hello.batch_sequences_max,
        hello.block_count * hello.block_tokens,
    )
    known_traits = traits if prediction.are_costs_measured else None
    if report is None:
        return WorkerLoad(hello.worker_id, worker.facts.role, 0.0, 0, 0, 0, 0.0, known_traits)
    return WorkerLoad(
        hello.worker_id,
        worker.facts.role,
        now_s - worker.load.report_at_s,
        report.waiting_tokens,
        report.decoding_count + report.incoming_count,
        report.context_tokens,
        1.0 - report.free_blocks / max(1, hello.block_count),
        known_traits,
    )
