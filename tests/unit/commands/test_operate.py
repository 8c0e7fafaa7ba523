"""The operators' commands, against a fake control plane."""

import asyncio
import os
import re
import threading
import time

import msgspec
import pytest
from typer.testing import CliRunner

from baton.core.errors import SetupError
from baton.core.ids import WorkerId
from baton.core.messages import Role
from baton.core.operate import (
    ClusterState,
    Decision,
    DrainNode,
    DrainWorker,
    NodeState,
    Outcome,
    Pool,
    ReplicaState,
    ReplicaStatus,
    RollOut,
    Scale,
    SwitchRole,
    Version,
)
from baton.wire.server import start_server
from commands import orders
from commands.app import app

REPLICA = ReplicaStatus(
    "decode-0", "tiny", Role.DECODE, ReplicaState.RUNNING, 3.0, "1", WorkerId("decode-0.a1")
)
STATE = ClusterState("x", (Pool("tiny", {Role.DECODE: 1}),), (REPLICA,), (NodeState("abc", "host-a"),))


class Control:
    """A control plane that accepts an order at once, and is done with it at the next request."""

    def __init__(self):
        self.orders, self.decisions = [], []
        self.outcome, self.then = Outcome.ACCEPTED, Outcome.DONE
        self.unsettled_looks = 0
        """Number of requests after an order at which something is still missing."""

    def order(self, order):
        self.orders.append(order)
        decision = Decision(7, time.time(), order.who, order.reason, order.action, self.outcome, "as told")
        ended = msgspec.structs.replace(decision, outcome=self.then, done_after_s=0.25)
        self.decisions = [ended if self.outcome is Outcome.ACCEPTED else decision]
        return decision

    def state(self):
        return msgspec.structs.replace(STATE, decisions=tuple(self.decisions), is_settled=True)

    async def changes(self):
        while self.orders and self.unsettled_looks:
            self.unsettled_looks -= 1
            yield msgspec.structs.replace(self.state(), is_settled=False)
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
    control = Control()
    start = start_server("127.0.0.1", 0, operate=control)
    server, port = asyncio.run_coroutine_threadsafe(start, loop).result(10)
    monkeypatch.setenv("BATON_CONTROL", f"127.0.0.1:{port}")
    yield control
    asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)


def run(*args):
    return CliRunner().invoke(app, list(args))


@pytest.mark.parametrize(
    ("words", "action"),
    [
        (["scale", "decode", "3"], Scale(Role.DECODE, 3)),
        (["scale", "decode", "3", "--model", "tiny"], Scale(Role.DECODE, 3, "tiny")),
        (["switch-role", "decode-0", "prefill"], SwitchRole("decode-0", Role.PREFILL)),
        (["drain", "decode-0"], DrainWorker("decode-0")),
        (["drain", "decode-0.a1", "--no-replace"], DrainWorker("decode-0.a1", False)),
        (["drain", "host-a"], DrainNode("host-a")),
        (["drain", "host-a", "--undo"], DrainNode("host-a", True)),
        (
            ["rollout", "v2", "--set", "engine.threads=1", "--surge", "0", "--unavailable", "2"],
            RollOut(Version("v2", ("engine.threads=1",)), "", 0, 2),
        ),
    ],
)
def test_words_become_orders_and_their_end_is_awaited(control, words, action):
    result = run(*words, "--reason", "a reason", *([] if words[0] == "rollout" else ["--yes"]))
    assert result.exit_code == 0, result.output
    (order,) = control.orders
    assert (order.action, order.reason, order.is_advice) == (action, "a reason", False)
    assert order.who.startswith("operator ")
    assert "done after 0.25 s: as told" in result.output


def test_without_waiting_the_order_alone_is_told(control):
    assert "accepted: as told" in run("drain", "decode-0", "--wait", "0").output


def test_a_drain_is_over_when_what_was_started_instead_serves(control):
    control.unsettled_looks = 3
    output = run("drain", "decode-0").output
    assert "waiting for the replacements" in output
    assert re.search(r"as told; all wanted workers serve, \d", output)
    assert control.unsettled_looks == 0


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        (["scale", "decode", "0"], "no worker left: requests wait"),
        (
            ["switch-role", "decode-0", "prefill"],
            "no decode worker left: its prefill workers serve everything",
        ),
        (["drain", "decode-0", "--no-replace"], "no worker left"),
    ],
)
def test_the_last_worker_of_a_role_is_not_given_up_unasked(control, words, lost):
    result = run(*words)
    assert lost in result.output
    assert "confirm it with --yes" in str(result.exception)
    assert control.orders == []
    assert lost in run(*words, "--yes").output
    assert len(control.orders) == 1


def test_a_drain_that_is_to_be_undone_drains_no_worker(control):
    result = run("drain", "decode-0", "--undo")
    assert "--undo works for nodes" in str(result.exception)
    assert control.orders == []


def test_advice_and_what_is_replaced_are_warned_of_and_done(control):
    assert "no worker left meanwhile" in run("drain", "decode-0").output
    control.outcome = Outcome.ADVISED
    assert "no worker left" in run("scale", "decode", "0", "--advise").output
    assert len(control.orders) == 2


def test_of_several_clusters_each_is_told_by_model_and_folder(control, monkeypatch):
    (address, nobody), folder = (os.environ["BATON_CONTROL"], "127.0.0.1:1"), "/run/baton-x"
    monkeypatch.delenv("BATON_CONTROL")
    monkeypatch.setattr(orders, "local_clusters", lambda: [(address, folder), (nobody, "/run/baton-y")])
    error = str(run("status").exception)
    assert f"{address} (tiny, {folder})" in error
    assert f"{nobody} (which does not answer, /run/baton-y)" in error


