"""The load of experts: its history, the figures derived from it, and its card on the overview."""

import contextlib
import re
import time

import pytest
from nicegui import Client
from nicegui.page import page

from baton.core.ids import WorkerId
from baton.core.messages import Role
from baton.core.operate import ClusterState, Pool, ReplicaState, ReplicaStatus
from baton.core.tokens import Scope
from baton.telemetry import catalogue as c
from baton.telemetry.metrics import Meter
from control_plane.dashboard.detail_pages import WorkerPage
from control_plane.dashboard.expert_strips import KEYS, ROWS_MAX, expert_balance, legend
from control_plane.dashboard.experts import EXPERTS_MAX, ExpertHistory, expert_groups
from control_plane.dashboard.pages import OverviewPage
from control_plane.dashboard.samples import APART, MetricsFrame, MetricsReader, frame_of
from tests.unit.control_plane.dashboard.test_pages import DashboardSetup

NAMES = [m.name for m in c.CATALOGUE]


def said(counts, balance=None, *, worker="decode-0"):
    """Build a worker's metrics."""
    meter = Meter()
    for expert, count in enumerate(counts):
        meter.inc(c.EXPERT_TOKENS, count, worker=worker, expert=str(expert))
    for layers, value in zip(("mean", "worst"), balance or (), strict=False):
        meter.set(c.EXPERT_BALANCE, value, worker=worker, layers=layers)
    return MetricsReader(NAMES).read(meter.render().decode())


def state(**models):
    """Build a state from the model of each worker; names of workers end with their number."""
    return ClusterState(
        "life",
        tuple(Pool(model, {Role.DECODE: 1}) for model in sorted(set(models.values()))),
        tuple(
            ReplicaStatus(name, model, Role.DECODE, ReplicaState.RUNNING, 5.0, "1", WorkerId(f"{name}.a"))
            for name, model in ((name.replace("_", "-"), model) for name, model in models.items())
        ),
    )


def test_counts_are_those_of_the_last_minutes_and_a_restart_begins_anew():
    history = ExpertHistory()
    history.add(1000.0, [(None, said([100, 100, 100]))])
    assert history.tokens() == {"decode-0": (0.0, 0.0, 0.0)}, "what was before we looked is of another time"
    history.add(1001.0, [(said([100, 100, 100]), said([104, 100, 101]))])
    history.add(1200.0, [(said([104, 100, 101]), said([2, 0, 0]))])  # restarted
    assert history.tokens() == {"decode-0": (6.0, 0.0, 1.0)}
    history.add(1305.0, [(said([2, 0, 0]), said([2, 0, 5]))])
    assert history.tokens() == {"decode-0": (2.0, 0.0, 5.0)}
    history.add(1700.0, [({}, said([1, 0], worker="decode-1"))])
    assert history.tokens() == {"decode-1": (1.0, 0.0)}, "of who has gone nothing is kept"


def test_what_is_remembered_is_bounded():
    history = ExpertHistory()
    wrong = {
        c.EXPERT_TOKENS.name: {(("expert", name), ("worker", "w")): 1.0 for name in ("x", "99999", "-1")}
    }
    for at_s in range(0, 4000, 5):
        history.add(float(at_s), [({}, said([1])), ({}, wrong)])
    assert history.tokens() == {"decode-0": (60.0,)}
    assert len(history._steps) == 30
    assert EXPERTS_MAX < 99999


def test_frames_of_hours_do_not_hold_every_expert():
    frame = frame_of(1.0, 1.0, [({}, said([1, 2], (0.5, 0.4)))])
    assert frame.gained.keys() & APART == set()
    assert frame.levels.keys() == {c.EXPERT_BALANCE.name}


def now(*balances):
    return frame_of(
        1.0, 1.0, [({}, said([], pair, worker=f"decode-{i}")) for i, pair in enumerate(balances) if pair]
    )


def test_workers_of_a_model_are_added_up_the_least_balanced_first():
    tokens = {"decode-0": (6.0, 2.0), "decode-1": (0.0, 24.0), "decode-2": (1.0, 1.0), "gone-0": (9.0, 9.0)}
    (group,) = expert_groups(
        state(decode_0="m", decode_1="m", decode_2="m", dense_0="d"),
        tokens,
        now((0.8, 0.6), (0.5, 0.3), None),
    )
    assert (group.model, group.expert_count) == ("m", 2)
    assert [row.name for row in group.workers] == ["decode-1", "decode-0", "decode-2"]
    assert [row.balance for row in group.workers] == [0.5, 0.8, None]
    assert group.total.tokens == (7.0, 27.0)
    assert group.total.balance == pytest.approx((0.8 * 8 + 0.5 * 24) / 32), "by the tokens of each"
    assert group.total.worst == 0.3
    assert group.workers[1].busiest == [(0, 1.5), (1, 0.5)]


