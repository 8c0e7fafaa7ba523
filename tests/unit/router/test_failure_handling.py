"""Hedges, budgets, breakers and leaving workers in the router's core, as scripts of events."""

import pytest

from baton.core.messages import CancelSequence, FailureReason, RefusalReason, Role, StartSequence
from baton.core.sampling import FinishReason
from router.decisions.events import Failed, FailureKind, Finished, ToWorker
from tests.unit.router.script import Script

HEDGING = {"policy": "least_loaded", "hedge_share": 0.5, "hedge_after_s": 1.0, "hedge_quantile": 0.9}


def warm(script, count=20):
    """Run sequences that get their token after 0.1 s, so that this is usual."""
    for i in range(count):
        script.submit(f"w{i}", max_tokens=1)
        [worker] = script.started()
        script.now_s += 0.1
        script.output(worker, 0, 7, seq=f"w{i}", finish=FinishReason.LENGTH)


@pytest.fixture
def four():
    script = Script(**HEDGING)
    for name in ("p1", "p2"):
        script.join(name, Role.PREFILL)
    for name in ("d1", "d2"):
        script.join(name, Role.DECODE)
    warm(script)
    return script


def hedged(script, seq="s", **fields):
    """Return a sequence whose first token is overdue: (its phases, its backup's phases, its backup's
    name)."""
    script.submit(seq, **fields)
    first = script.phases()
    script.at(script.now_s + 1.0)
    starts = script.started()
    name = next(iter(starts.values())).seq_id
    assert name.startswith(f"{seq}~")
    return list(first), list(script.phases()), name


def cancels(script):
    return {
        (a.worker_id, a.message.seq_id)
        for a in script.actions
        if isinstance(a, ToWorker) and isinstance(a.message, CancelSequence)
    }


def test_an_overdue_first_token_is_asked_for_elsewhere_and_the_first_to_bring_it_serves(four):
    first, second, name = hedged(four)
    assert four.notes() == ["hedged", "placed"]
    assert first[0] != second[0]
    four.output(second[0], 0, 10, seq=name)
    assert four.notes() == ["hedge_won", "first_token"]
    assert cancels(four) == {(w, "s") for w in first}
    assert four.delivered["s"] == [10]
    four.output(first[0], 0, 99, seq="s")  # The output of the loser is ignored.
    four.output(second[1], 1, 11, 12, 13, seq=name, finish=FinishReason.LENGTH)
    assert four.delivered["s"] == [10, 11, 12, 13]
    assert four.ended() == (FinishReason.LENGTH, 4, 0)
    status = four.core.status().failure_handling
    assert (status.hedges, status.hedges_won, status.hedges_racing) == (1, 1, 0)
    assert status.hedge_wasted_tokens == 5
    assert four.core.is_idle
    assert set(four.in_flight().values()) == {0}


def test_when_the_first_attempt_is_first_the_hedge_is_cancelled(four):
    first, second, name = hedged(four)
    four.output(first[0], 0, 10)
    assert four.notes() == ["hedge_lost", "first_token"]
    assert cancels(four) == {(w, name) for w in second}
    assert four.core.status().failure_handling.hedges_won == 0


def test_both_tokens_in_one_moment_are_one_token(four):
    first, second, name = hedged(four)
    four.output(second[0], 0, 10, seq=name)
    four.output(first[0], 0, 10)
    assert four.delivered["s"] == [10]


def test_a_hedge_that_won_is_placed_again_when_its_worker_is_lost(four):
    _, second, name = hedged(four)
    four.output(second[0], 0, 10, seq=name)
    four.lose(second[1])
    assert four.notes()[0] == "retried"
    start = next(iter(four.started().values()))
    assert (start.seq_id, start.epoch, start.tokens) == (name, 1, (1, 2, 3, 4, 5, 10))


