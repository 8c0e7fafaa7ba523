"""A KV owner refuses the decode worker and reports that to the router; either message may come first."""

import pytest

from baton.core.messages import FailureReason, Phase, RefusalReason, Role
from baton.core.sampling import FinishReason
from router.decisions.events import Finished, RetryCause
from tests.unit.router.script import Script


@pytest.fixture
def script():
    found = Script(attempts_max=2)
    found.pair()
    found.submit()
    assert found.phases() == {"p": Phase.PREFILL, "d": Phase.DECODE}
    return found


def test_a_sequence_that_ended_with_its_first_token_is_not_begun_anew(script):
    script.failed("d", FailureReason.SOURCE_REFUSED)
    assert script.notes() == []
    script.output("p", 0, 7, finish=FinishReason.STOP)
    assert isinstance(script.ends["s"], Finished)
    assert script.delivered["s"] == [7]
    assert set(script.in_flight().values()) == {0}


def test_want_of_room_at_the_source_is_a_wait_and_not_a_loss(script):
    script.failed("d", FailureReason.SOURCE_REFUSED)
    script.refused("p", RefusalReason.NO_ROOM)
    assert "retried" not in script.notes()
    script.report("p", Role.PREFILL)
    assert script.epoch() == 1


def test_a_first_token_after_all_begins_anew_and_is_kept(script):
    script.failed("d", FailureReason.SOURCE_REFUSED)
    script.output("p", 0, 7)
    assert script.retry_causes() == [RetryCause.SOURCE_REFUSED]
    assert script.cancelled() == {"p": 0}
    assert script.delivered["s"] == [7]
    assert script.starts["s"]["p"].tokens[-1] == 7


def test_a_source_that_has_spoken_is_not_waited_for(script):
    script.output("p", 0, 7)
    script.failed("d", FailureReason.SOURCE_REFUSED)
    assert "retried" in script.notes()


def test_a_source_lost_meanwhile_is_a_loss(script):
    script.failed("d", FailureReason.SOURCE_REFUSED)
    script.lose("p")
    assert script.retry_causes() == [RetryCause.WORKER_LOST]


@pytest.mark.parametrize("reason", sorted(set(FailureReason) - {FailureReason.DEADLINE}))
def test_every_loss_has_a_cause_that_can_be_counted(script, reason):
    script.output("p", 0, 7)
    script.failed("d", reason)
    assert [cause.value for cause in script.retry_causes()] == [reason.value]