def test_models_are_told_apart_and_dense_ones_are_not_there():
    tokens = {"a-0": (1.0, 1.0), "b-0": (1.0, 2.0, 3.0)}
    groups = expert_groups(state(a_0="a", b_0="b", d_0="dense"), tokens, None)
    assert [(g.model, g.expert_count) for g in groups] == [("a", 2), ("b", 3)]
    text = expert_balance(groups)
    assert "<h3>a</h3>" in text
    assert "<h3>" not in expert_balance(groups[:1])
    assert expert_groups(state(d_0="dense"), {}, None) == expert_groups(None, tokens, None) == []
    assert expert_balance([]) == ""


def one(counts, balance=None, name="decode-0"):
    return expert_groups(
        state(**{name.replace("-", "_"): "m"}), {name: tuple(map(float, counts))}, now(balance)
    )


def colors(drawing):
    """Return the colour of each expert in a drawing in which each has a cell or a bar of its own."""
    found = {}
    for number, path in re.findall(r'<path style="fill:var\(--e(\d)\)" d="([^"]*)"', drawing):
        found |= {int(at): int(number) for at in re.findall(r"M(\d+) ", path)}
    return [found[at] for at in sorted(found)]


def test_a_bar_and_a_cell_show_load_over_an_even_share():
    text = expert_balance(one([0, 100, 180, 180, 240, 300], (0.41, 0.0625)))
    bars, strip = re.findall(r"<svg.*?</svg>", text)
    even = 1000 / 6
    assert colors(bars) == colors(strip) == [0, 2, 3, 3, 4, 4]
    heights = [float(x) for x in re.findall(r"v-([\d.]+)h", bars)]
    assert sorted(heights) == pytest.approx(
        sorted(50 * n / even for n in (0, 100, 180, 180, 240, 300)), abs=0.1
    )
    assert 'class="even" d="M0 50.0H6"' in bars
    assert "<strong class=n>41 %</strong>" in text
    assert "6.2 %" in text
    assert "#5 1.8×, #4 1.4×, #2 1.1×" in text
    assert "100 % is even, 17 % means that all go to one of 6" in text
    assert len(legend()) == len(KEYS) == 7


def test_many_experts_are_drawn_without_gaps_in_few_paths():
    (strip,) = re.findall(r'<svg class="strip".*?</svg>', expert_balance(one([1.0] * 255 + [9.0])))
    assert 'd="M0 0h255v1h-255z"' in strip
    assert 'd="M255 0h1v1h-1z"' in strip


def test_nothing_routed_lately_is_said():
    text = expert_balance(one([0.0] * 8))
    assert "No token was routed in the last five minutes." in text
    assert "<strong class=n>–</strong>" in text


def test_more_workers_than_fit_are_counted():
    names = {f"decode_{i}": "m" for i in range(ROWS_MAX + 3)}
    tokens = {name.replace("_", "-"): (1.0, 2.0) for name in names}
    text = expert_balance(expert_groups(state(**names), tokens, None))
    assert text.count('class="strip"') == ROWS_MAX
    assert "3 workers with better balance not shown" in text


def test_names_never_become_html():
    tokens = {"<b>-0": (1.0, 1.0)}
    cluster = ClusterState(
        "life",
        (),
        (ReplicaStatus("n", "<i>", Role.DECODE, ReplicaState.RUNNING, 1.0, "1", WorkerId("<b>-0.a")),),
    )
    groups = expert_groups(cluster, tokens, None)
    text = expert_balance([*groups, *groups])
    assert "<b>" not in text
    assert "<i>" not in text.replace("<i>0</i>", "").replace("<i>1</i>", "").replace("<i>experts</i>", "")


@contextlib.contextmanager
def opened(setup, build):
    client = Client(page("/test"))
    try:
        with client:
            built = build(setup)
            built._shell.tick()
            yield built
    finally:
        client.delete()


PAGES = {
    "overview": (lambda w: OverviewPage(w.dash, w.request()), lambda p: (p._expert_card, p._experts)),
    "worker": (
        lambda w: WorkerPage(w.dash, w.request(), "decode-0"),
        lambda p: (p._expert_panel, p._experts),
    ),
}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("has_experts", [True, False])
async def test_the_card_is_there_for_a_model_with_experts_only(name, has_experts, monkeypatch):
    from nicegui import background_tasks

    monkeypatch.setattr(background_tasks, "create", lambda coroutine: coroutine.close())
    setup = DashboardSetup(Scope.VIEW)
    build, parts = PAGES[name]
    setup.show(state(decode_0="m"))
    looks = [({}, said([3, 1, 0, 0], (0.33, 0.3)) if has_experts else {})]
    setup.collector.experts.add(time.time(), looks)
    setup.collector.history.add(frame_of(time.time() + 1, 1.0, looks))
    with opened(setup, build) as built:
        frame, content = parts(built)
        assert frame.visible is has_experts
        assert ("worst layer" in content.content) is has_experts
        assert ("33 %" in content.content) is has_experts
    await setup.collector._control.close()


def test_a_balance_of_another_worker_is_not_taken_for_ones_own():
    (group,) = expert_groups(state(decode_1="m"), {"decode-1": (1.0,)}, now((0.9, 0.8)))
    assert (group.total.balance, group.total.worst) == (None, None)
    assert isinstance(now((0.9, 0.8)), MetricsFrame)
