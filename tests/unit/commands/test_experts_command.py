"""`baton experts`, against a fake control plane."""

import asyncio
import os
import re
import threading
import time
from io import StringIO

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from baton.core.errors import SetupError
from baton.core.experts import ExpertGroupState, ExpertRankPhase
from baton.core.messages import Role
from baton.core.operate import (
    ClusterState,
    Decision,
    DrainExpertRank,
    Outcome,
    Pool,
    RebalanceExperts,
    ScaleExperts,
)
from baton.wire.server import start_server
from commands.app import app
from commands.show_experts import RANKS_SHOWN, rows_between, show
from control_plane.expert_summary import listed, progress
from tests.unit.control_plane.expert_groups import group, large, rank

DECODE, PREFILL = group(), group(role=Role.PREFILL)


class ExpertControl:
    """A control plane that is done with an order at the next request, and settles some requests later."""

    def __init__(self):
        self.groups = (DECODE,)
        self.orders, self.decisions, self.outcome = [], [], Outcome.ACCEPTED
        self.later = []
        """Groups that later looks at the cluster see, one after the other."""

    def order(self, order):
        self.orders.append(order)
        decision = Decision(
            7, time.time(), order.who, order.reason, RebalanceExperts(), self.outcome, "as told"
        )
        ended = msgspec.structs.replace(decision, outcome=Outcome.DONE, done_after_s=0.25)
        self.decisions = [ended if self.outcome is Outcome.ACCEPTED else decision]
        return decision

    def state(self):
        return ClusterState(
            "x", (Pool("m", {Role.DECODE: 1}),), (), decisions=tuple(self.decisions), experts=self.groups
        )

    async def changes(self):
        while self.orders and self.later:
            self.groups = self.later.pop(0)
            yield self.state()
        yield self.state()


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()


@pytest.fixture
def control(loop, monkeypatch):
    control = ExpertControl()
    start = start_server("127.0.0.1", 0, operate=control)
    server, port = asyncio.run_coroutine_threadsafe(start, loop).result(10)
    monkeypatch.setenv("BATON_CONTROL", f"127.0.0.1:{port}")
    yield control
    asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)


def run(*args):
    return CliRunner().invoke(app, ["experts", *args])


@pytest.mark.parametrize(
    ("words", "action"),
    [
        (["rebalance"], RebalanceExperts("decode of m")),
        (["rebalance", "--group", "decode"], RebalanceExperts("decode of m")),
        (["drain", "experts-decode-1"], DrainExpertRank("experts-decode-1")),
        (["drain", "experts-decode-1.a", "--no-replace"], DrainExpertRank("experts-decode-1.a", False)),
        (["scale", "8"], ScaleExperts(8, "decode of m")),
        (["scale", "8", "--group", "decode of m"], ScaleExperts(8, "decode of m")),
    ],
)
def test_words_become_orders_and_their_end_is_awaited(control, words, action):
    result = run(*words, "--reason", "a reason")
    assert result.exit_code == 0, result.output
    (order,) = control.orders
    assert (order.action, order.reason, order.is_advice) == (action, "a reason", False)
    assert order.who.startswith("operator ")
    assert "done after 0.25 s: as told; " in result.output


def test_a_drain_is_over_when_the_group_is_whole_again_and_progress_is_told_meanwhile(control):
    draining = group(rank(0), rank(1, ExpertRankPhase.DRAINING), rank(2), rank(3), loads_running=9)
    starting = group(rank(0), rank(1, ExpertRankPhase.STARTING, life="b"), rank(2), rank(3), missing=2)
    control.later = [(draining,), (starting,), (DECODE,)]
    result = run("drain", "experts-decode-1")
    assert "decode of m: 3 of 4 ranks ready, 1 draining, 9 experts loading" in result.output
    assert re.search(r"as told; all ranks are ready, \d", result.output)
    assert control.later == []


def test_a_rank_that_is_not_replaced_is_waited_for_in_its_own_group_alone(control):
    broken = group(rank(0, role=Role.PREFILL), role=Role.PREFILL, wanted_ranks=3)
    smaller = group(rank(0), rank(2), rank(3))
    control.groups = (broken, DECODE)
    control.later = [(broken, smaller)]
    result = run("drain", "experts-decode-1", "--no-replace")
    assert result.exit_code == 0, result.exception
    assert "all ranks are ready" in result.output


def test_a_group_that_stays_incomplete_is_said_to_be_on_its_way(control):
    control.groups = (group(rank(0), wanted_ranks=2),)
    error = run("scale", "2", "--wait", "0.3").exception
    assert isinstance(error, SetupError)
    assert "not done within 0.3 s" in str(error)


def test_advice_changes_nothing_and_does_not_wait(control):
    control.outcome = Outcome.ADVISED
    assert "advised: as told" in run("scale", "2", "--advise").output
    assert control.orders[0].is_advice


def test_a_refusal_is_an_exit_status(control):
    control.outcome = Outcome.REFUSED
    assert run("scale", "1", "--yes").exit_code == 1


def test_the_last_room_for_second_replicas_is_not_given_up_unasked(control):
    control.groups = (group(*(rank(i, slots=32) for i in range(4))),)
    result = run("scale", "3")
    assert "no room for a second replica" in result.output
    assert "confirm it with --yes" in str(result.exception)
    assert control.orders == []
    assert run("scale", "3", "--yes").exit_code == 0
    assert len(control.orders) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["drain", "decode-7"], r"no expert rank 'decode-7' here: choose one of experts-decode-0, "),
        (["rebalance"], r"several groups: choose one with --group: decode of m, prefill of m"),
        (["scale", "4", "--group", "m"], r"several groups"),
        (["show", "--group", "walrus"], r"no group 'walrus' here: choose one of decode of m, prefill of m"),
    ],
)
def test_wrong_names_are_one_line(control, words, says):
    control.groups = (DECODE, PREFILL)
    error = run(*words).exception
    assert isinstance(error, SetupError)
    assert re.match(says, str(error)), error
    assert "\n" not in str(error)
    assert control.orders == []


