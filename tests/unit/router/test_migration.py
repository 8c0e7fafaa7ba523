"""Streams of draining workers: the cluster chooses to move them, so no request and no budget pays."""

import msgspec
import pytest

from baton.core.ids import RequestId, SequenceId, WorkerId
from baton.core.messages import (
    FailureReason,
    Member,
    MembershipView,
    RefusalReason,
    Role,
    SequenceOutput,
    StepOutput,
)
from baton.core.sampling import FinishReason, Grammar, GrammarKind, SamplingParams
from baton.core.steps import TokenLogprobs
from router.decisions.events import Deliver, Failed, FailureKind, Finished, RetryCause, Submit, WorkerUpdated
from router.decisions.membership import FollowedMembership
from tests.unit.router.script import Script

STINGY = {"retry_share": 0.0, "retry_floor": 0, "attempts_max": 2, "breaker_failures": 1}
"""Whatever is counted or charged ends a sequence or suspends a worker under these settings."""


def script_with(*workers: str, role: Role = Role.AGGREGATED, **config) -> Script:
    script = Script(**{"migrate_after_s": 0.0, "policy": "least_loaded"} | STINGY | config)
    for worker in workers:
        script.join(worker, role)
    return script


def stream(script: Script, seq: str = "s", *, max_tokens: int = 100, **fields) -> str:
    """Start a stream that has its first token; return its worker."""
    script.submit(seq, max_tokens=max_tokens, **fields)
    [worker] = script.started()
    script.output(worker, 0, 1, seq=seq)
    return worker


def drain(script: Script, worker: str, role: Role = Role.AGGREGATED) -> None:
    script.now_s += 0.1
    script.report(worker, role, draining=True)


def resumed_at(script: Script) -> str:
    [worker] = script.started()
    return worker


@pytest.mark.parametrize("policy", ["least_loaded", "cached_prefix", "slo", "random", "round_robin"])
def test_twenty_drains_in_one_streams_life_do_not_end_it(policy):
    script = script_with("w0", "w1", policy=policy)
    at, count = stream(script), 1
    for number in range(20):
        script.join(f"w{number + 2}", Role.AGGREGATED)
        drain(script, at)
        assert script.notes()[0] == "migrated"
        assert script.cancelled() == {at: number}
        script.lose(at)  # the drained worker ends
        at = max(script.starts["s"], key=lambda w: script.starts["s"][w].epoch)
        start = script.starts["s"][at]
        assert start.tokens[5:] == tuple(range(1, count + 1))
        script.output(at, count, count + 1)
        count += 1
    script.output(at, count, count + 1, finish=FinishReason.STOP)
    assert script.delivered["s"] == list(range(1, count + 2))
    assert isinstance(script.ends["s"], Finished)
    status = script.core.status().failure_handling
    assert (status.retries_refused, status.retries_left, status.breakers_opened) == (0, 0, 0)
    assert script.core.is_idle


def test_a_sequence_without_a_first_token_is_left_to_its_worker():
    script = script_with("a", "b")
    script.submit()
    [at] = script.started()
    for _ in range(10):
        drain(script, at)
        assert script.actions == []
    script.output(at, 0, 1, 2, 3, 4, finish=FinishReason.LENGTH)
    assert script.delivered["s"] == [1, 2, 3, 4]


def test_a_hand_over_is_not_torn_apart_by_a_drain():
    script = script_with()
    for worker, role in {"p": Role.PREFILL, "p2": Role.PREFILL, "d": Role.DECODE, "d2": Role.DECODE}.items():
        script.join(worker, role)
    script.submit()
    prefill, decode = script.started()
    script.output(prefill, 0, 1)
    drain(script, prefill, Role.PREFILL)
    drain(script, decode, Role.DECODE)
    assert script.cancelled() == {}
    script.joined(decode)
    drain(script, prefill, Role.PREFILL)
    assert script.cancelled() == {}
    drain(script, decode, Role.DECODE)
    assert script.cancelled() == {decode: 0}
    assert decode not in script.started()


