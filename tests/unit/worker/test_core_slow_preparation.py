"""A grammar or an adapter that takes long to make ready, on either side of a hand-over, costs no prefill."""

import pytest

from baton.config import GRAMMAR_TIMES
from baton.core.ids import SeqKey, SequenceId
from baton.core.messages import Phase, SequenceFailed, SequenceRefused
from baton.core.sampling import Grammar, GrammarKind, SamplingParams
from simulator.faults.at_rest import containers
from tests.unit.worker.worker_pair import (
    ROUTER,
    Cluster,
    Machine,
    collected,
    expected_tokens,
    failures,
    start,
)
from worker.events import Drain, FromRouter, PreparationBegan, PreparationEnded, RouterLost

PROMPT = tuple(range(10, 30))
GRAMMAR = Grammar(GrammarKind.REGEX, "a+")
KEY = SeqKey(SequenceId("s"), 0)
SLOW_S = 20.0
"""Four leases."""


@pytest.fixture
def pair():
    cluster = Cluster(Machine("p"), Machine("d"))
    cluster.prefill, cluster.decode = cluster.machines["p"], cluster.machines["d"]
    return cluster


def tell(pair, name, event):
    pair.machines[name].handle(event, pair.now_s)
    pair.post()
    pair.run()


def begin(pair, name):
    phase, source = (Phase.PREFILL, None) if name == "p" else (Phase.DECODE, "p")
    tell(pair, name, FromRouter(ROUTER, start("s", PROMPT, phase=phase, source=source, grammar=GRAMMAR)))


def assert_nothing_was_computed_twice(pair):
    tokens, _ = collected(pair.prefill, pair.decode, seq_id="s")
    assert tokens == expected_tokens(PROMPT, SamplingParams(6), 56)
    assert failures(pair.prefill) == failures(pair.decode) == []
    assert sum(plan.token_count for plan in pair.prefill.plans) == len(PROMPT)
    assert sum(plan.token_count for plan in pair.decode.plans) < len(PROMPT)
    pair.advance(SLOW_S * 3)
    pair.assert_quiet()


@pytest.mark.parametrize("asks_first", [False, True])
def test_a_decode_worker_waits_for_a_prefill_worker_that_is_made_ready(pair, asks_first):
    if asks_first:
        begin(pair, "d")
        pair.advance(1.0)
    tell(pair, "p", PreparationBegan(KEY, Phase.PREFILL))
    if not asks_first:
        begin(pair, "d")
    pair.advance(SLOW_S)
    begin(pair, "p")
    pair.advance(1.0)
    assert_nothing_was_computed_twice(pair)


def test_a_prefill_worker_waits_for_a_decode_worker_that_is_made_ready(pair):
    begin(pair, "p")
    pair.advance(SLOW_S)
    begin(pair, "d")
    pair.advance(1.0)
    assert_nothing_was_computed_twice(pair)


def test_a_decode_worker_hears_that_the_preparation_came_to_nothing(pair):
    tell(pair, "p", PreparationBegan(KEY, Phase.PREFILL))
    begin(pair, "d")
    pair.advance(SLOW_S)
    tell(pair, "p", PreparationEnded(KEY, "not ready in time"))
    [failed] = failures(pair.decode)
    assert isinstance(failed, SequenceFailed)
    assert "not ready in time" in failed.message
    pair.assert_quiet()


def test_a_prefill_worker_that_never_hears_of_it_says_so_after_a_lease(pair):
    begin(pair, "d")
    pair.advance(6.0)
    assert len(failures(pair.decode)) == 1
    pair.assert_quiet()


def test_a_decode_worker_that_never_asks_frees_the_blocks_in_the_end(pair):
    begin(pair, "p")
    pair.advance(GRAMMAR_TIMES * pair.prefill.engine.prepare_s + 6.0)
    pair.assert_quiet()


def refusals(machine):
    return machine.told_of(SequenceRefused)


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.AGGREGATED])
def test_a_drain_waits_for_what_is_made_ready(pair, phase):
    worker = pair.prefill
    tell(pair, "p", PreparationBegan(KEY, phase))
    tell(pair, "p", Drain())
    assert not worker.core.is_idle
    tell(pair, "p", FromRouter(ROUTER, start("late", PROMPT, phase=phase)))
    tell(pair, "p", FromRouter(ROUTER, start("s", PROMPT, phase=phase, grammar=GRAMMAR)))
    assert [m.seq_id for m in refusals(worker)] == ["late"]
    tokens, _ = collected(worker, seq_id="s")
    assert tokens
    pair.advance(GRAMMAR_TIMES * worker.engine.prepare_s + 6.0)
    assert worker.core.is_idle


def test_a_drain_does_not_wait_for_a_preparation_that_came_to_nothing(pair):
    tell(pair, "p", PreparationBegan(KEY, Phase.AGGREGATED))
    tell(pair, "p", Drain())
    tell(pair, "p", PreparationEnded(KEY, "cancelled"))
    assert pair.prefill.core.is_idle


def test_what_begins_to_be_made_ready_after_a_drain_is_refused(pair):
    tell(pair, "p", Drain())
    tell(pair, "p", PreparationBegan(KEY, Phase.AGGREGATED))
    assert pair.prefill.core.is_idle
    tell(pair, "p", FromRouter(ROUTER, start("s", PROMPT, phase=Phase.AGGREGATED, grammar=GRAMMAR)))
    assert [m.seq_id for m in refusals(pair.prefill)] == ["s"]


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.AGGREGATED])
def test_a_start_whose_router_is_gone_holds_nothing(pair, phase):
    worker = pair.prefill
    tell(pair, "p", PreparationBegan(KEY, phase))
    tell(pair, "p", RouterLost(ROUTER))
    tell(pair, "p", FromRouter(ROUTER, start("s", PROMPT, phase=phase, grammar=GRAMMAR)))
    assert worker.core.is_idle
    assert not [where for where, _ in containers(worker.core) if "preparing" in where]


def test_a_decode_worker_hears_that_the_router_of_a_prefill_phase_is_gone(pair):
    tell(pair, "p", PreparationBegan(KEY, Phase.PREFILL))
    begin(pair, "d")
    tell(pair, "p", RouterLost(ROUTER))
    begin(pair, "p")
    [failed] = failures(pair.decode)
    assert isinstance(failed, SequenceFailed)
    assert "not started" in failed.message
    pair.assert_quiet()
