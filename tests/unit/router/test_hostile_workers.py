"""Workers that report nonsense: placement goes on with finite predictions, and others are not worse off."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config import RouterConfig
from baton.core.costs import PhaseTimings, StepCosts
from baton.core.ids import WorkerId
from baton.core.messages import LoadReport, Role, SequenceJoined, WorkerHello
from baton.core.policies import PLACEMENT_POLICIES
from baton.wire.client import impossible
from router.decisions.cluster.view import ClusterView
from router.decisions.placement.interface import NoPlace, PolicyTools
from router.decisions.placement.table import make_placement_policy
from router.decisions.prediction.correction import Correction, ErrorWindow
from router.decisions.prediction.links import Links
from router.decisions.prediction.model import attainment_probability
from router.decisions.prediction.predictor import Predictor
from tests.unit.router.snapshots import COSTS, request_of

numbers = st.one_of(
    st.floats(), st.sampled_from([0.0, -1.0, 1e-300, 1e300, math.nan, math.inf, -math.inf, 5e-324])
)
costs = st.one_of(st.none(), st.builds(StepCosts, numbers, numbers, numbers, numbers, numbers))
counts = st.one_of(st.integers(0, 2000), st.sampled_from([2**32 - 1]))
totals = st.one_of(st.integers(0, 10**6), st.sampled_from([2**64 - 1]))
roles = st.sampled_from(list(Role))
hellos = st.builds(
    WorkerHello,
    worker_id=st.just(WorkerId("x")),
    role=roles,
    fingerprint=st.just("f"),
    model=st.just("m"),
    block_tokens=st.integers(1, 64),
    block_count=st.integers(1, 10**6),
    max_model_tokens=st.integers(1, 2**32 - 1),
    costs=costs,
    block_bytes=totals,
    step_tokens_max=st.integers(1, 2**32 - 1),
    batch_sequences_max=st.integers(1, 2**32 - 1),
    tpot_slo_s=st.floats(0, 1e300, allow_infinity=False),
    chunk_tokens_min=counts,
    host=st.just("h"),
)
reports = st.builds(
    LoadReport,
    role=roles,
    is_draining=st.booleans(),
    free_blocks=counts,
    running_count=counts,
    waiting_count=counts,
    waiting_tokens=totals,
    step_s=numbers,
    costs=costs,
    decoding_count=counts,
    context_tokens=totals,
    tokens_per_step=numbers,
    incoming_count=counts,
)
timings = st.one_of(st.none(), st.builds(PhaseTimings, numbers, numbers, numbers))


def cluster_of(hello, said):
    cluster = ClusterView(silence_s=1e9)
    cluster.join(hello, "x:1")
    for name, role in (("a", Role.PREFILL), ("b", Role.DECODE), ("c", Role.AGGREGATED)):
        sound = WorkerHello(WorkerId(name), role, "f", "m", hello.block_tokens, 1000, 100_000, costs=COSTS)
        cluster.join(sound, f"{name}:1")
        cluster[sound.worker_id].on_report(LoadReport(role, False, 900, 1, 0, 0, 0.01), now_s=0.0)
    for at_s, report in enumerate(said):
        cluster[WorkerId("x")].on_report(report, now_s=float(at_s))
    return cluster


@pytest.mark.parametrize("name", sorted(PLACEMENT_POLICIES))
@settings(max_examples=60, deadline=None)
@given(
    hello=hellos,
    said=st.lists(reports, max_size=4),
    tokens=st.integers(1, 200_000),
    measured=st.lists(st.tuples(numbers, timings), max_size=4),
    now_s=st.floats(-1e6, 1e9),
)
def test_placement_stays_finite_whatever_a_worker_says(name, hello, said, tokens, measured, now_s):
    cluster, predictor = cluster_of(hello, said), Predictor(error_max=1.0)
    policy = make_placement_policy(name, PolicyTools(RouterConfig(), predictor, random.Random(1)))
    for elapsed_s, parts in [*measured, (0.5, None)]:
        snapshot = cluster.snapshot(now_s)
        found = policy.place(request_of(tokens), snapshot)
        if isinstance(found, NoPlace):
            continue
        if found.forecast is not None:
            told = found.forecast
            times = [*(part for part in told if isinstance(part, float)), told.ttft_quantile_s(0.9)]
            assert all(map(math.isfinite, [*times, told.tpot_quantile_s(0.99)])), told
            assert 0.0 <= found.forecast.meets <= 1.0
        if found.predicted is not None:
            for worker in snapshot.workers.values():
                predictor.observe_first_token(worker, found.predicted, elapsed_s, parts)
                predictor.observe_end(worker, found.predicted, 20, elapsed_s, is_whole=True)
    assert math.isfinite(predictor.excess)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), max_size=300))
def test_a_correction_stays_a_number(observations):
    learnt, window = Correction(), ErrorWindow()
    for predicted_s, actual_s in observations:
        learnt.observe(predicted_s, actual_s)
        window.observe(predicted_s, actual_s, tolerance_s=0.01)
    assert 0.0 < learnt.factor() < 1e3
    assert 0.0 < learnt.sigma < 2.0
    assert not math.isnan(window.mape)
    assert window.excess >= 0.0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(totals, numbers, numbers), max_size=50), totals, numbers)
def test_links_stay_numbers(transfers, total_bytes, hidden_s):
    links = Links()
    for transferred_bytes, transfer_s, handover_s in transfers:
        links.observe("l", transferred_bytes=transferred_bytes, transfer_s=transfer_s, handover_s=handover_s)
    hidden_s = hidden_s if math.isfinite(hidden_s) else 0.0
    late_s = links.exposed_s("l", total_bytes=total_bytes, last_bytes=total_bytes / 2, hidden_s=hidden_s)
    assert 0.0 <= late_s < math.inf


@given(st.floats(-1e9, 1e300), st.floats(0, 1e300), st.floats(0.05, 1.5))
def test_a_probability_is_one(limit_s, predicted_s, sigma):
    assert 0.0 <= attainment_probability(limit_s, predicted_s, sigma) <= 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in ("block_tokens", "block_count", "max_model_tokens", "step_tokens_max")),
        ("batch_sequences_max", 0),
        *(("tpot_slo_s", value) for value in (math.nan, math.inf, -1.0)),
    ],
)
def test_a_hello_that_cannot_be_is_refused(name, value):
    fields = {"worker_id": WorkerId("x"), "role": Role.DECODE, "fingerprint": "f", "model": "m"}
    sound = {"block_tokens": 16, "block_count": 8, "max_model_tokens": 100}
    assert not impossible(WorkerHello(**fields, **sound))
    assert name in impossible(WorkerHello(**fields, **{**sound, name: value}))


def test_a_joined_message_without_times_teaches_nothing():
    predictor = Predictor(error_max=1.0)
    before = predictor.links.exposed_s(("a", "b"), total_bytes=10**9, last_bytes=10**8, hidden_s=0.0)
    fields = {"seq_id": "s", "epoch": 1}
    for bad in (math.nan, math.inf, -1.0):
        joined = SequenceJoined(**fields, transferred_bytes=10**9, transfer_s=0.0, handover_s=bad)
        predictor.observe_joined("a", "b", joined)
    after = predictor.links.exposed_s(("a", "b"), total_bytes=10**9, last_bytes=10**8, hidden_s=0.0)
    assert after == before