def test_a_stream_moves_only_where_it_goes_on_in_the_same_moment():
    script = script_with("a")
    at = stream(script)
    script.join("b", Role.AGGREGATED, blocks=30)
    script.report("b", Role.AGGREGATED, free=1)
    drain(script, at)
    script.submit("long", tuple(range(60)))
    assert script.core.queued_count == 1
    drain(script, at)
    assert script.cancelled() == {}  # there is no room elsewhere
    script.report("b", Role.AGGREGATED, free=20)  # now the sequence that waited has it
    assert script.starts["long"].keys() == {"b"}
    drain(script, at)
    assert script.cancelled() == {at: 0}
    assert script.started().keys() == {"b"}


def test_a_stream_that_no_other_worker_holds_stays():
    script = script_with("a")
    at = stream(script, prompt=tuple(range(100)))
    script.join("small", Role.AGGREGATED, context=90)
    drain(script, at)
    assert script.cancelled() == {}
    script.output(at, 1, 2, finish=FinishReason.STOP)
    assert script.delivered["s"] == [1, 2]


def test_one_stream_that_cannot_move_does_not_keep_others():
    script = script_with()
    script.join("a", Role.AGGREGATED, blocks=1000)
    names = [f"s{i}" for i in range(12)]
    for i, name in enumerate(names):
        stream(script, name, prompt=tuple(range(100 if i < 10 else 5)))
    script.join("small", Role.AGGREGATED, context=90)
    drain(script, "a")
    assert set(script.cancelled()) == {"a"}
    assert {name for name in names if "small" in script.starts[name]} == {"s10", "s11"}


def test_a_stream_does_not_move_to_other_weights():
    script = script_with("a")
    at = stream(script)
    script.join("new", Role.AGGREGATED, fingerprint="other")
    drain(script, at)
    assert script.cancelled() == {}


def test_the_last_token_is_not_computed_elsewhere():
    script = script_with("a", "b")
    at = stream(script, max_tokens=2)
    drain(script, at)
    assert script.cancelled() == {}


@pytest.mark.parametrize(("left", "moves"), [(3, False), (3000, True)])
def test_a_stream_that_ends_sooner_where_it_is_stays(left, moves):
    script = script_with(policy="slo", predictor_error_max=1e9)
    for name in ("a", "b"):
        script.join(name, Role.AGGREGATED, blocks=4000)
    at = stream(script, prompt=tuple(range(2000)), max_tokens=1 + left)
    script.output(at, 1)
    drain(script, at)
    assert bool(script.cancelled()) is moves


def test_a_suspect_that_still_reports_keeps_its_streams():
    script = script_with("a", "b")
    at = stream(script)
    script.do(WorkerUpdated(WorkerId(at), Role.AGGREGATED, False, is_suspect=True))
    script.report(at, Role.AGGREGATED)
    assert script.cancelled() == {}
    script.submit("t")
    assert at not in script.started()


def test_a_suspect_that_is_lost_counts_as_a_failure():
    script = script_with("a", "b")
    at = stream(script)
    script.do(WorkerUpdated(WorkerId(at), Role.AGGREGATED, False, is_suspect=True))
    script.lose(at)
    assert script.retry_causes() == [RetryCause.WORKER_LOST]


def test_the_directory_tells_suspicion_and_drain_apart():
    membership = FollowedMembership()
    member = Member(WorkerId("a.1"), Role.DECODE, "a:1", "m", "f")
    membership.on_view(MembershipView("x", 1, (member,)))
    suspect = msgspec.structs.replace(member, is_suspect=True)
    [update] = membership.on_view(MembershipView("x", 2, (suspect,)))
    assert (update.is_draining, update.is_suspect) == (False, True)
    draining = msgspec.structs.replace(member, is_draining=True)
    [update] = membership.on_view(MembershipView("x", 3, (draining,)))
    assert (update.is_draining, update.is_suspect) == (True, False)


# --- a draining worker ends before its sequences do ---------------------------------------------------