@pytest.mark.parametrize("words", [["show"], ["rebalance"], ["drain", "x"], ["scale", "2"]])
def test_a_cluster_without_expert_ranks_is_said_to_have_none(control, words):
    control.groups = ()
    error = run(*words).exception
    assert isinstance(error, SetupError)
    assert "no expert ranks: every worker holds all experts" in str(error)


def test_a_control_plane_that_is_not_there_is_one_line(control, monkeypatch):
    monkeypatch.setenv("BATON_CONTROL", "127.0.0.1:1")
    assert "127.0.0.1:1" in str(run("show").exception)


@pytest.mark.parametrize("count", ["0", "-3", "many", "2000"])
def test_numbers_of_ranks_are_checked(control, count):
    assert run("scale", "--", count).exit_code == 2
    assert control.orders == []


@pytest.mark.parametrize("command", ["show", "rebalance", "drain", "scale"])
def test_help_has_an_example(command):
    text = re.sub(r"\s+", " ", run(command, "--help").output)
    assert f"Example: baton experts {command}" in text


def test_a_rank_that_baton_drain_gets_is_sent_to_baton_experts(control):
    error = CliRunner().invoke(app, ["drain", "experts-decode-1"]).exception
    assert "is an expert rank: use `baton experts drain experts-decode-1`" in str(error)


def test_status_has_a_line_for_each_group(control):
    control.groups = (DECODE, msgspec.structs.replace(PREFILL, missing=3))
    text = CliRunner().invoke(app, ["status"]).output
    assert "decode of m: 4 of 4 expert ranks ready, balance 91%" in text
    assert "prefill of m: 4 of 4 expert ranks ready, 3 experts without a replica, balance 91%" in text


def test_json_is_the_whole_state_of_the_groups(control):
    control.groups = (DECODE, PREFILL)
    found = msgspec.json.decode(run("show", "--json").output, type=tuple[ExpertGroupState, ...])
    assert found == (DECODE, PREFILL)
    assert msgspec.json.decode(run("show", "--json", "--group", "prefill").output)[0]["role"] == "prefill"


def test_rows_per_second_are_measured_between_two_looks(control):
    output = run("show", "--seconds", "0.05").output
    assert "0/s" in output
    assert "3,000" in run("show", "--seconds", "0").output
    after = group(rank(1, rows=1400), rank(2, life="b", rows=9))
    assert rows_between([DECODE], [after], 2.0) == {"experts-decode-1.a": 200.0}


def shown(*groups, **options):
    out = StringIO()
    show(groups, {}, console=Console(file=out, width=160), **options)
    return out.getvalue()


def test_people_see_ranks_balance_replicas_and_migrations():
    text = shown(group(rank(0), rank(1, ExpertRankPhase.LOST, node="f" * 40), missing=3, wanted_ranks=2))
    for words in (
        "decode of m: 1 of 2 expert ranks ready, 3 experts without a replica, balance 91%",
        "4 layers of 64 experts; replicas: at least 1, 1.25 on average; 192 of 256 experts have only one",
        "worst layer 2 74%; epoch 7 used by 2 callers",
        "5 placements, 12 experts migrated (12.0 MiB), 1 rank lost",
        "experts-decode-1.a",
        "lost",
        "ffffffffffff host-1",
    ):
        assert words in text, words


def test_of_many_ranks_those_in_need_of_attention_are_listed():
    ranks = list(large().ranks)
    ranks[40] = msgspec.structs.replace(ranks[40], phase=ExpertRankPhase.STARTING)
    ranks[60] = msgspec.structs.replace(ranks[60], load=0.3)
    found = large(ranks=tuple(ranks))
    assert [r.name for r in listed(found, RANKS_SHOWN)][:2] == ["experts-decode-40", "experts-decode-60"]
    text = shown(found)
    assert f"{72 - RANKS_SHOWN} ranks that are ready and less busy are not listed" in text
    assert text.count("experts-decode-") == RANKS_SHOWN
    assert shown(found, shows_all=True).count("experts-decode-") == 72


def test_the_busiest_experts_are_named_by_layer():
    loads = [1.0] * 128
    loads[64 + 9] = 65.0
    found = group(layer_count=2, expert_loads=tuple(loads), expert_replicas=(3,) * 128)
    assert "busiest: layer 1 expert 9 32× an even share on 3 ranks, layer 0 expert 0 1× " in shown(found)
    assert "busiest" not in shown(large())


def test_a_group_that_is_starting_is_shown():
    made = group(rank(0, ExpertRankPhase.STARTING), layer_count=0, expert_count=0, expert_replicas=())
    text = shown(made)
    assert "decode of m: 0 of 1 expert ranks ready" in text
    assert "no rank has said yet how many experts the model has" in text


def test_progress_names_what_is_missing():
    text = progress(group(rank(0), rank(1, ExpertRankPhase.LOST), missing=7, loads_running=3))
    assert text == "decode of m: 1 of 2 ranks ready, 1 lost, 3 experts loading, 7 experts without a replica"


def test_names_are_not_taken_for_markup():
    assert "[red]" in shown(group(rank(0, host="[red]evil")))
    assert os.linesep in shown(DECODE)
