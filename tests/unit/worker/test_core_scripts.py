"""One worker core, told what happens event by event."""

import pytest

from baton.config import EngineConfig
from baton.core.hashing import block_hashes
from baton.core.ids import RouterId, WorkerId
from baton.core.messages import (
    BlockEvents,
    CancelSequence,
    FailureReason,
    KVGrant,
    KVRefused,
    KVReleased,
    KVRequest,
    LoadReport,
    Phase,
    RefusalReason,
    ResyncBlocks,
    Role,
    SequenceFailed,
    SequenceRefused,
    StepOutput,
    WorkerHello,
)
from baton.core.sampling import FinishReason, SamplingParams
from kv_transfer.read import BlockRead, ReadDone
from tests.unit.worker.worker_pair import (
    ROOT,
    ROUTER,
    Machine,
    expected_tokens,
    failures,
    known_hashes,
    next_token,
    start,
)
from worker.events import (
    Drain,
    FromOwner,
    FromReader,
    FromRouter,
    OwnerLost,
    ReaderLost,
    RouterJoined,
    RouterLost,
    RunStep,
    SetRole,
    ToOwner,
    ToReader,
    ToRouter,
    WorkerTick,
)

D = WorkerId("d")
PROMPT = tuple(range(10))


@pytest.fixture
def worker():
    machine = Machine("w")
    machine.handle(RouterJoined(ROUTER), 0.0)
    return machine


def tell(machine, message, now_s=0.0, router=ROUTER):
    return machine.handle(FromRouter(router, message), now_s)


def ask(machine, seq_id="s", epoch=0, first_block=0, number=0, now_s=0.0):
    return machine.handle(FromReader(D, KVRequest(seq_id, epoch, first_block, number)), now_s)


def run(machine, now_s=0.0):
    while machine.plan is not None:
        machine.finish_step(now_s)


def of(actions, kind):
    """Messages of that kind, whoever they go to."""
    messages = [a.message for a in actions if isinstance(a, ToRouter | ToReader | ToOwner)]
    return [m for m in messages if isinstance(m, kind)]


def tick_until(machine, end_s):
    actions = []
    while (next_s := machine.core.next_tick_s) is not None and next_s <= end_s:
        actions += machine.handle(WorkerTick(), next_s)
    return actions


# --- sessions with routers --------------------------------------------------------------------------


def test_hello_comes_first_then_a_snapshot_then_a_report(worker):
    actions = worker.handle(RouterJoined(RouterId("r2")), 0.0)
    assert [type(a.message) for a in actions] == [WorkerHello, BlockEvents, LoadReport]
    assert (actions[1].message.sequence_number, actions[1].message.is_snapshot) == (0, True)


def test_block_events_are_numbered_per_session_and_a_snapshot_takes_the_next_number(worker):
    tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED))
    run(worker)
    before = known_hashes(worker)
    assert before == set(worker.core._cache.snapshot())
    [snapshot] = of(tell(worker, ResyncBlocks()), BlockEvents)
    assert snapshot.is_snapshot
    assert set(snapshot.stored) == before
    assert snapshot.sequence_number == worker.told_of(BlockEvents)[-2].sequence_number + 1
    [late] = of(worker.handle(RouterJoined(RouterId("r2")), 0.0), BlockEvents)
    assert (late.sequence_number, set(late.stored)) == (0, before)


def test_a_snapshot_in_the_middle_of_a_step_misses_no_change():
    """Blocks reused for a running step vanish from the cache; a router joining now must not keep them."""
    worker = Machine("w", block_count=4, max_model_tokens=16)
    worker.handle(RouterJoined(ROUTER), 0.0)
    tell(worker, start("a", range(8), phase=Phase.AGGREGATED, max_tokens=1))
    run(worker)
    tell(worker, start("b", range(50, 64), phase=Phase.AGGREGATED, max_tokens=1))
    assert worker.plan is not None
    tell(worker, ResyncBlocks())
    run(worker)
    assert known_hashes(worker) == set(worker.core._cache.snapshot())


def test_reports_come_every_heartbeat_and_only_to_routers_that_are_there():
    worker = Machine("w")
    assert worker.core.next_tick_s is None
    worker.handle(RouterJoined(ROUTER), 5.0)
    assert worker.core.next_tick_s == 1005.0
    assert of(worker.handle(WorkerTick(), 1005.0), LoadReport)
    worker.handle(RouterLost(ROUTER), 1006.0)
    assert not of(tick_until(worker, 1e6), LoadReport)
    assert worker.core.next_tick_s is None


