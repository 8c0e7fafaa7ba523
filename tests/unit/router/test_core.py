"""The router's decisions as scripts of events: messages of workers and clients, and the actions that
follow."""

import random

import pytest

from baton.config.router import RouterConfig
from baton.core.hashing import block_hashes, root_hash
from baton.core.ids import SequenceId, WorkerId
from baton.core.messages import (
    BlockEvents,
    Phase,
    ResyncBlocks,
    Role,
)
from baton.core.sampling import FinishReason
from router.decisions.core import RouterCore
from router.decisions.events import ClientGone, Failed, FailureKind, Note, ToWorker
from tests.unit.router.script import BLOCK_TOKENS, Script


@pytest.fixture
def pair():
    script = Script()
    script.pair()
    return script


def test_both_phases_hear_at_once_and_decode_knows_its_source(pair):
    pair.submit(prompt=(1, 2, 3, 4, 5))
    starts = pair.started()
    assert pair.phases() == {"p": Phase.PREFILL, "d": Phase.DECODE}
    assert starts["p"].source is None
    assert starts["d"].source is not None
    assert (starts["d"].source.worker_id, starts["d"].source.address) == ("p", "p:1")
    assert starts["p"].tokens == starts["d"].tokens == (1, 2, 3, 4, 5)
    assert starts["p"].cache_root == root_hash("f", b"")
    assert starts["p"].time_left_s == 1000.0


def test_the_usual_life_delivers_each_token_once_and_frees_everything(pair):
    pair.submit()
    pair.now_s = 0.5
    pair.output("p", 0, 10, cached=4)
    assert pair.notes() == ["first_token"]
    assert pair.in_flight() == {"p": 1, "d": 1}
    pair.joined()
    note = next(a for a in pair.actions if isinstance(a, Note))
    assert (note.what, note.bytes, note.seconds, note.worker_ids) == ("joined", 4096, 0.03, ("p", "d"))
    assert pair.in_flight() == {"p": 0, "d": 1}
    pair.output("d", 0, 10, 11)
    pair.output("d", 2, 12, 13, finish=FinishReason.LENGTH)
    assert pair.delivered["s"] == [10, 11, 12, 13]
    assert pair.ended() == (FinishReason.LENGTH, 4, 4)
    assert pair.cancelled() == {}
    assert pair.in_flight() == {"p": 0, "d": 0}
    assert pair.core.is_idle


def test_decode_may_be_heard_before_prefill(pair):
    pair.submit()
    pair.joined()
    pair.output("d", 0, 10, 11)
    pair.output("p", 0, 10)
    assert pair.actions == []
    pair.output("d", 2, 12)
    assert pair.delivered["s"] == [10, 11, 12]


def test_tokens_ahead_of_a_missing_one_wait_for_it(pair):
    pair.submit()
    pair.output("d", 1, 11, 12)
    assert "s" not in pair.delivered
    pair.output("p", 0, 10)
    assert pair.delivered["s"] == [10, 11, 12]


def test_a_finish_ahead_of_a_missing_token_waits_for_it(pair):
    pair.submit(max_tokens=9)
    pair.output("d", 1, 11, 12, finish=FinishReason.STOP)
    assert "s" not in pair.ends
    pair.output("p", 0, 10)
    assert pair.delivered["s"] == [10, 11, 12]
    assert pair.ends["s"].reason is FinishReason.STOP


def test_tokens_that_never_stop_being_early_end_the_attempt(pair):
    pair.submit(max_tokens=5000)
    pair.output("d", 1, *range(2000))
    assert pair.cancelled() == {"p": 0, "d": 0}
    assert pair.epoch() == 1


def test_one_token_never_reaches_decode(pair):
    pair.submit(max_tokens=1)
    assert pair.phases() == {"p": Phase.AGGREGATED}
    pair.output("p", 0, 10, finish=FinishReason.LENGTH)
    assert pair.ends["s"].reason is FinishReason.LENGTH
    assert pair.core.is_idle


def test_a_stop_at_the_first_token_ends_it_and_calls_the_decode_worker_off(pair):
    pair.submit(stop=(10,))
    pair.output("p", 0, 10, finish=FinishReason.STOP)
    assert pair.ends["s"].reason is FinishReason.STOP
    assert pair.cancelled() == {"p": 0, "d": 0}
    assert pair.in_flight() == {"p": 0, "d": 0}


def test_disaggregation_off_runs_whole_on_any_worker():
    script = Script(disaggregate=False)
    script.pair()
    script.submit("a")
    script.submit("b", (7, 8, 9))
    assert {phase for start in script.starts.values() for phase in (s.phase for s in start.values())} == {
        Phase.AGGREGATED
    }
    assert not script.core.status().is_degraded


def test_workers_of_both_roles_run_sequences_whole():
    script = Script()
    script.join("a", Role.AGGREGATED)
    script.join("b", Role.AGGREGATED)
    script.submit()
    assert list(script.phases().values()) == [Phase.AGGREGATED]


def test_pairs_are_of_one_fingerprint():
    script = Script()
    script.join("p1", Role.PREFILL, fingerprint="one")
    script.join("p2", Role.PREFILL, fingerprint="two")
    script.join("d2", Role.DECODE, fingerprint="two")
    for i in range(4):
        script.submit(str(i), (i, 2, 3, 4, 5, 6))
        assert script.phases() == {"p2": Phase.PREFILL, "d2": Phase.DECODE}
        assert script.started()["p2"].cache_root == root_hash("two", b"")


