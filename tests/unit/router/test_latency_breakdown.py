"""The latency breakdown of the time to first token, as the router adds it up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.costs import PhaseTimings
from baton.core.ids import SequenceId
from baton.core.messages import FailureReason, Role, SequenceOutput, StepOutput
from baton.core.sampling import FinishReason
from router.decisions.events import Finished
from router.decisions.latency_breakdown import LatencyClock
from tests.unit.router.script import Script


@pytest.fixture
def pair():
    script = Script()
    script.pair()
    return script


def told(script, worker, index, *tokens, timings=None, finish=None):
    output = SequenceOutput(SequenceId("s"), script.epoch(), index, tokens, finish, timings=timings)
    return script.says(worker, StepOutput((output,)))


def end(script) -> Finished:
    found = script.ends["s"]
    assert isinstance(found, Finished)
    return found


def test_a_split_sequence_tells_every_part(pair):
    pair.now_s = 1.0
    pair.submit(max_tokens=3)
    pair.now_s = 1.5
    told(pair, "p", 0, 10, timings=PhaseTimings(wait_s=0.1, load_s=0.05, compute_s=0.2))
    pair.now_s = 1.6
    pair.joined()
    pair.now_s = 1.7
    told(pair, "d", 1, 11, 12, finish=FinishReason.LENGTH)
    found = end(pair).latency_breakdown
    assert found is not None
    assert (found.queue_s, found.retries_s, found.wait_s, found.load_s, found.prefill_s) == pytest.approx(
        (0, 0, 0.1, 0.05, 0.2)
    )
    assert found.first_hop_s == pytest.approx(0.15)
    assert (found.transfer_s, found.first_decode_s) == pytest.approx((0.1, 0.1))
    assert found.ttft_s == pytest.approx(0.5)
    served = end(pair).served
    assert served is not None
    assert (served.prefill_worker, served.decode_worker, served.attempts) == ("p", "d", 1)


def test_a_lost_attempt_and_the_waiting_after_it_are_told_apart():
    script = Script()
    script.submit(max_tokens=1)
    script.now_s = 1.0
    script.join("a", Role.AGGREGATED)
    script.now_s = 3.0
    script.failed("a", FailureReason.INTERNAL)
    script.now_s = 3.5
    told(script, "a", 0, 10, timings=PhaseTimings(0.0, 0.0, 0.4))
    found = end(script).latency_breakdown
    assert found is not None
    assert (found.queue_s, found.retries_s, found.prefill_s) == pytest.approx((1.0, 2.0, 0.4))
    assert found.ttft_s == pytest.approx(3.5)
    assert end(script).served.attempts == 2


def test_timings_that_come_after_the_first_token_count(pair):
    pair.submit(max_tokens=2)
    pair.now_s = 1.0
    told(pair, "d", 0, 10)
    told(pair, "p", 0, 10, timings=PhaseTimings(0.25, 0.0, 0.5))
    told(pair, "d", 1, 11, finish=FinishReason.LENGTH)
    found = end(pair).latency_breakdown
    assert found is not None
    assert (found.wait_s, found.prefill_s, found.first_hop_s) == pytest.approx((0.25, 0.5, 0.25))


def test_a_later_attempts_timings_are_not_the_first_tokens(pair):
    pair.submit(max_tokens=3)
    pair.now_s = 1.0
    told(pair, "d", 0, 10)
    pair.failed("d")
    told(pair, "p", 1, 11, timings=PhaseTimings(0.25, 0.0, 0.5))
    told(pair, "d", 2, 12, finish=FinishReason.LENGTH)
    assert end(pair).latency_breakdown is None


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["lost", "told", "token", "decodes"]),
        st.floats(0, 10),
        st.tuples(*[st.floats(0, 10)] * 3),
    ),
    max_size=15,
)


@given(EVENTS)
def test_the_parts_are_never_negative_and_sum_up_to_the_time_to_first_token(events):
    clock, now_s, tokens, first_s, is_placed = LatencyClock(5.0), 5.0, 0, None, False
    for what, seconds, parts in events:
        now_s += seconds
        if not is_placed:
            clock.placed(now_s)
            is_placed = True
        elif what == "lost":
            clock.lost(now_s)
            is_placed = False
        elif what == "told":
            clock.on_timings(PhaseTimings(*parts))
        elif what == "token":
            tokens += 1
            clock.delivered(tokens, now_s)
            first_s = now_s if first_s is None else first_s
        else:
            clock.decodes(now_s)
    found = clock.latency_breakdown()
    if found is None:
        return
    assert min(getattr(found, name) for name in found.__struct_fields__) >= 0
    assert found.ttft_s == pytest.approx(first_s - 5.0, abs=1e-6)