def test_a_lost_routers_sequences_are_kept_for_the_grace_and_then_freed(worker):
    tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED, max_tokens=40))
    worker.handle(RouterLost(ROUTER), 1.0)
    worker.finish_step(2.9)
    assert worker.plan is not None
    worker.handle(WorkerTick(), 3.0)
    run(worker, 3.0)
    assert worker.core.is_idle


def test_a_router_that_joins_anew_does_not_adopt_its_old_sequences(worker):
    tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED, max_tokens=40))
    worker.handle(RouterLost(ROUTER), 1.0)
    worker.handle(RouterJoined(ROUTER), 1.1)
    worker.told.clear()
    run(worker, 1.2)
    assert worker.core.is_idle
    assert worker.told_of(StepOutput) == []


def test_hello_comes_first_even_if_the_old_session_is_not_known_broken(worker):
    actions = worker.handle(RouterJoined(ROUTER), 3600.0)  # a heartbeat is due as well
    assert isinstance(actions[0].message, WorkerHello)
    assert len(of(actions, LoadReport)) == 1


def test_one_router_hears_nothing_of_anothers_sequences(worker):
    other = RouterId("r2")
    worker.handle(RouterJoined(other), 0.0)
    tell(worker, start("a", PROMPT, phase=Phase.AGGREGATED, max_tokens=1))
    tell(worker, start("b", PROMPT, phase=Phase.AGGREGATED, max_tokens=1), router=other)
    heard = {}
    while worker.plan is not None:
        for action in worker.finish_step(0.0):
            if isinstance(action, ToRouter) and isinstance(action.message, StepOutput):
                heard.setdefault(action.router_id, []).extend(o.seq_id for o in action.message.outputs)
    assert heard == {ROUTER: ["a"], other: ["b"]}


def test_a_step_is_one_message_with_the_tokens_of_all_its_sequences(worker):
    for name in ("a", "b", "c"):
        tell(worker, start(name, (ord(name),), phase=Phase.AGGREGATED))
    worker.finish_step(0.0)
    worker.finish_step(0.0)  # planned ahead, when the others had not come
    [output] = of(worker.finish_step(0.0), StepOutput)
    assert len(output.outputs) == 3


# --- starting, refusing, ending ---------------------------------------------------------------------


def test_a_whole_sequence_generates_its_tokens_and_leaves_nothing(worker):
    tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED))
    run(worker)
    outputs = worker.outputs("s")
    assert [t for o in outputs for t in o.tokens] == expected_tokens(PROMPT, SamplingParams(max_tokens=6), 64)
    assert [o.finish for o in outputs] == [None] * 5 + [FinishReason.LENGTH]
    assert outputs[0].cached_token_count == 0
    assert worker.core.is_idle


def test_a_stop_token_ends_the_sequence(worker):
    stop = expected_tokens(PROMPT, SamplingParams(max_tokens=6), 64)[2]
    tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED, stop_token_ids=(stop,)))
    run(worker)
    assert [o.finish for o in worker.outputs("s")] == [None, None, FinishReason.STOP]


def test_the_end_of_the_context_ends_the_sequence():
    worker = Machine("w", max_model_tokens=12)
    worker.handle(RouterJoined(ROUTER), 0.0)
    tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED, max_tokens=50))
    run(worker)
    assert [o.finish for o in worker.outputs("s")] == [None, FinishReason.LENGTH]


def test_a_sequence_that_fills_the_pool_ends_there():
    worker = Machine("w", block_count=3)
    [hello, *_] = of(worker.handle(RouterJoined(ROUTER), 0.0), WorkerHello)
    assert hello.max_model_tokens == 12
    tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED, max_tokens=50))
    run(worker)
    assert worker.outputs("s")[-1].finish is FinishReason.LENGTH
    assert worker.core.is_idle


@pytest.mark.parametrize("phase", list(Phase))
def test_what_can_never_fit_is_refused(phase):
    worker = Machine("w", block_count=3)
    worker.handle(RouterJoined(ROUTER), 0.0)
    tell(worker, start("s", range(12), phase=phase, source="p"))
    [refused] = failures(worker)
    assert refused.reason is RefusalReason.TOO_LONG
    assert worker.core.is_idle


