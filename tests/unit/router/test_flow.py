"""The life of one sequence when something fails, with a script per row of the table of failures in the
design."""

import pytest

from baton.config.router import RouterConfig
from baton.core.ids import SequenceId, WorkerId
from baton.core.messages import (
    STILL_COMPILED,
    FailureReason,
    Phase,
    RefusalReason,
    Role,
    SequenceFailed,
    SequenceJoined,
    SequenceRefused,
)
from baton.core.sampling import FinishReason
from router.decisions.attempts import COMPILE_RETRY_S
from router.decisions.events import ClientGone, FailureKind, WorkerUpdated
from tests.unit.router.script import Script


@pytest.fixture
def pair():
    script = Script()
    script.pair()
    return script


def test_prefill_lost_before_its_token_is_placed_again_from_the_prompt(pair):
    pair.join("p2", Role.PREFILL)
    pair.submit()
    first = next(w for w in pair.phases() if w != "d")
    pair.lose(first)
    other = {"p", "p2"} - {first}
    assert pair.cancelled() == {"d": 0}
    assert pair.phases() == {other.pop(): Phase.PREFILL, "d": Phase.DECODE}
    assert {s.epoch for s in pair.started().values()} == {1}
    assert pair.started()["d"].tokens == (1, 2, 3, 4, 5)


def test_prefill_lost_after_its_token_keeps_the_token(pair):
    pair.join("p2", Role.PREFILL)
    pair.submit()
    first = next(w for w in pair.phases() if w != "d")
    pair.output(first, 0, 10)
    pair.lose(first)
    assert pair.started()["d"].tokens == (1, 2, 3, 4, 5, 10)
    assert pair.started()["d"].prompt_token_count == 5
    second = next(w for w in pair.phases() if w != "d")
    pair.output(second, 1, 11)
    pair.output("d", 1, 11, 12, 13, finish=FinishReason.LENGTH)
    assert pair.delivered["s"] == [10, 11, 12, 13]


def test_prefill_lost_after_decode_joined_changes_nothing(pair):
    pair.submit()
    pair.output("p", 0, 10)
    pair.joined()
    pair.lose("p")
    assert pair.actions == []
    pair.output("d", 0, 10, 11, 12, 13, finish=FinishReason.LENGTH)
    assert pair.delivered["s"] == [10, 11, 12, 13]


def test_prefill_failing_after_decode_joined_changes_nothing(pair):
    pair.submit()
    pair.joined()
    pair.failed("p")
    assert pair.actions == []
    assert pair.in_flight() == {"p": 0, "d": 1}


@pytest.mark.parametrize("reason", [FailureReason.TRANSFER, FailureReason.SOURCE_LOST])
def test_a_transfer_that_fails_is_placed_again_avoiding_the_source(pair, reason):
    pair.join("p2", Role.PREFILL)
    pair.submit()
    first = next(w for w in pair.phases() if w != "d")
    pair.failed("d", reason)
    assert pair.cancelled() == {first: 0}
    assert pair.phases() == {({"p", "p2"} - {first}).pop(): Phase.PREFILL, "d": Phase.DECODE}


def test_decode_without_room_moves_to_another_decode_worker(pair):
    pair.join("d2", Role.DECODE)
    pair.submit()
    first = next(w for w in pair.phases() if w != "p")
    pair.output("p", 0, 10)
    pair.refused(first, RefusalReason.NO_ROOM)
    assert pair.cancelled() == {"p": 0}
    assert pair.phases() == {"p": Phase.PREFILL, ({"d", "d2"} - {first}).pop(): Phase.DECODE}
    assert pair.started()["p"].tokens == (1, 2, 3, 4, 5, 10)


def test_without_another_decode_worker_it_waits_for_a_report(pair):
    pair.submit()
    for _ in range(8):
        pair.refused("d", RefusalReason.NO_ROOM)
        assert pair.phases() == {}
        pair.now_s += 0.2
        pair.report("d", Role.DECODE)
        while not pair.started():
            pair.at(pair.core.next_tick_s)
        assert set(pair.phases()) == {"p", "d"}
    assert pair.now_s > 3.0  # The core did not spin.