@pytest.mark.parametrize(
    "reason", [None, RefusalReason.NO_ROOM, RefusalReason.BUSY, RefusalReason.UNSUPPORTED]
)
def test_a_hedge_that_fails_or_is_refused_is_not_heard_of(four, reason):
    first, second, name = hedged(four)
    if reason is None:
        four.failed(second[0], FailureReason.INTERNAL, seq=name)
    else:
        four.refused(second[0], reason, seq=name)
    assert "retried" not in four.notes()
    assert not four.ends.keys() & {"s"}
    assert four.core.status().failure_handling.hedges_racing == 0
    four.output(first[0], 0, 1)
    assert four.delivered["s"] == [1]


def test_when_the_first_attempt_fails_for_good_the_hedge_serves(four):
    first, second, name = hedged(four)
    four.refused(first[0], RefusalReason.UNSUPPORTED)
    assert "s" not in four.ends
    four.output(second[0], 0, 10, seq=name)
    assert four.delivered["s"] == [10]


def test_a_hedge_that_serves_has_the_losses_of_its_sequence():
    """The first loss of a worker is free, once for each sequence and not for each of its attempts."""
    script = Script(**HEDGING, retry_share=0.0, retry_floor=0)
    for name in ("a1", "a2", "a3"):
        script.join(name, Role.AGGREGATED)
    warm(script)
    script.submit("s")
    script.lose(next(iter(script.phases())))
    assert script.notes()[0] == "retried"
    (first,) = script.phases()
    script.at(script.now_s + 1.0)
    (second,) = script.started()
    script.refused(first, RefusalReason.UNSUPPORTED)
    assert "s" not in script.ends
    script.lose(second)
    assert script.ends["s"].kind is FailureKind.RETRIES_SPENT


def test_when_both_fail_the_client_hears_it_once(four):
    first, second, name = hedged(four)
    four.refused(first[0], RefusalReason.UNSUPPORTED)
    four.refused(second[0], RefusalReason.UNSUPPORTED, seq=name)
    end = four.ends["s"]
    assert isinstance(end, Failed)
    assert end.kind is FailureKind.UNSUPPORTED
    assert four.core.is_idle


def test_a_deadline_ends_both_and_is_told_once(four):
    hedged(four, deadline_s=four.now_s + 2.0)
    four.at(four.now_s + 5.0)
    assert isinstance(four.ends["s"], Failed)
    assert four.core.is_idle
    assert set(four.in_flight().values()) == {0}


def test_a_client_that_leaves_takes_both_along(four):
    first, second, name = hedged(four)
    four.leave()
    assert cancels(four) == {*((w, "s") for w in first), *((w, name) for w in second)}
    assert four.core.is_idle


def test_no_hedge_while_anybody_waits_for_a_place_or_nobody_else_is_there():
    script = Script(**HEDGING)
    script.join("a", Role.AGGREGATED)
    warm(script)
    script.submit()
    script.at(script.now_s + 5.0)
    assert script.notes() == []


def test_hedges_keep_to_their_share():
    script = Script(**{**HEDGING, "hedge_share": 0.1})
    for name in ("a", "b"):
        script.join(name, Role.AGGREGATED)
    warm(script)
    for i in range(6):
        script.submit(f"s{i}")
    script.at(script.now_s + 2.0)
    assert script.notes().count("hedged") == 2  # Two of 26 sequences are hedged.


# --- budgets ----------------------------------------------------------------------------------------


def test_beyond_the_budget_a_failed_attempt_is_a_503_with_a_time():
    script = Script(retry_share=0.0, retry_floor=1, breaker_failures=0)
    script.pair()
    for seq in ("s", "t"):
        script.submit(seq)
        script.failed("p", seq=seq)
    assert "s" not in script.ends
    end = script.ends["t"]
    assert isinstance(end, Failed)
    assert end.kind is FailureKind.RETRIES_SPENT
    assert end.retry_after_s > 5
    assert script.core.status().failure_handling.retries_refused == 1


