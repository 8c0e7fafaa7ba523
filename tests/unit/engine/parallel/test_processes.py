"""Groups and channels whose ranks are processes, which are killed and stopped."""

import signal
from pathlib import Path

import pytest

from tests.unit.engine.parallel.rank_processes import RankProcesses

LONG_S, SHORT_S = 60.0, 0.2
STOPPED_S = 4.0
"""A deadline that ranks miss only if they are stopped."""
every_carrier = pytest.mark.parametrize("carrier", ["memory", "sockets", "torch"])
every_channel = pytest.mark.parametrize("carrier", ["memory", "sockets"])
CALLS = ("all_reduce", "all_gather", "gather", "reduce_scatter", "broadcast", "messages")
FEW, MANY = 100, 300_000
"""Numbers of a call that is one step, and of one during which the signal is likely to arrive."""


@pytest.fixture(scope="module")
def processes():
    return RankProcesses()


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert [path.name for path in Path("/dev/shm").iterdir() if "baton-ranks" in path.name] == []


def results(outcomes):
    for outcome in outcomes:
        assert "error" not in outcome, outcome["error"]
        assert outcome.get("traces", 0) == 0
    return outcomes


@every_carrier
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_has_the_same_bits_every_time(processes, size, carrier):
    outcomes = results(processes.run("bits", size, rounds=2, carrier=carrier))
    assert len({digest for outcome in outcomes for digest in outcome["result"]}) == 1


@every_carrier
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize("call", CALLS)
def test_a_killed_rank_ends_the_calls_of_the_others(processes, call, count, victim, carrier):
    outcomes = results(
        processes.run(
            "loop",
            3,
            victim=victim,
            signal_name="SIGKILL",
            call=call,
            count=count,
            deadline_s=LONG_S,
            carrier=carrier,
        )
    )
    assert outcomes.pop(victim) == {"died": signal.SIGKILL}
    # The deadline is longer than the test may take: they noticed the death itself.
    for outcome in outcomes:
        assert f"rank {victim}" in outcome["broken"]
        assert "has died" in outcome["broken"]
        assert outcome["again"]


@every_carrier
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("call", CALLS)
def test_a_stopped_rank_ends_the_calls_of_the_others_and_its_own_when_it_goes_on(
    processes, call, victim, carrier
):
    outcomes = results(
        processes.run(
            "loop",
            3,
            victim=victim,
            signal_name="SIGSTOP",
            call=call,
            count=FEW,
            deadline_s=STOPPED_S,
            carrier=carrier,
        )
    )
    assert all(outcome["broken"] and outcome["again"] for outcome in outcomes)
    assert any("stopped" in outcome["broken"] for outcome in outcomes)


@every_carrier
def test_a_rank_that_dies_before_it_joins_is_not_waited_for_beyond_the_deadline(processes, carrier):
    outcomes = results(processes.run("never_joins", 3, deadline_s=SHORT_S, carrier=carrier))
    assert outcomes[1] == {"died": signal.SIGKILL}
    assert all("rank 1 did not join" in outcomes[rank]["broken"] for rank in (0, 2))


@every_carrier
@pytest.mark.parametrize("seed", range(6))
def test_whatever_goes_wrong_no_rank_hangs_or_sums_wrongly(processes, seed, carrier):
    outcomes = results(processes.run("faulty", 3, seed=seed, kill_at=-1, deadline_s=SHORT_S, carrier=carrier))
    assert all(outcome["broken"] for outcome in outcomes)


@every_carrier
@pytest.mark.parametrize("kill_at", [0, 1, 4])
def test_a_rank_that_kills_itself_between_calls_ends_the_others(processes, kill_at, carrier):
    outcomes = results(
        processes.run("faulty", 3, seed=100, kill_at=kill_at, deadline_s=LONG_S, carrier=carrier)
    )
    assert outcomes[2] == {"died": signal.SIGKILL}
    assert all(outcome["broken"] for outcome in outcomes[:2])


@every_channel
@pytest.mark.parametrize(("size", "rounds", "items"), [(2, 300, 1), (3, 200, 32), (4, 5, 400)])
def test_every_follower_gets_every_plan_and_the_leader_every_report(processes, size, rounds, items, carrier):
    """The plans of the last case are larger than the ring."""
    outcomes = results(processes.run("plans", size, rounds=rounds, items=items, carrier=carrier))
    assert [outcome["result"] for outcome in outcomes[1:]] == [0] * (size - 1)
    expected = [
        [rank, text] for rank in range(1, size) for text in (f"rank {rank} has had 0 wrong plans", "ready")
    ]
    assert outcomes[0]["result"] == expected


@every_channel
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_ends_the_channel(processes, victim, carrier):
    outcomes = results(
        processes.run(
            "plan_loop", 3, victim=victim, signal_name="SIGKILL", deadline_s=LONG_S, carrier=carrier
        )
    )
    assert outcomes.pop(victim) == {"died": signal.SIGKILL}
    assert all(f"rank {victim}" in outcome["broken"] for outcome in outcomes)


@every_channel
@pytest.mark.parametrize("victim", [1, 2])
def test_a_stopped_follower_ends_the_channel_when_its_ring_is_full(processes, victim, carrier):
    outcomes = results(
        processes.run(
            "plan_loop", 3, victim=victim, signal_name="SIGSTOP", deadline_s=STOPPED_S, carrier=carrier
        )
    )
    assert all(outcome["broken"] for outcome in outcomes)
    assert f"rank {victim}" in outcomes[0]["broken"]