def test_without_room_anywhere_it_ends_with_no_capacity_when_its_wait_is_over():
    script = Script(queue_wait_s=5.0)
    script.pair()
    script.submit()
    script.refused("d", RefusalReason.NO_ROOM)
    while not script.core.is_idle:
        script.at(script.core.next_tick_s)
    assert script.now_s == 5.0
    assert script.ends["s"].kind is FailureKind.NO_CAPACITY
    assert script.ends["s"].retry_after_s >= 1.0


def test_busy_with_the_grammars_of_others_means_another_worker_and_no_fault_of_this_one(pair):
    pair.join("p2", Role.PREFILL)
    pair.submit()
    for _ in range(12):
        first = next(w for w, phase in pair.phases().items() if phase is Phase.PREFILL)
        pair.refused(first, RefusalReason.BUSY)
        while not pair.phases():
            pair.at(pair.core.next_tick_s)
        assert ({"p", "p2"} - {first}).pop() in pair.phases()
    assert pair.core.status().failure_handling.breakers_opened == 0
    assert "retried" not in pair.notes()


def test_busy_everywhere_ends_with_no_capacity_and_a_hint_when_to_come_back():
    script = Script(queue_wait_s=5.0)
    script.pair()
    script.submit()
    while not script.core.is_idle:
        while "p" in script.phases():
            script.refused("p", RefusalReason.BUSY, message="its grammar was not ready")
        script.at(script.core.next_tick_s)
    assert script.now_s == 5.0
    end = script.ends["s"]
    assert end.kind is FailureKind.NO_CAPACITY
    assert end.retry_after_s >= 1.0
    assert end.message.endswith("within 5 s: p refused it, busy: its grammar was not ready")


def test_a_grammar_that_is_still_being_compiled_is_said_and_when_to_come_back_for_it():
    script = Script(queue_wait_s=5.0)
    script.pair()
    script.submit()
    while not script.core.is_idle:
        while "p" in script.phases():
            script.refused(
                "p", RefusalReason.BUSY, message=f"{STILL_COMPILED} after 2 s: this machine is busy"
            )
        script.at(script.core.next_tick_s)
    end = script.ends["s"]
    assert end.kind is FailureKind.NO_CAPACITY
    assert end.retry_after_s == COMPILE_RETRY_S
    assert end.message.startswith(
        "the grammar is still being compiled, and was not ready within 5 s: p refused"
    )


def test_a_refusal_before_a_loss_does_not_explain_the_wait_after_it():
    script = Script(queue_wait_s=5.0, fallback_to_other_pool=False)
    script.pair()
    script.submit()
    script.refused("p", RefusalReason.BUSY)
    script.at(script.core.next_tick_s)
    script.lose("d")
    script.at(script.now_s + 5.0)
    assert "no decode worker" in script.ends["s"].message


def test_decode_lost_while_streaming_resumes_with_all_tokens_sent(pair):
    pair.join("d2", Role.DECODE)
    pair.submit(max_tokens=6)
    first = next(w for w in pair.phases() if w != "p")
    other = ({"d", "d2"} - {first}).pop()
    pair.output("p", 0, 10)
    pair.joined(first)
    pair.output(first, 0, 10, 11, 12)
    pair.lose(first)
    assert pair.cancelled() == {}  # Prefill was done.
    assert pair.phases() == {"p": Phase.PREFILL, other: Phase.DECODE}
    assert pair.started()[other].tokens == (1, 2, 3, 4, 5, 10, 11, 12)
    pair.output("p", 3, 13)
    pair.output(other, 3, 13, 14, 15, finish=FinishReason.LENGTH)
    assert pair.delivered["s"] == [10, 11, 12, 13, 14, 15]
    assert pair.ends["s"].generated_count == 6