def test_a_draining_worker_refuses_and_says_so_and_finishes_what_it_has(worker):
    tell(worker, start("old", PROMPT, phase=Phase.AGGREGATED))
    [report] = of(worker.handle(Drain(), 0.0), LoadReport)
    assert report.is_draining
    [refused] = of(tell(worker, start("new", PROMPT, phase=Phase.AGGREGATED)), SequenceRefused)
    assert refused.reason is RefusalReason.DRAINING
    run(worker)
    assert worker.outputs("old")[-1].finish is not None


def test_a_change_of_role_is_reported(worker):
    [report] = of(worker.handle(SetRole(Role.DECODE), 0.0), LoadReport)
    assert report.role is Role.DECODE


def test_a_new_role_ends_a_drain_only_if_it_says_so(worker):
    worker.handle(Drain(), 0.0)
    [report] = of(worker.handle(SetRole(Role.DECODE), 0.0), LoadReport)
    assert report.is_draining
    [report] = of(worker.handle(SetRole(Role.PREFILL, resumes=True), 0.0), LoadReport)
    assert (report.is_draining, report.role) == (False, Role.PREFILL)
    assert not of(tell(worker, start("new", PROMPT, phase=Phase.AGGREGATED)), SequenceRefused)


def test_more_than_may_wait_are_refused():
    worker = Machine("w", engine=EngineConfig(waiting_sequences_max=2))
    worker.handle(RouterJoined(ROUTER), 0.0)
    for i in range(4):  # the first one runs
        tell(worker, start(f"s{i}", PROMPT, phase=Phase.AGGREGATED))
    assert [(f.seq_id, f.reason) for f in failures(worker)] == [("s3", RefusalReason.NO_ROOM)]


def test_a_second_start_of_the_same_attempt_changes_nothing(worker):
    message = start("s", PROMPT, phase=Phase.AGGREGATED, max_tokens=2)
    tell(worker, message)
    assert tell(worker, message) == []
    run(worker)
    assert tell(worker, message) == []
    assert len(worker.outputs("s")) == 2


def test_a_lower_epoch_is_refused_and_a_higher_one_replaces(worker):
    tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED, epoch=1, max_tokens=40))
    [refused] = of(tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED, epoch=0)), SequenceRefused)
    assert refused.reason is RefusalReason.STALE_EPOCH
    tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED, epoch=2, max_tokens=2))
    run(worker)
    assert {o.epoch for o in worker.outputs("s")} == {2}
    assert worker.core.is_idle


def test_an_ended_attempt_stays_dead(worker):
    tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED, epoch=4, max_tokens=1))
    run(worker)
    [refused] = of(tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED, epoch=3)), SequenceRefused)
    assert refused.reason is RefusalReason.STALE_EPOCH
    assert of(ask(worker, epoch=3), KVRefused)
    assert of(ask(worker, epoch=4), KVRefused)


@pytest.mark.parametrize("phase", [Phase.AGGREGATED, Phase.PREFILL])
def test_cancel_is_answered_by_nothing_and_frees_everything(worker, phase):
    tell(worker, start("s", PROMPT, phase=phase, max_tokens=40))
    told = len(worker.told)
    tell(worker, CancelSequence("s", 0))
    run(worker)
    tell(worker, CancelSequence("s", 0))
    assert [m for m in worker.told[told:] if not isinstance(m, BlockEvents)] == []
    assert worker.core.is_idle


def test_a_start_that_comes_after_its_cancel_starts_nothing(worker):
    tell(worker, CancelSequence("s", 1))
    tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED, epoch=1))
    assert worker.core.is_idle
    tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED, epoch=2))
    assert worker.core.live_keys == {("s", 2)}


def test_the_deadline_fails_the_sequence_once(worker):
    tell(worker, start("s", PROMPT, phase=Phase.AGGREGATED, max_tokens=40, time_left_s=3.0))
    assert worker.core.next_tick_s == 3.0
    [failed] = of(worker.handle(WorkerTick(), 3.0), SequenceFailed)
    assert failed.reason is FailureReason.DEADLINE
    run(worker, 3.0)
    assert len(failures(worker)) == 1
    assert worker.core.is_idle


