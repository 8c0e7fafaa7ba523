from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.records import ErrorKind, RequestOutcome, RequestRecord
from loadgen.report import RunSettings, Slo, make_report
from loadgen.sse import OpenAIStream, StreamFault


def settings_with(slo):
    return RunSettings(trace="t", target="u", model="m", planned=9, slo=slo)


def done(planned_s, instants_s, *, tokens=None, prompt=10, cached=None):
    return RequestRecord(
        0,
        planned_s,
        sent_s=planned_s + 0.5,
        token_instants_s=instants_s,
        ended_s=instants_s[-1],
        outcome=RequestOutcome.COMPLETED,
        prompt_tokens=prompt,
        completion_tokens=tokens,
        cached_tokens=cached,
    )


def missed(outcome):
    return RequestRecord(0, 0.0, sent_s=0.0, ended_s=1.0, outcome=outcome, error=ErrorKind.TIMEOUT)


def test_latencies_count_from_the_planned_instant():
    report = make_report([done(10.0, [12.0, 13.0, 15.0])], settings_with(Slo()))
    assert report.ttft.p50 == 2.0  # 1.5 s since it was sent
    assert report.tpot.p50 == 1.5
    assert report.itl.max == 2.0
    assert report.e2e.p50 == 5.0
    assert report.lateness.p50 == 0.5
    assert report.output_tokens_per_s == pytest.approx(3 / 5)


def test_tpot_follows_the_servers_count_when_events_hold_several_tokens():
    assert done(0.0, [1.0, 5.0], tokens=9).tpot_s == 0.5
    assert done(0.0, [1.0], tokens=1).tpot_s is None


def test_goodput_counts_refused_and_failed_as_misses():
    records = [
        done(0.0, [1.0, 1.1]),
        done(0.0, [1.0]),  # one token: no TPOT to miss
        done(0.0, [3.0, 3.1]),
        done(0.0, [1.0, 2.0]),
        missed(RequestOutcome.REFUSED),
        missed(RequestOutcome.FAILED),
        missed(RequestOutcome.FAILED),
        done(0.0, [1.0, 10.0]),
    ]
    report = make_report(records, settings_with(Slo(ttft_s=2.0, tpot_s=0.5)))
    assert (report.offered, report.completed, report.refused, report.failed) == (8, 5, 1, 2)
    assert report.goodput_share == 2 / 8
    assert report.goodput_per_s == pytest.approx(2 / 10)
    assert report.errors == {"timeout": 3}
    assert make_report(records, settings_with(Slo())).goodput_share == 5 / 8


def test_cache_hits_are_weighted_by_tokens_where_the_server_tells():
    records = [done(0, [1], prompt=100, cached=50), done(0, [1], prompt=300, cached=0), done(0, [1])]
    assert make_report(records, settings_with(Slo())).cache_hit_ratio == 0.125
    assert make_report(records[2:], settings_with(Slo())).cache_hit_ratio is None


def test_an_empty_replay_has_a_report():
    report = make_report([], settings_with(Slo()))
    assert (report.offered, report.goodput_share, report.ttft) == (0, 0.0, None)


STREAM = (
    b': hello\r\nevent: x\r\ndata: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\r\n\r\n'
    b'data:{"choices": [{"delta": {"content": "\xc3\xa4"}}]}\n\n'
    b'data: {"choices": [{"text": "b", "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, '
    b'"prompt_tokens_details": null}}\n\ndata: [DONE]\n\n'
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_stream_reads_the_same_however_it_is_cut(cuts):
    record = RequestRecord(0, 0.0)
    stream = OpenAIStream(record)
    edges = [0, *sorted(cuts), len(STREAM)]
    for a, b in pairwise(edges):
        stream.feed(STREAM[a:b], now_s=1.0)
    stream.end(now_s=2.0)
    assert (record.outcome, record.finish_reason, record.token_instants_s) == (
        RequestOutcome.COMPLETED,
        "stop",
        [1.0, 1.0],
    )
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (7, 3, None)


@given(st.binary(max_size=80))
@settings(max_examples=200, deadline=None)
def test_garbage_is_a_fault_or_unfinished_and_never_a_completion(data):
    record = RequestRecord(0, 0.0)
    stream = OpenAIStream(record)

    def read():
        stream.feed(b"data: " + data + b"\n", now_s=0.0)
        stream.end(now_s=0.0)

    with pytest.raises(StreamFault):
        read()
    assert record.outcome is None


@given(
    gaps=st.lists(st.floats(0, 5), min_size=1, max_size=30),
    took_s=st.floats(0.001, 50),
    missing=st.integers(0, 5),
)
def test_goodput_is_never_more_than_what_was_offered(gaps, took_s, missing):
    at_s, records = 0.0, []
    for gap_s in gaps:
        at_s += gap_s
        records.append(done(at_s, [at_s + took_s]))
    records += [missed(RequestOutcome.REFUSED)] * missing
    report = make_report(records, settings_with(Slo()))
    assert report.goodput_per_s <= report.offered_per_s * (1 + 1e-9)
    assert report.requests_per_s <= report.offered_per_s * (1 + 1e-9)
    assert report.goodput_per_s == pytest.approx(report.goodput_share * report.offered_per_s)


def test_what_was_offered_counts_over_the_arrivals_and_what_was_done_over_all_of_it():
    records = [done(float(i), [i + 0.1]) for i in range(10)]
    report = make_report(records, settings_with(Slo()))
    assert (report.arrivals_s, report.duration_s) == pytest.approx((10.0, 9.1))
    assert (report.offered_per_s, report.goodput_per_s, report.requests_per_s) == pytest.approx((1, 1, 1))
    slow = make_report([*records, done(9.0, [20.0])], settings_with(Slo(5.0)))
    assert slow.offered_per_s == pytest.approx(10 / 9)
    assert slow.goodput_per_s == pytest.approx(10 / 9 * 10 / 11)
    assert slow.requests_per_s == pytest.approx(11 / 20)


def test_numbers_that_all_failures_share_are_shown():
    def failed(detail):
        return RequestRecord(
            0, 0.0, ended_s=1.0, outcome=RequestOutcome.FAILED, error=ErrorKind.TIMEOUT, detail=detail
        )

    report = make_report([failed("no end within 600 s")] * 3, settings_with(Slo()))
    assert report.failures == {"timeout, no end within 600 s": 3}
    report = make_report([failed(f"{i} bytes read") for i in range(3)], settings_with(Slo()))
    assert report.failures == {"timeout, N bytes read": 3}