def test_decode_lost_with_one_token_left_is_finished_by_a_prefill_worker(pair):
    pair.submit(max_tokens=3)
    pair.output("p", 0, 10)
    pair.output("d", 0, 10, 11)
    pair.lose("d")
    assert pair.phases() == {"p": Phase.AGGREGATED}
    pair.output("p", 2, 12, finish=FinishReason.LENGTH)
    assert pair.delivered["s"] == [10, 11, 12]


def test_an_answer_heard_whole_from_decode_has_its_count_of_cached_tokens(pair):
    pair.submit(max_tokens=2)
    pair.output("d", 0, 11, cached=3)
    pair.output("d", 1, 12, finish=FinishReason.LENGTH)
    assert pair.ended() == (FinishReason.LENGTH, 2, 3)


def test_a_lost_attempts_late_words_change_nothing(pair):
    pair.submit()
    pair.failed("p")
    assert pair.epoch() == 1
    pair.output("d", 0, 99, epoch=0)
    pair.output("p", 0, 98, epoch=0)
    assert pair.actions == []
    pair.output("p", 0, 10)
    assert pair.delivered["s"] == [10]


def test_a_lost_attempts_late_failure_or_refusal_changes_nothing(pair):
    pair.submit()
    pair.failed("p")
    for message in (
        SequenceFailed(SequenceId("s"), 0, FailureReason.TRANSFER, ""),
        SequenceRefused(SequenceId("s"), 0, RefusalReason.NO_ROOM, ""),
        SequenceJoined(SequenceId("s"), 0, 1, 0.0, 0.0),
    ):
        assert pair.says("d", message) == []
    assert pair.epoch() == 1


def test_a_lost_attempts_finish_does_not_end_the_next(pair):
    pair.submit(max_tokens=9)
    pair.output("d", 2, 12, finish=FinishReason.STOP)  # Tokens 0 and 1 never come.
    pair.join("d2", Role.DECODE)
    pair.lose("d")
    pair.output("p", 0, 10)
    pair.output("d2", 0, 10, 11, 12, 13)
    assert pair.delivered["s"] == [10, 11, 12, 13]


@pytest.mark.parametrize("heard", ["nothing", "first token", "joined"])
def test_client_gone_cancels_at_every_holder_and_says_no_more(pair, heard):
    pair.submit()
    if heard != "nothing":
        pair.output("p", 0, 10)
    if heard == "joined":
        pair.joined()
    pair.do(ClientGone(SequenceId("s")))
    assert pair.cancelled() == ({"d": 0} if heard == "joined" else {"p": 0, "d": 0})
    assert len(pair.actions) == len(pair.cancelled())
    assert pair.core.is_idle
    assert pair.in_flight() == {"p": 0, "d": 0}
    pair.output("d", 1, 11)
    assert pair.actions == []


def test_deadline_over_cancels_and_fails(pair):
    pair.submit(deadline_s=3.0)
    pair.output("p", 0, 10)
    assert pair.core.next_tick_s == 3.0
    pair.at(3.0)
    assert pair.cancelled() == {"p": 0, "d": 0}
    assert pair.ends["s"].kind is FailureKind.DEADLINE
    assert pair.core.is_idle


def test_deadline_over_in_the_queue_fails():
    script = Script()
    script.submit(deadline_s=3.0)
    script.at(3.0)
    assert script.ends["s"].kind is FailureKind.DEADLINE


@pytest.mark.parametrize(("left", "empty"), [("p", "decode"), ("d", "prefill")])
def test_an_empty_pool_is_served_on_the_other_and_shown(pair, left, empty):
    pair.lose("d" if left == "p" else "p")
    pair.submit()
    assert pair.phases() == {left: Phase.AGGREGATED}
    assert pair.notes() == ["fallback"]
    status = pair.core.status()
    assert (status.is_fallback_in_use, status.is_degraded, status.is_ready) == (True, True, True)
    assert (status.is_prefill_pool_empty, status.is_decode_pool_empty) == (
        empty == "prefill",
        empty == "decode",
    )


def test_an_empty_pool_without_fallback_waits_then_503():
    script = Script(fallback_to_other_pool=False, queue_wait_s=7.0)
    script.join("p", Role.PREFILL)
    script.submit()
    assert script.phases() == {}
    assert not script.core.status().is_ready
    script.at(7.0)
    assert script.ends["s"].kind is FailureKind.NO_CAPACITY