def test_advice_is_asked_for_as_such(control):
    control.outcome = Outcome.ADVISED
    assert "advised: as told" in run("scale", "decode", "9", "--advise").output
    assert control.orders[0].is_advice


@pytest.mark.parametrize(("outcome", "then"), [(Outcome.REFUSED, None), (Outcome.ACCEPTED, Outcome.FAILED)])
def test_what_was_not_done_is_an_exit_status(control, outcome, then):
    control.outcome, control.then = outcome, then
    assert run("scale", "decode", "9").exit_code == 1


def test_status_has_what_is_wanted_what_is_there_and_why(control):
    control.order(msgspec.structs.replace(run_order(), reason="a burst"))
    text = run("status").output
    for words in ("tiny", "1 decode", "decode-0.a1", "running", "host-a"):
        assert words in text, words
    state = msgspec.json.decode(run("status", "--json").output, type=ClusterState)
    assert state.replicas == STATE.replicas
    assert state.decisions[0].reason == "a burst"


def run_order():
    from baton.core.operate import Order

    return Order(Scale(Role.DECODE, 1), "autoscaler")


def test_a_role_that_is_none_and_a_control_plane_that_is_not_there_are_one_line(control, monkeypatch):
    assert isinstance(run("scale", "walrus", "1").exception, SetupError)
    monkeypatch.setenv("BATON_CONTROL", "127.0.0.1:1")
    error = run("status").exception
    assert isinstance(error, SetupError)
    assert "127.0.0.1:1" in str(error)


@pytest.mark.parametrize(
    ("count", "says"),
    [
        ("1xpp2", "baton rollout NAME --set engine.shape=pp2"),
        ("tp2", "baton rollout NAME --set engine.shape=tp2"),
        ("many", "many is not a number of workers, such as 3"),
        ("2x", "2x is not a number of workers, such as 3"),
    ],
)
def test_what_is_no_number_of_workers_is_refused_and_shapes_are_sent_to_rollout(control, count, says):
    error = run("scale", "decode", count).exception
    assert isinstance(error, SetupError)
    assert says in str(error)
    assert control.orders == []


@pytest.mark.parametrize("command", ["status", "scale", "switch-role", "drain", "rollout"])
def test_help_has_an_example(command):
    text = re.sub(r"\s+", " ", run(command, "--help").output)
    assert f"Example: baton {command} " in text


TWO = ClusterState(
    "x",
    (Pool("tiny", {Role.DECODE: 1}), Pool("org/big", {Role.DECODE: 1})),
    tuple(
        ReplicaStatus(
            f"{prefix}-decode-0",
            model,
            Role.DECODE,
            ReplicaState.RUNNING,
            3.0,
            "1",
            WorkerId(f"{prefix}-decode-0.a1"),
        )
        for prefix, model in (("tiny", "tiny"), ("org-big", "org/big"))
    ),
    is_settled=True,
)


@pytest.fixture
def two(control, monkeypatch):
    monkeypatch.setitem(globals(), "STATE", TWO)
    return control


@pytest.mark.parametrize(
    ("words", "action"),
    [
        (
            ["switch-role", "decode-0", "prefill", "--model", "org/big", "--yes"],
            SwitchRole("org-big-decode-0", Role.PREFILL),
        ),
        (
            ["switch-role", "tiny-decode-0", "prefill", "--model", "tiny", "--yes"],
            SwitchRole("tiny-decode-0", Role.PREFILL),
        ),
        (["drain", "decode-0", "--model", "tiny"], DrainWorker("tiny-decode-0")),
        (["drain", "org-big-decode-0"], DrainWorker("org-big-decode-0")),
        (["rollout", "v2", "--model", "org/big"], RollOut(Version("v2"), "org/big")),
    ],
)
def test_workers_of_a_model_are_found_by_their_name_within_it(two, words, action):
    result = run(*words)
    assert result.exit_code == 0, result.output
    (order,) = two.orders
    assert order.action == action


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["switch-role", "decode-0", "prefill", "--model", "huge"], "choose one of tiny, org/big"),
        (
            ["switch-role", "tiny-decode-0", "prefill", "--model", "org/big"],
            "org/big has no worker 'tiny-decode-0'",
        ),
        (["drain", "decode-7", "--model", "tiny"], "choose one of tiny-decode-0"),
        (["status", "--model", "huge"], "no model 'huge'"),
    ],
)
def test_what_a_model_does_not_have_is_told_before_anything_is_ordered(two, words, said):
    result = run(*words)
    assert said in str(result.exception)
    assert isinstance(result.exception, SetupError)
    assert two.orders == []


def test_status_shows_the_model_of_each_worker_or_one_model_alone(two, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    both = run("status").output
    assert "org-big-decode-0.a1" in both
    assert "tiny-decode-0.a1" in both
    assert re.search(r"org/big version 1: 1 decode wanted, all running", both)
    one = run("status", "--model", "tiny").output
    assert "org-big" not in one


def test_an_order_that_one_may_not_give_is_not_told_as_silence(control, monkeypatch):
    monkeypatch.setattr("baton.wire.guard.is_local", lambda peer: False)
    said = str(run("scale", "decode", "3").exception)
    assert said.startswith("the control plane refuses it: 127.0.0.1:")
    assert "from another host this wants mutual TLS" in said
    assert control.orders == []