def test_siblings_of_a_burst_land_together_before_any_block_is_confirmed():
    script = Script()
    for name in "abcd":
        script.join(f"p{name}", Role.PREFILL)
    script.join("d", Role.DECODE, blocks=1000)
    prompt = tuple(range(200))
    for i in range(6):
        script.submit(f"s{i}", (*prompt, i))
    assert len({next(w for w in s if w != "d") for s in script.starts.values()}) == 1


def test_a_tenants_prefix_is_invisible_to_another():
    script = Script()
    script.join("pa", Role.PREFILL)
    script.join("pb", Role.PREFILL)
    script.join("d", Role.DECODE)
    prompt = tuple(range(40))
    script.blocks("pb", 1, *block_hashes(root_hash("f", b"tenant"), prompt, BLOCK_TOKENS))
    script.submit("other", prompt, salt=b"else")
    assert "pa" in script.phases()
    script.submit("mine", (*prompt, 1), salt=b"tenant")
    assert "pb" in script.phases()


def test_a_gap_in_block_events_asks_for_a_snapshot(pair):
    pair.blocks("p", 5, b"x" * 16)
    assert pair.actions == [ToWorker(WorkerId("p"), ResyncBlocks())]
    pair.says("p", BlockEvents(6, stored=(b"y" * 16,)))
    assert pair.actions == []
    assert [w.indexed_blocks for w in pair.core.status().workers] == [0, 0]
    pair.blocks("p", 7, b"z" * 16, is_snapshot=True)
    assert [w.indexed_blocks for w in pair.core.status().workers] == [1, 0]


# --- the line -------------------------------------------------------------------------------------


def test_promised_blocks_count_before_any_report_shows_them():
    script = Script()
    script.join("p", Role.PREFILL)
    script.join("d", Role.DECODE, blocks=5)
    script.submit("a", (1, 2, 3, 4, 5, 6, 7, 8))  # The next token needs 3 blocks.
    script.submit("b", (2, 2, 3, 4, 5, 6, 7, 8))
    assert script.phases() == {}
    script.report("d", Role.DECODE, free=5)  # It may have left before "a" arrived there.
    assert script.phases() == {}
    script.output("d", 0, 1, 2, 3, 4, seq="a", finish=FinishReason.LENGTH)
    assert set(script.phases()) == {"p", "d"}


def test_a_small_one_passes_a_large_one_that_has_no_room_but_not_for_ever():
    script = Script(queue_wait_s=1000)
    script.join("p", Role.PREFILL)
    script.join("d", Role.DECODE, blocks=10)
    script.submit("first", (9, 9))
    script.submit("large", tuple(range(36)))
    passed = 0
    while passed < 200:
        name = f"small{passed}"
        script.submit(name, (passed, 2))
        if name not in script.starts:
            break
        passed += 1
        script.output("d", 0, 1, 2, 3, 4, seq=name, finish=FinishReason.LENGTH)
    assert passed == 64
    script.output("d", 0, 1, 2, 3, 4, seq="first", finish=FinishReason.LENGTH)
    assert "large" in script.starts
    assert name not in script.starts


def test_one_too_many_waiting_is_refused_at_once_with_a_hint():
    script = Script(queue_requests_max=2)
    for name in "abc":
        script.submit(name)
    assert set(script.ends) == {"c"}
    refusal = script.ends["c"]
    assert isinstance(refusal, Failed)
    assert refusal.kind is FailureKind.QUEUE_FULL
    assert refusal.retry_after_s >= 1.0


def test_without_a_queue_what_finds_a_place_is_served():
    script = Script(queue_requests_max=0)
    script.pair()
    script.submit()
    assert len(script.phases()) == 2
    script.lose("d")
    script.lose("p")
    assert "s" not in script.ends  # It was admitted before, so it may wait.
    script.submit("late")
    assert script.ends["late"].kind is FailureKind.QUEUE_FULL


def test_those_who_wait_are_placed_in_the_order_they_came():
    script = Script()
    for i in range(5):
        script.submit(str(i))
    script.pair()
    assert list(script.starts) == ["0", "1", "2", "3", "4"]


def test_words_about_unknown_sequences_and_workers_change_nothing(pair):
    pair.submit()
    pair.do(ClientGone(SequenceId("nobody")))
    pair.lose("nobody")
    pair.output("p", 0, 1, epoch=5)
    pair.output("nobody", 0, 1)
    assert "s" not in pair.delivered


def test_a_finish_the_worker_did_not_announce_still_ends_and_cancels(pair):
    pair.submit(max_tokens=2)
    pair.output("p", 0, 10)
    pair.output("d", 0, 10, 11, 12)
    assert pair.delivered["s"] == [10, 11]
    assert pair.ended() == (FinishReason.LENGTH, 2, 0)
    assert pair.cancelled() == {"d": 0}


def test_a_lost_sequence_may_wait_as_long_as_one_that_just_came():
    script = Script(queue_wait_s=5.0, fallback_to_other_pool=False)
    script.pair()
    script.submit()
    script.now_s = 60.0
    script.lose("d")
    script.at(64.9)
    assert "s" not in script.ends
    script.at(65.0)
    assert script.ends["s"].kind is FailureKind.NO_CAPACITY


def test_a_cluster_that_is_starting_says_how_many_workers_are_ready():
    script = Script(queue_wait_s=5.0)
    script.core = RouterCore(
        config=RouterConfig(queue_wait_s=5.0), rng=random.Random(7), now_s=0.0, configured_workers=2
    )
    script.submit()
    script.at(5.0)
    end = script.ends["s"]
    assert end.kind is FailureKind.NO_CAPACITY
    assert "starting, 0 of 2 workers ready" in end.message
