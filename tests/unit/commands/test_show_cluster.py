"""The output of `baton status`."""

from io import StringIO

import msgspec
import pytest
from rich.console import Console

from baton.core.ids import WorkerId
from baton.core.messages import Role
from baton.core.operate import (
    AutoscaleState,
    ClusterState,
    Decision,
    Outcome,
    Pool,
    ReplicaState,
    ReplicaStatus,
    Resize,
    RoleOutlook,
)
from commands.show_cluster import show

OUTLOOK = RoleOutlook(Role.DECODE, 1234.0, 1500.0, "tokens/s", 1.08, 3, 2)
SCALED = AutoscaleState("on", "", (OUTLOOK,), start_s=41.0, drain_s=2.0, switch_s=0.5)
WHY = "decode: 1.5e+03 tokens/s forecast takes 3, there are 2"
DECISION = Decision(7, 0.0, "autoscaler", WHY, Resize({Role.DECODE: 3}), Outcome.ADVISED, "would resize")


def shown(scaled):
    out = StringIO()
    state = ClusterState(
        "x", (Pool("tiny", {Role.DECODE: 2}),), (), autoscale=scaled and (scaled,), decisions=(DECISION,)
    )
    show(state, Console(file=out, width=220))
    return out.getvalue()


def test_what_the_autoscaler_reckons_with_and_why_it_decided():
    text = shown(SCALED)
    assert "autoscaler orders; starts take 41 s, role switches 0.5 s, drains 2.0 s" in text
    assert "1.23e+03 tokens/s" in text
    assert "x1.08" in text
    assert WHY in text


def test_why_it_decides_nothing_and_that_it_only_advises():
    text = shown(msgspec.structs.replace(SCALED, mode="advise", text="no report from r2"))
    assert "autoscaler only advises" in text
    assert "no decisions: no report from r2" in text


def test_nothing_is_said_of_an_autoscaler_that_is_off():
    assert "tokens/s forecast takes" in shown(())
    assert "correction" not in shown(())


def test_names_are_whole_on_a_narrow_terminal():
    names = [f"prefill-{i}.12a3{i:x}" for i in range(3)]
    reason = "operator ada ordered it: the host's fans were loud all night"
    replicas = tuple(
        ReplicaStatus(
            name.split(".")[0], "tiny", Role.PREFILL, state, 3.0, "1", WorkerId(name), "n1", reason=reason
        )
        for name, state in zip(names, ReplicaState, strict=False)
    )
    out = StringIO()
    show(ClusterState("x", (), replicas), Console(file=out, width=80))
    text = out.getvalue()
    assert all(name in text for name in names)
    assert "\u2026" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_pipe_gets_whole_lines_and_markup_is_no_markup(capsys):
    decision = msgspec.structs.replace(DECISION, reason="[bold]" + "x" * 150, text="would [red]")
    show(ClusterState("x", (), (), decisions=(decision,)))
    text = capsys.readouterr().out
    assert "[bold]" + "x" * 150 in text
    assert "would [red]" in text


def test_decisions_are_whole_on_a_narrow_terminal():
    who = "operator somebody-with-a-long-name"
    decision = msgspec.structs.replace(DECISION, who=who, reason="[bold] evening peak", text="all are there")
    out = StringIO()
    show(ClusterState("x", (), (), decisions=(decision,)), Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    told = " ".join(" ".join(lines).split())
    assert f"{who}: resize to 3 decode ([bold] evening peak) - advised: all are there" in told
    assert len(lines) < 12


@pytest.mark.parametrize(("shapes", "is_shown"), [(("tp2", "1", ""), True), (("1", "1", ""), False)])
def test_the_shapes_of_workers_are_shown_where_one_has_several_ranks(shapes, is_shown):
    replicas = tuple(
        ReplicaStatus(f"worker-{i}", "m", Role.DECODE, ReplicaState.RUNNING, 3.0, "1", shape=shape)
        for i, shape in enumerate(shapes)
    )
    out = StringIO()
    show(ClusterState("x", (), replicas), Console(file=out, width=80))
    assert ("shape" in out.getvalue(), "tp2" in out.getvalue()) == (is_shown, is_shown)


def test_deaths_are_shown_as_those_in_a_row_and_only_if_there_are_any():
    def lines(deaths):
        replica = ReplicaStatus(
            "worker-0", "m", Role.DECODE, ReplicaState.WAITING, 3.0, "1", deaths_in_a_row=deaths
        )
        out = StringIO()
        show(ClusterState("x", (), (replica,)), Console(file=out, width=80))
        return out.getvalue().splitlines()

    one, two = lines(3)[1:3]
    at = one.index("deaths")
    assert two[at:].startswith("in a row")
    assert lines(3)[4][at:].startswith("3 ")
    assert not any("deaths" in line for line in lines(0))


def test_workers_of_models_with_names_alike_are_told_apart():
    models = ("x/y", "x-y")
    replicas = tuple(
        ReplicaStatus(f"worker-{i}", model, Role.DECODE, ReplicaState.RUNNING, 3.0, "1")
        for i, model in enumerate(models)
    )
    out = StringIO()
    show(ClusterState("x", (), replicas), Console(file=out, width=80))
    rows = [line for line in out.getvalue().splitlines() if "worker-" in line]
    assert [model in row for model, row in zip(models, rows, strict=True)] == [True, True]


def test_where_workers_memory_went_once_for_all_that_say_the_same():
    def replica(name, memory):
        return ReplicaStatus(name, "tiny", Role.DECODE, ReplicaState.RUNNING, 3.0, "", memory=memory)

    some = (replica("a", "weights 1 MB"), replica("b", "weights 1 MB"), replica("c", ""), replica("d", "KV"))
    out = StringIO()
    show(ClusterState("x", (), some), Console(file=out, width=120))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("memory of")]
    assert lines == ["memory of a, b: weights 1 MB", "memory of d: KV"]