def test_a_decode_phase_without_a_source_fails_instead_of_crashing(worker):
    tell(worker, start("s", PROMPT, phase=Phase.DECODE))
    assert failures(worker)[0].reason is FailureReason.INTERNAL


# --- prefill phases -----------------------------------------------------------------------------------


def test_the_first_token_goes_out_at_once_and_the_blocks_wait_for_the_reader(worker):
    tell(worker, start("s", PROMPT, phase=Phase.PREFILL))
    run(worker)
    [output] = worker.outputs("s")
    assert output.tokens == (next_token(PROMPT),)
    assert worker.core.status().held_blocks == 3
    [grant] = of(ask(worker, now_s=1.0), KVGrant)
    assert (len(grant.source_blocks), grant.is_last, grant.first_token) == (3, True, output.tokens[0])
    worker.handle(FromReader(D, KVReleased("s", 0, True)), 2.0)
    assert worker.core.is_idle


def test_block_is_not_reused_while_a_reader_may_read(worker):
    tell(worker, start("s", PROMPT, phase=Phase.PREFILL))
    run(worker)
    [grant] = of(ask(worker), KVGrant)
    tell(worker, CancelSequence("s", 0), now_s=1.0)
    worker.handle(ReaderLost(D), 1.0)
    for i in range(12):
        tell(worker, start(f"other{i}", range(100 * i, 100 * i + 30), phase=Phase.AGGREGATED), now_s=2.0)
    run(worker, 2.0)
    assert [worker.generations[b] for b in grant.source_blocks] == list(grant.generations)
    tick_until(worker, 5.0)
    assert worker.core.is_idle


def test_a_sequence_that_ends_with_its_first_token_has_no_hand_over(worker):
    ask(worker)
    tell(worker, start("s", PROMPT, phase=Phase.PREFILL, max_tokens=1))
    actions = worker.finish_step(0.0)
    assert of(actions, KVRefused)
    assert worker.outputs("s")[0].finish is FinishReason.LENGTH
    assert worker.core.is_idle


def test_an_ask_of_a_higher_epoch_ends_the_lower_attempt(worker):
    tell(worker, start("s", PROMPT, phase=Phase.PREFILL))
    ask(worker, epoch=0)
    run(worker)
    actions = ask(worker, epoch=1)
    assert [m.epoch for m in of(actions, KVRefused)] == [0]
    worker.handle(FromReader(D, KVReleased("s", 0, False)), 0.0)
    assert worker.core.status().held_blocks == 0
    grants = of(tell(worker, start("s", PROMPT, phase=Phase.PREFILL, epoch=1)), KVGrant)
    assert {grant.epoch for grant in grants} == {1}


def test_blocks_found_in_the_cache_are_granted_before_anything_is_computed(worker):
    tell(worker, start("a", PROMPT, phase=Phase.AGGREGATED, max_tokens=1))
    run(worker)
    ask(worker, "b")
    actions = tell(worker, start("b", PROMPT, phase=Phase.PREFILL))
    assert sum(len(g.source_blocks) for g in of(actions, KVGrant)) == 2
    assert any(isinstance(a, RunStep) for a in actions)


def test_a_refused_start_refuses_the_ask_that_came_before_it(worker):
    worker.handle(Drain(), 0.0)
    ask(worker)
    assert of(tell(worker, start("s", PROMPT, phase=Phase.PREFILL)), KVRefused)
    assert of(ask(worker, number=1), KVRefused)


# --- decode phases ------------------------------------------------------------------------------------


def granted(worker, *, max_tokens=6, now_s=0.0):
    """A decode phase whose KV is on its way; returns the one read."""
    tell(worker, start("s", PROMPT, phase=Phase.DECODE, source="p", max_tokens=max_tokens), now_s=now_s)
    grant = KVGrant("s", 0, 0, (0, 1, 2), (1, 1, 1), 5.0, is_last=True, first_token=next_token(PROMPT))
    actions = worker.handle(FromOwner(WorkerId("p"), grant), now_s)
    return next(a for a in actions if isinstance(a, BlockRead))


