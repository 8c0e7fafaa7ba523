"""The request log has the requests that were asked for, by their ids, and never more than a bound."""

import logging

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.recent_requests import Moment, RecentRequest
from router.live.request_log import LINES_PER_S_MAX, RequestLog, fields_of, in_words

RECORD = RecentRequest(
    "cmpl-1",
    1e9,
    1.5,
    outcome="completed",
    verdict="missed_ttft",
    prompt_tokens=20,
    cached_tokens=16,
    completion_tokens=3,
    ttft_s=1.2,
    tpot_s=0.0123,
    parts={"route": 0.1},
    prefill_worker="prefill-0.1",
    decode_worker="decode-0.1",
    attempts=2,
    tenant="acme",
    slo_class="chat",
    client_request_id="mine",
    moments=(Moment(0.0, "placed"),),
)


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture(autouse=True)
def written():
    """Collect the log lines. (`caplog` would show a fixture lines from before the test.)"""
    logger, records, handler = logging.getLogger("baton.requests"), [], logging.Handler()
    handler.emit = records.append
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.mark.parametrize(("which", "count"), [("off", 0), ("troubled", 1), ("all", 2)])
def test_those_that_were_asked_for_have_a_line(which, count, written):
    log = RequestLog(which)
    for is_trouble in (True, False):
        log.ended(is_trouble=is_trouble, record=lambda: RECORD)
    assert len(written) == count


def test_a_line_says_who_what_and_where(written):
    RequestLog("all").ended(is_trouble=True, record=lambda: RECORD)
    (line,) = written
    assert line.getMessage() == (
        "cmpl-1 completed (missed ttft) in 1.500 s, 20 tokens in (16 cached), 3 out, TTFT 1.200 s, "
        "TPOT 12.3 ms, "
        "prefill-0.1 -> decode-0.1, 2 attempts, tenant acme, class chat, "
        "x-request-id mine"
    )
    assert line.fields["client_request_id"] == "mine"
    assert line.fields["parts"] == {"route": 0.1}
    assert "moments" not in line.fields


def test_a_line_says_why_the_first_of_several_attempts_ended():
    moments = (
        Moment(0.0, "placed", "idle"),
        Moment(0.4, "retried", "prefill-0.1 lost: the connection ended"),
        Moment(0.5, "placed"),
        Moment(0.9, "refused", "busy"),
    )
    retried = msgspec.structs.replace(RECORD, moments=moments, attempts=3)
    reason = "prefill-0.1 lost: the connection ended"
    assert f", 3 attempts (the first one ended: {reason}), tenant acme" in in_words(retried)
    assert fields_of(retried)["lost_attempt"] == reason
    once = msgspec.structs.replace(RECORD, moments=(Moment(0.1, "refused", "too long"),), attempts=1)
    assert "lost_attempt" not in fields_of(once)
    assert "attempt" not in in_words(once)


def test_nobody_writes_lines_of_their_own():
    forged = RecentRequest(
        "cmpl-3", 1e9, 0.1, outcome="invalid", error="no model a\n15:00:00 INFO fake \x1b[31m"
    )
    assert in_words(forged).endswith("no model a\\n15:00:00 INFO fake \\x1b[31m")


def test_what_is_not_known_is_left_out():
    refused = RecentRequest(
        "cmpl-2", 1e9, 0.1, outcome="refused", verdict="refused", error="the queue is full"
    )
    assert in_words(refused) == "cmpl-2 refused in 0.100 s, the queue is full"
    assert not {"ttft_s", "prefill_worker", "parts"} & fields_of(refused).keys()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gaps_ms=st.lists(st.integers(0, 400), min_size=1, max_size=200))
def test_under_overload_lines_are_bounded_and_what_is_left_out_is_counted(written, gaps_ms):
    clock, per_second = Clock(), {}
    log = RequestLog("troubled", now_s=clock)
    written.clear()
    for gap_ms in gaps_ms:
        clock.now_s += gap_ms / 4000
        for _ in range(3):
            log.ended(is_trouble=True, record=lambda: RECORD)
            per_second[int(clock.now_s)] = per_second.get(int(clock.now_s), 0) + 1
    clock.now_s += 1.0
    log.ended(is_trouble=True, record=lambda: RECORD)
    left_out = sum(r.args[0] for r in written if "more requests" in r.msg)
    recent_requests = [r for r in written if "more requests" not in r.msg]
    assert len(recent_requests) + left_out == 3 * len(gaps_ms) + 1
    assert len(recent_requests) == sum(min(LINES_PER_S_MAX, n) for n in per_second.values()) + 1