@pytest.mark.parametrize("has_token", [True, False])
def test_the_end_of_a_draining_worker_costs_its_sequences_nothing(has_token):
    script = script_with("w0", migrate_after_s=20.0)
    script.submit(max_tokens=100)
    for number in range(20):
        at = f"w{number}"
        if has_token:
            script.output(at, number, number)
        script.join(f"w{number + 1}", Role.AGGREGATED)
        drain(script, at)
        assert script.cancelled() == {}
        script.lose(at)
        assert script.retry_causes() == [RetryCause.DRAINED]
        assert resumed_at(script) == f"w{number + 1}"
    status = script.core.status().failure_handling
    assert (status.retries_refused, status.retries_left, status.breakers_opened) == (0, 0, 0)


@pytest.mark.parametrize(
    "reason", [FailureReason.SOURCE_LOST, FailureReason.SOURCE_REFUSED, FailureReason.TRANSFER]
)
def test_the_end_of_a_draining_kv_source_costs_nothing(reason):
    script = script_with()
    for worker, role in {"p": Role.PREFILL, "p2": Role.PREFILL, "d": Role.DECODE, "d2": Role.DECODE}.items():
        script.join(worker, role)
    script.submit()
    prefill, decode = script.started()
    script.output(prefill, 0, 1)
    drain(script, prefill, Role.PREFILL)
    script.failed(decode, reason)
    assert script.retry_causes() == [RetryCause.DRAINED]
    assert prefill not in script.started()
    assert script.core.status().failure_handling.breakers_opened == 0


def test_a_worker_that_says_drained_is_not_a_loss():
    script = script_with("a", "b", "c")
    at = stream(script)
    for _ in range(2):
        script.failed(at, FailureReason.DRAINED)
        assert script.retry_causes() == [RetryCause.DRAINED]
        at = resumed_at(script)
    assert not script.ends


def test_a_displaced_stream_waits_for_a_place_and_is_not_refused():
    script = script_with("a", queue_wait_s=1.0)
    stream(script, deadline_s=50.0)
    drain(script, "a")
    script.lose("a")
    script.at(40.0)
    assert not script.ends
    script.join("b", Role.AGGREGATED)
    assert resumed_at(script) == "b"
    script.output("b", 1, 2, finish=FinishReason.STOP)
    assert script.delivered["s"] == [1, 2]


def test_a_displaced_stream_still_has_its_deadline():
    script = script_with("a", queue_wait_s=1.0)
    stream(script, deadline_s=50.0)
    drain(script, "a")
    script.lose("a")
    script.at(50.0)
    end = script.ends["s"]
    assert isinstance(end, Failed)
    assert end.kind is FailureKind.DEADLINE


def test_a_displaced_sequence_without_a_token_hears_in_time_when_to_come_back():
    script = script_with("a", queue_wait_s=1.0)
    script.submit()
    drain(script, "a")
    script.lose("a")
    script.at(2.0)
    end = script.ends["s"]
    assert isinstance(end, Failed)
    assert end.kind is FailureKind.NO_CAPACITY


@pytest.mark.parametrize("reason", [RefusalReason.UNSUPPORTED, RefusalReason.NO_ROOM, RefusalReason.DRAINING])
def test_a_stream_goes_on_elsewhere_when_its_new_worker_refuses_it(reason):
    script = script_with("a", "b", "c")
    at = stream(script)
    drain(script, at)
    second = resumed_at(script)
    script.refused(second, reason)
    third = resumed_at(script)
    assert {at, second, third} == {"a", "b", "c"}
    script.output(third, 1, 2, finish=FinishReason.STOP)
    assert script.delivered["s"] == [1, 2]


def test_while_a_cluster_is_drained_unrelated_failures_find_the_whole_budget():
    script = script_with("w0", "w1", retry_floor=3, attempts_max=8, breaker_failures=0)
    at = {f"s{i}": stream(script, f"s{i}") for i in range(6)}
    for number in range(6):
        new = f"w{number + 2}"
        old = f"w{number}"
        script.join(new, Role.AGGREGATED)
        drain(script, old)
        script.lose(old)
    assert script.core.status().failure_handling.retries_left == 3
    for number in range(3):
        script.submit(f"t{number}")
        [worker] = script.started()
        script.failed(worker, seq=f"t{number}")
        assert script.retry_causes() == [RetryCause.INTERNAL]
    assert at.keys() & script.ends.keys() == set()