def test_an_empty_pool_without_fallback_goes_on_when_a_worker_joins():
    script = Script(fallback_to_other_pool=False)
    script.join("p", Role.PREFILL)
    script.submit()
    script.join("d", Role.DECODE)
    assert set(script.starts["s"]) == {"p", "d"}
    assert not script.core.status().is_degraded


def test_too_long_ends_at_once(pair):
    pair.submit()
    pair.refused("d", RefusalReason.TOO_LONG)
    assert pair.cancelled() == {"p": 0}
    assert pair.ends["s"].kind is FailureKind.TOO_LONG


def test_longer_than_every_worker_is_refused_before_it_is_sent(pair):
    pair.submit(prompt=tuple(range(401)))  # The worker has 100 blocks of 4 tokens.
    assert pair.ends["s"].kind is FailureKind.TOO_LONG


def test_attempts_are_limited(pair):
    pair.submit()
    losses = 0
    while "s" not in pair.ends:
        pair.failed("p")
        losses += 1
        if "s" not in pair.ends and not pair.started():
            pair.at(pair.core.next_tick_s)
    assert losses == 8
    assert pair.ends["s"].kind is FailureKind.ATTEMPTS
    assert pair.core.is_idle


def test_a_draining_worker_gets_nothing_new(pair):
    pair.join("d2", Role.DECODE)
    pair.do(WorkerUpdated(WorkerId("d2"), Role.DECODE, True))
    for i in range(5):
        pair.submit(str(i))
        assert "d2" not in pair.phases()
    pair.report("d", Role.DECODE, draining=True)
    pair.do(WorkerUpdated(WorkerId("d2"), Role.DECODE, False))
    pair.submit("again")
    assert "d" not in pair.phases()


def test_a_drained_sequence_goes_on_elsewhere(pair):
    pair.join("d2", Role.DECODE)
    pair.submit()
    first = next(w for w in pair.phases() if w != "p")
    pair.failed(first, FailureReason.DRAINED)
    assert first not in pair.phases()


def test_a_silent_worker_is_used_only_when_nothing_else_is_left(pair):
    pair.join("d2", Role.DECODE)
    pair.now_s = RouterConfig().worker_silence_s + 0.5
    pair.report("d2", Role.DECODE, running=50)
    pair.submit("a")
    assert "d2" in pair.phases()
    pair.lose("d2")
    pair.submit("b")
    assert "d" in pair.phases()


def test_a_worker_that_joins_again_lost_what_it_had(pair):
    pair.submit()
    pair.join("d", Role.DECODE)
    assert pair.epoch() == 1
    assert pair.in_flight() == {"p": 1, "d": 1}


def test_a_role_that_switches_is_used_in_its_new_role(pair):
    pair.join("x", Role.PREFILL)
    pair.lose("d")
    pair.do(WorkerUpdated(WorkerId("x"), Role.DECODE, False))
    pair.submit()
    assert pair.phases() == {"p": Phase.PREFILL, "x": Phase.DECODE}


def test_while_predictions_are_not_trusted_a_worker_is_not_given_all_there_is():
    """Sequences that wait in the router can go elsewhere when predictions are trusted again."""
    script = Script(policy="slo")
    script.join("p", Role.PREFILL, blocks=4000)
    script.join("d", Role.DECODE, blocks=4000)
    script.core._placing.predictor.is_trusted = False
    names = [f"s{number}" for number in range(6)]
    for number, name in enumerate(names):
        script.submit(name, tuple(range(number, number + 600)))  # A step takes 512 prompt tokens.
    assert [name for name in names if name in script.starts] == ["s0", "s1"]
    for number, name in enumerate(names):
        script.output("p", 0, 10, seq=name)
        script.report("p", Role.PREFILL, free=3000)
        script.at(number + 1.0)
        assert len(script.starts) == min(6, number + 3)
    assert not script.ends
