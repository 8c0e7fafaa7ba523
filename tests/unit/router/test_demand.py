"""Reports of demand: each request counts once, whatever becomes of it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.demand import Bin, ClassLoad, DemandReport, bin_of, difference, total
from baton.core.ids import RequestId, RouterId, SequenceId, WorkerId
from baton.core.messages import FailureReason, LoadReport, RefusalReason, Role
from baton.core.sampling import FinishReason, SamplingParams
from router.decisions.events import Submit
from tests.unit.router.script import Script

CLASS = "chat"


@pytest.fixture
def pair():
    script = Script(attempts_max=2)
    script.pair()
    return script


def submit(script, seq="s", *, prompt=5, ttft_s=1.0, tpot_s=0.1, max_tokens=4):
    script.do(
        Submit(
            SequenceId(seq),
            RequestId(seq),
            tuple(range(prompt)),
            SamplingParams(max_tokens=max_tokens),
            salt=b"",
            deadline_s=1000.0,
            slo_class=CLASS,
            ttft_slo_s=ttft_s,
            tpot_slo_s=tpot_s,
        )
    )


def demand(script):
    return script.core.demand(RouterId("r"), now_s=script.now_s)


def load(script):
    return demand(script).classes[CLASS]


def test_an_answer_in_time_is_counted_by_what_it_took(pair):
    submit(pair)
    assert load(pair) == ClassLoad({bin_of(5): Bin(1, 5)})
    pair.now_s = 0.5
    pair.output("p", 0, 10, cached=4)
    pair.joined()
    pair.now_s = 0.6
    pair.output("d", 1, 11, 12, finish=FinishReason.LENGTH)
    assert load(pair) == ClassLoad(
        {bin_of(5): Bin(1, 5)},
        started=1,
        started_prompt_tokens=5,
        cached_tokens=4,
        ended=1,
        output_tokens=3,
        context_tokens=3 * 5 + 3,
    )


def test_a_late_first_token_and_slow_ones_after_it_are_missed(pair):
    submit(pair)
    pair.now_s = 1.5
    pair.output("p", 0, 10)
    pair.now_s = 3.0
    pair.output("d", 1, 11, finish=FinishReason.LENGTH)
    assert (load(pair).ttft_missed, load(pair).tpot_missed) == (1, 1)


def test_what_gets_no_place_and_what_is_lost_for_good_missed_its_first_token():
    script = Script(queue_wait_s=5.0)
    submit(script)
    report = demand(script)
    assert (report.queued, report.queued_prompt_tokens) == (1, 5)
    script.at(6.0)
    assert (load(script).started, load(script).ttft_missed) == (1, 1)
    assert demand(script).queued == 0


def test_attempts_that_fail_count_once(pair):
    submit(pair)
    pair.failed("p", FailureReason.INTERNAL)
    assert load(pair).started == 0
    pair.failed("p", FailureReason.INTERNAL)
    assert "s" in pair.ends
    assert (load(pair).started, load(pair).ttft_missed) == (1, 1)


def test_no_number_of_workers_would_serve_what_is_too_long(pair):
    submit(pair)
    pair.refused("p", RefusalReason.TOO_LONG)
    assert "s" in pair.ends
    assert load(pair).started == load(pair).ttft_missed == 0


def test_a_client_that_leaves_before_its_time_is_up_missed_nothing_and_later_it_did(pair):
    submit(pair, "early")
    pair.now_s = 0.5
    pair.leave("early")
    assert load(pair).ttft_missed == 0
    submit(pair, "late")
    pair.now_s = 2.5
    pair.leave("late")
    assert load(pair).ttft_missed == 1


def test_a_worker_is_told_with_what_it_said_of_itself(pair):
    pair.now_s = 2.0
    pair.says("d", LoadReport(Role.DECODE, False, 25, 3, 0, 7, 0.01, decoding_count=2, incoming_count=1))
    pair.now_s = 3.0
    told = {w.worker_id: w for w in demand(pair).workers}
    decode = told[WorkerId("d")]
    assert (decode.role, decode.age_s, decode.waiting_tokens, decode.decoding) == (Role.DECODE, 1.0, 7, 3)
    assert decode.held_share == 0.75
    assert decode.traits is None, "it never said what its steps cost"


def test_a_report_crosses_the_wire(pair):
    submit(pair)
    report = demand(pair)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=DemandReport) == report


counts = st.integers(0, 1000)
bins = st.dictionaries(st.integers(0, 47), st.builds(Bin, st.integers(1, 50), st.integers(1, 10**6)))
loads = st.builds(ClassLoad, bins, counts, counts, counts, counts, counts, counts, counts, counts)


@given(loads, loads)
def test_a_difference_of_totals_is_what_came_between(before, came):
    assert difference(total([before, came]), before) == came