def fill(worker, read):
    """What the read would have copied."""
    for i, token in enumerate(PROMPT):
        worker.memory[read.local_blocks[i // 4]][i % 4] = token


def test_a_decode_phase_whose_source_is_lost_fails_and_frees(worker):
    tell(worker, start("s", PROMPT, phase=Phase.DECODE, source="p"))
    [failed] = of(worker.handle(OwnerLost(WorkerId("p"), "gone"), 1.0), SequenceFailed)
    assert failed.reason is FailureReason.SOURCE_LOST
    assert worker.core.is_idle


def test_a_cancelled_decode_phase_waits_for_its_read_and_then_releases_once(worker):
    read = granted(worker)
    assert of(tell(worker, CancelSequence("s", 0)), KVReleased) == []
    assert worker.core.status().quarantined_blocks == 3
    assert not worker.core.is_idle
    [release] = of(worker.handle(ReadDone(read.read_id), 1.0), KVReleased)
    assert release.taken is False
    assert worker.core.is_idle
    assert worker.outputs("s") == []


def test_a_first_token_that_ends_the_sequence_ends_it_here_too(worker):
    read = granted(worker, max_tokens=1)
    [output] = of(worker.handle(ReadDone(read.read_id), 0.0), StepOutput)
    assert output.outputs[0].finish is FinishReason.LENGTH
    assert worker.core.is_idle


def test_a_decode_phase_without_room_is_refused_in_time():
    worker = Machine("w", block_count=4)
    worker.handle(RouterJoined(ROUTER), 0.0)
    for name in ("a", "b"):
        tell(worker, start(name, PROMPT, phase=Phase.DECODE, source="p"))
    tick_until(worker, 5.0)
    assert [(f.seq_id, f.reason) for f in failures(worker)] == [("b", RefusalReason.NO_ROOM)]


def test_the_blocks_of_a_decode_phase_are_all_found_again(worker):
    read = granted(worker, max_tokens=8)
    fill(worker, read)
    worker.handle(ReadDone(read.read_id), 0.0)
    run(worker)
    tokens = [*PROMPT, *expected_tokens(PROMPT, SamplingParams(max_tokens=8), 64)]
    hashes = block_hashes(ROOT, tokens[:-1], 4)  # the last token was never an input
    assert len(hashes) == 4
    assert set(worker.core._cache.snapshot()) == set(hashes)


@pytest.mark.parametrize("joins_anew", [False, True])
def test_a_change_that_came_before_a_snapshot_and_went_after_it_is_told(joins_anew):
    """While a step runs, changes wait to be told; a router's snapshot must not be older than them."""
    worker = Machine("w", block_count=8)
    worker.handle(RouterJoined(ROUTER), 0.0)
    tell(worker, start("long", (1,), phase=Phase.AGGREGATED, max_tokens=3))
    assert worker.plan is not None
    read = granted(worker)
    tell(worker, start("s2", range(50, 52), phase=Phase.DECODE, source="p"))
    fill(worker, read)
    tell(worker, CancelSequence("s2", 0))
    worker.handle(ReadDone(read.read_id), 0.0)  # two full blocks are stored
    router = RouterId("r2") if joins_anew else ROUTER
    snapshots = of(
        worker.handle(RouterJoined(router), 0.0) if joins_anew else tell(worker, ResyncBlocks()), BlockEvents
    )
    assert len(snapshots[-1].stored) == 2
    assert snapshots[-1].is_snapshot
    tell(worker, CancelSequence("s", 0))
    tell(worker, start("big", range(100, 120), phase=Phase.DECODE, source="p"))  # reuses one of them
    assert len(worker.core._cache.snapshot()) == 1
    worker.finish_step(0.0)
    for heard in {ROUTER, router}:
        assert known_hashes(worker, heard) == set(worker.core._cache.snapshot())
    assert next(m.is_snapshot for r, m in worker.told_to if r == router and isinstance(m, BlockEvents))


def test_small_decode_phases_do_not_starve_a_large_sequence():
    worker = Machine("w", block_count=8)
    worker.handle(RouterJoined(ROUTER), 0.0)
    tell(worker, start("running", range(8), phase=Phase.AGGREGATED, max_tokens=8))
    tell(worker, start("large", range(100, 124), phase=Phase.AGGREGATED, max_tokens=1))
    worker.finish_step(0.0)
    assert of(tell(worker, start("small", (1,), phase=Phase.DECODE, source="p")), KVRequest) == []
    while not worker.outputs("large"):
        worker.finish_step(0.0)
    assert worker.core.status().receiver_count == 1