def test_a_stream_that_began_goes_on_whatever_the_budget_and_others_pay_for_it():
    script = Script(retry_share=0.0, retry_floor=1, breaker_failures=0)
    script.pair()
    for seq in ("s", "t", "u"):
        script.submit(seq)
    for seq in ("s", "t"):
        script.output("p", 0, 10, seq=seq)
        script.failed("d", FailureReason.TRANSFER, seq=seq)
        assert script.notes()[0] == "retried"
    script.failed("p", seq="u")
    end = script.ends["u"]
    assert isinstance(end, Failed)
    assert end.kind is FailureKind.RETRIES_SPENT
    assert set(script.ends) == {"u"}


def test_the_loss_of_a_worker_is_not_charged_once():
    script = Script(retry_share=0.0, retry_floor=0, fallback_to_other_pool=False)
    script.pair()
    for i in range(20):
        script.submit(f"s{i}")
    script.lose("d")
    assert not script.ends
    script.join("d2", Role.DECODE)
    script.lose("d2")
    assert len(script.ends) == 20


# --- breakers ---------------------------------------------------------------------------------------


def test_a_worker_that_fails_again_and_again_gets_nothing_until_a_probe_works():
    script = Script(policy="least_loaded", breaker_failures=3, breaker_open_s=2.0, retry_floor=100)
    for name in ("a", "b"):
        script.join(name, Role.AGGREGATED)
    while script.core.status().workers[0].breaker == "closed":
        seq = f"x{script.now_s}"
        script.now_s += 0.01
        script.submit(seq, max_tokens=1)
        if "a" in script.started():
            script.failed("a", seq=seq)
        script.output("b", 0, 1, seq=seq, finish=FinishReason.LENGTH)
    status = script.core.status().workers[0]
    assert (status.worker_id, status.breaker, status.is_suspended) == ("a", "open", True)
    assert "internal: broken" in status.breaker_reason
    for i in range(4):
        script.submit(f"o{i}")
        assert list(script.started()) == ["b"]
    script.now_s += 2.0
    script.submit("probe")
    assert list(script.started()) == ["a"]
    script.submit("next")
    assert list(script.started()) == ["b"]
    script.output("a", 0, 5, seq="probe")
    assert script.core.status().workers[0].breaker == "closed"
    script.submit("then")
    assert list(script.started()) == ["a"]


def test_a_pool_of_one_is_never_kept_out():
    script = Script(breaker_failures=1, retry_floor=100)
    script.pair()
    script.submit()
    script.failed("p")
    assert script.started()["p"].epoch == 1


# --- leaving ----------------------------------------------------------------------------------------


def test_streams_of_a_leaving_worker_go_on_elsewhere_after_a_while():
    script = Script(migrate_after_s=5.0, policy="least_loaded")
    for name in ("p", "d1", "d2"):
        script.join(name, Role.PREFILL if name == "p" else Role.DECODE)
    script.submit()
    leaver = next(w for w, s in script.started().items() if w != "p")
    script.output("p", 0, 10)
    script.joined(leaver)
    script.output(leaver, 1, 11)
    script.report(leaver, Role.DECODE, draining=True)
    script.now_s = 4.9
    script.report(leaver, Role.DECODE, draining=True)
    assert script.started() == {}
    script.now_s = 5.0
    script.report(leaver, Role.DECODE, draining=True)
    assert script.cancelled() == {leaver: 0}
    starts = script.started()
    assert set(starts) == {"p", "d1", "d2"} - {leaver}
    assert all(start.tokens == (1, 2, 3, 4, 5, 10, 11) for start in starts.values())


def test_a_leaving_workers_streams_stay_where_there_is_no_other_place():
    script = Script(migrate_after_s=0.0, fallback_to_other_pool=False)
    script.pair()
    script.submit()
    script.output("p", 0, 10)
    script.joined()
    script.report("d", Role.DECODE, draining=True)
    assert script.cancelled() == {}
    script.output("d", 1, 11, 12, 13, finish=FinishReason.LENGTH)
    assert isinstance(script.ends["s"], Finished)


def test_starts_name_the_sequence_as_the_client_does_unless_it_is_a_hedge(four):
    four.submit()
    assert {s.seq_id for s in four.started().values() if isinstance(s, StartSequence)} == {"s"}