# --- what the client asked for survives ---------------------------------------------------------------


def test_logprobs_and_sampler_state_survive_migrations():
    script = script_with("w0", "w1")
    entry = TokenLogprobs(7, -0.5, 1)
    sampling = SamplingParams(
        max_tokens=50,
        temperature=0.8,
        seed=7,
        logprobs=0,
        prompt_logprobs=0,
        grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
    )
    script.do(
        Submit(
            SequenceId("s"),
            RequestId("s"),
            (1, 2, 3),
            sampling,
            salt=b"",
            deadline_s=1000.0,
            group="r",
            tenant="t",
        )
    )
    came: list[Deliver] = []
    for number in range(10):
        at = max(script.starts["s"], key=lambda w: script.starts["s"][w].epoch)
        start = script.starts["s"][at]
        assert start.generated_count == number
        assert start.sampling.grammar == sampling.grammar
        assert start.sampling.seed == 7
        assert (start.sampling.prompt_logprobs is None) == (number > 0)
        of_prompt = (entry, entry) if number == 0 else None
        out = SequenceOutput(
            SequenceId("s"),
            start.epoch,
            number,
            (number,),
            None,
            0,
            logprobs=(entry,),
            prompt_logprobs=of_prompt,
        )
        script.says(at, StepOutput((out,)))
        came += [a for a in script.actions if isinstance(a, Deliver)]
        script.join(f"w{number + 2}", Role.AGGREGATED)
        drain(script, at)
        script.lose(at)
    assert [d.logprobs for d in came] == [(entry,)] * 10
    assert [d.prompt_logprobs for d in came] == [(entry, entry)] + [None] * 9


def test_all_choices_of_a_request_survive_migrations():
    script = script_with("a", "b")
    for i in range(4):
        sampling = SamplingParams(max_tokens=50, seed=i, temperature=1.0)
        name = SequenceId(f"r/{i}")
        script.do(Submit(name, RequestId("r"), (1, 2, 3), sampling, salt=b"", deadline_s=1e3, group="r"))
        [at] = script.started()
        script.output(at, 0, i, seq=f"r/{i}")
    for worker in ("a", "b"):
        drain(script, worker)
        script.lose(worker)
        script.join(worker, Role.AGGREGATED)
    for i in range(4):
        starts = script.starts[f"r/{i}"]
        at = max(starts, key=lambda w: starts[w].epoch)
        script.output(at, 1, 9, seq=f"r/{i}", finish=FinishReason.STOP)
        assert script.delivered[f"r/{i}"] == [i, 9]
    assert script.core.is_idle


# --- parked workers ---------------------------------------------------------------------------------


def park(script: Script, worker: str, *, after_s: float = 0.1, is_parked: bool = True) -> None:
    script.now_s += after_s
    script.report(worker, Role.AGGREGATED, is_parked=is_parked)


def test_streams_leave_a_parked_worker_for_one_that_has_its_experts():
    script = script_with("a", "b", migrate_after_s=20.0)
    at = stream(script)
    park(script, at)
    assert script.actions == []  # lost ranks are mostly back sooner
    park(script, at, after_s=5.0)
    assert script.notes()[0] == "migrated"
    assert resumed_at(script) == ({"a", "b"} - {at}).pop()


def test_a_parked_worker_gets_nothing_new_until_it_goes_on():
    script = script_with("a", "b")
    park(script, "a")
    assert script.core.status().workers[0].is_parked
    for number in range(4):
        assert stream(script, f"s{number}") == "b"
    park(script, "b")
    assert not script.core.status().is_ready
    script.submit("late")
    assert not script.started()
    park(script, "a", is_parked=False)
    assert set(script.started()) == {"a"}


def test_streams_of_a_pool_that_is_parked_whole_stay():
    script = script_with("a", "b", migrate_after_s=20.0)
    at = stream(script)
    for worker in ("a", "b"):
        park(script, worker)
    for _ in range(3):
        park(script, at, after_s=10.0)
        assert script.cancelled() == {}
    script.output(at, 1, 2)
    assert script.delivered["s"] == [1, 2]
