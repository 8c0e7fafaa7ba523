"""The router's demand report to the control plane, and when requests are counted for it. Pure."""

from collections.abc import Iterable

from baton.core.demand import DemandReport, Traits, WorkerLoad
from baton.core.ids import RouterId
from router.decisions.arrival_counters import ArrivalCounters
from router.decisions.cluster.view import ClusterView
from router.decisions.cluster.worker import WorkerView
from router.decisions.events import FailureKind
from router.decisions.flow import Flow
from router.decisions.request_state import RequestState

OWN_FAULT = frozenset({FailureKind.TOO_LONG, FailureKind.UNSUPPORTED})
"""Failures that more workers would not have prevented."""


def count_first_token(counters: ArrivalCounters, flow: Flow, *, now_s: float) -> None:
    submit = flow.submit
    counters.started(
        submit.slo_class,
        prompt_tokens=len(submit.prompt),
        cached_tokens=flow.cached_tokens,
        ttft_s=now_s - flow.arrived_s,
        objective_s=submit.ttft_slo_s,
    )


def count_end(counters: ArrivalCounters, flow: Flow, *, now_s: float) -> None:
    """Count a flow that has ended. Backup attempts are not counted."""
    submit, first_s = flow.submit, flow.clock.first_s
    if flow.is_backup:
        return
    if first_s is not None:
        counters.ended(
            submit.slo_class,
            prompt_tokens=len(submit.prompt),
            output_tokens=len(flow.generated),
            span_s=now_s - first_s,
            objective_s=submit.tpot_slo_s,
        )
    elif flow.state is RequestState.FAILED:
        if flow.failure not in OWN_FAULT:
            counters.gave_up(submit.slo_class)
    elif flow.state is RequestState.DONE:
        count_first_token(counters, flow, now_s=now_s)  # an embedding
    elif 0 < submit.ttft_slo_s < now_s - flow.arrived_s:
        counters.gave_up(submit.slo_class)  # the client gave up after its objective was missed


def demand_of(
    router_id: RouterId,
    counters: ArrivalCounters,
    cluster: ClusterView,
    flows: Iterable[Flow],
    *,
    up_s: float,
    now_s: float,
) -> DemandReport:
    queued = [flow.token_count for flow in flows if flow.state is RequestState.QUEUED]
    return DemandReport(
        router_id=router_id,
        up_s=up_s,
        classes=counters.totals(),
        queued=len(queued),
        queued_prompt_tokens=sum(queued),
        workers=tuple(_load(worker, now_s) for worker in cluster),
    )


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
