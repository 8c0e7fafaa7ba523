"""Groups of expert ranks on the dashboard: their history, drawings and orders."""

import contextlib
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nicegui import background_tasks

from baton.config import Config
from baton.core.experts import ExpertRankPhase
from baton.core.messages import Role
from baton.core.operate import (
    ClusterState,
    DrainExpertRank,
    Pool,
    RebalanceExperts,
    ScaleExperts,
)
from baton.core.tokens import Scope
from baton.telemetry import catalogue as c
from control_plane.dashboard import expert_panels
from control_plane.dashboard.actions import ask_drain_rank, ask_rebalance, ask_scale_experts
from control_plane.dashboard.checks import checks
from control_plane.dashboard.expert_groups import (
    RATES_S,
    ExpertRankRates,
    RankRate,
    group_charts,
    group_table,
)
from control_plane.dashboard.experts_page import ExpertsPage
from control_plane.dashboard.pages import OverviewPage
from control_plane.dashboard.problems import troubles
from control_plane.dashboard.samples import MetricsFrame, frame_of
from tests.unit.control_plane.dashboard.test_pages import DashboardSetup, opened, shown
from tests.unit.control_plane.expert_groups import group, large, rank

NAME = (("group", "decode of m"),)
STARTING, LOST = ExpertRankPhase.STARTING, ExpertRankPhase.LOST


# --- over time --------------------------------------------------------------------------------------


def test_the_control_planes_state_is_read_like_a_scrape():
    frame = frame_of(2.0, 1.0, [(group_table([group()]), group_table([group(migrations=15, losses=2)]))])
    assert frame.gained[c.EXPERT_MIGRATIONS.name] == {NAME: 3.0}
    assert frame.gained[c.EXPERT_RANK_LOSSES.name] == {NAME: 1.0}
    assert frame.levels[c.EXPERT_RANKS.name] == {(*NAME, ("phase", "ready")): 4.0}
    assert frame.levels[c.EXPERT_RANK_BALANCE.name][(*NAME, ("layers", "worst"))] == 0.74
    assert frame.levels[c.MISSING_EXPERTS.name] == {NAME: 0.0}
    again = frame_of(2.0, 1.0, [(group_table([group()]), group_table([group(migrations=2)]))])
    assert again.gained[c.EXPERT_MIGRATIONS.name] == {NAME: 2.0}, "the control plane started anew"


def test_single_ranks_are_not_kept_for_hours():
    table = group_table([large()])
    assert sum(len(values) for values in table.values()) < 20


def test_charts_show_one_group_and_nothing_of_times_without_it():
    other = group(role=Role.PREFILL, balance=0.1)
    before, now = group_table([other]), group_table([other, group(losses=3)])
    points = [None, frame_of(1.0, 1.0, [({}, before)]), frame_of(2.0, 2.0, [(before, now)])]
    found = group_charts([0.0, 1.0, 3.0], points, "decode of m")

    def values(chart, line):
        (series,) = [s for s in found[chart]["series"] if s["name"] == line]
        return [value for _, value in series["data"]]

    assert values("balance", "mean of layers") == [None, None, 0.91]
    assert values("balance", "worst layer") == [None, None, 0.74]
    assert values("ranks", "ready") == values("ranks", "wanted") == [None, None, 4.0]
    assert values("events", "ranks lost") == [None, 0.0, 3.0]
    assert values("migrations", "migrated") == [None, 0.0, pytest.approx(6 * 2**20, rel=1e-3)]
    assert found["balance"]["yAxis"]["max"] == 1.0


def test_rates_are_those_of_the_last_seconds_and_of_one_life():
    rates = ExpertRankRates()
    assert rates.rates() == {}
    rates.add(100.0, [group(rank(0, rows=0, busy_s=0.0))])
    assert rates.rates() == {}
    rates.add(104.0, [group(rank(0, rows=400, busy_s=1.0), rank(1, rows=50))])
    assert rates.rates() == {"experts-decode-0.a": RankRate(100.0, 0.25)}
    rates.add(108.0, [group(rank(0, rows=400, busy_s=1.0), rank(1, life="b", rows=7))])
    assert rates.rates() == {"experts-decode-0.a": RankRate(50.0, 0.125)}
    for at_s in (112.0, 116.0, 120.0):
        rates.add(at_s, [group(rank(0, rows=400, busy_s=1.0))])
    assert rates.rates() == {"experts-decode-0.a": RankRate(0.0, 0.0)}
    rates.add(121.0, [])
    assert rates.rates() == {}


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 3), st.integers(0, 10**6)), max_size=60))
def test_looks_are_bounded_and_rates_are_never_negative(steps):
    rates, at_s = ExpertRankRates(), 0.0
    for wait_s, number, rows in steps:
        at_s += wait_s
        rates.add(at_s, [group(rank(number, rows=rows, busy_s=rows / 7))])
        found = rates.rates()
        assert all(r.rows_per_s >= 0 and 0 <= r.busy <= 1 for r in found.values())
        assert all(look[0] > at_s - RATES_S for look in list(rates._looks)[1:])


# --- drawings ---------------------------------------------------------------------------------------


def cells(drawing, color):
    """Return the (layer, expert) of every cell with this colour."""
    found = set()
    for path in re.findall(rf'<path style="fill:var\(--{color}\)" d="([^"]*)"', drawing):
        for begin, layer, count in re.findall(r"M(\d+) (\d+)h(\d+)v", path):
            found |= {(int(layer), int(begin) + i) for i in range(int(count))}
    return found


def maps(made):
    return re.findall(r"<svg.*?</svg>", expert_panels.experts(made))


@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_every_expert_has_one_cell_with_the_colour_of_its_replicas(layer_count, expert_count, data):
    total = layer_count * expert_count
    replicas = data.draw(st.lists(st.integers(0, 9), min_size=total, max_size=total))
    made = group(
        layer_count=layer_count,
        expert_count=expert_count,
        expert_replicas=tuple(replicas),
        expert_loads=(1.0,) * total,
    )
    drawn, _ = maps(made)
    for number, color in enumerate(expert_panels.REPLICA_COLORS):
        is_last = number == len(expert_panels.REPLICA_COLORS) - 1
        wanted = {
            divmod(i, expert_count) for i, n in enumerate(replicas) if n == number or (is_last and n > number)
        }
        assert cells(drawn, color) == wanted


def test_the_load_of_an_expert_is_its_multiple_of_an_even_share_of_its_layer():
    loads = (100.0, 100.0, 100.0, 0.0, 0.1, 0.1, 0.9, 0.1)
    _, drawn = maps(group(layer_count=2, expert_count=4, expert_loads=loads, expert_replicas=(1,) * 8))
    assert cells(drawn, "e4") == {(0, 0), (0, 1), (0, 2)}
    assert cells(drawn, "e0") == {(0, 3)}
    assert cells(drawn, "e5") == {(1, 2)}
    assert cells(drawn, "e1") == {(1, 0), (1, 1), (1, 3)}
    assert "the busiest: layer 1 expert 2 3×" in expert_panels.experts(
        group(layer_count=2, expert_count=4, expert_loads=loads, expert_replicas=(1,) * 8)
    )


def test_a_large_group_is_described_and_its_drawing_stays_small():
    made = large(missing=3, single=14_000)
    text = expert_panels.experts(made)
    assert "58 layers of 256 experts are too many to draw" in text
    assert "3 of 14,848 experts have no replica, 14,000 have one and 845 have several" in text
    assert len(expert_panels.ranks(made, {}, may_operate=True)) < 40_000
    full = group(
        layer_count=16,
        expert_count=256,
        expert_replicas=tuple(i % 5 for i in range(4096)),
        expert_loads=tuple(float(i % 11) for i in range(4096)),
    )
    assert len(expert_panels.experts(full)) < 200_000


def test_a_group_that_has_said_nothing_yet_is_drawn():
    made = group(rank(0, STARTING), layer_count=0, expert_count=0, expert_replicas=(), expert_loads=())
    assert "No rank has said yet" in expert_panels.experts(made)
    nobody = msgspec.structs.replace(made, ranks=(), wanted_ranks=2)
    assert "No rank of this group has started yet" in expert_panels.ranks(nobody, {}, may_operate=True)
    assert "0 of 2" in expert_panels.figures(nobody)


def test_ranks_show_phase_load_rows_and_where_they_are():
    ranks = (rank(0, load=0.5), rank(1, LOST, load=0.0, node="f" * 40, held=0), rank(2, loading=6))
    made = group(*ranks)
    text = expert_panels.ranks(made, {ranks[0].rank_id: RankRate(1234.0, 0.5)}, may_operate=True)
    rows = re.findall(r"<tr>(?!<th).*?</tr>", text)
    assert len(rows) == 3
    for words in ("experts-decode-0", "ready", "1.5×", "1\u202f234/s", "50 %", "80", "host-0"):
        assert words in rows[0], words
    assert '<span class="tag bad">lost</span>' in rows[1]
    assert "ffffffffffff host-1" in rows[1]
    assert "Drain…" not in rows[1], "there is nothing to drain"
    assert "64 + 6" in rows[2]
    assert "–" in rows[2], "rows of a rank that was seen once only"
    assert 'href="/experts?ask=drain&amp;rank=experts-decode-2"' in rows[2]
    assert "Drain…" not in expert_panels.ranks(made, {}, may_operate=False)


def test_of_many_ranks_those_that_need_attention_are_in_the_table():
    ranks = list(large().ranks)
    ranks[40] = msgspec.structs.replace(ranks[40], phase=STARTING)
    text = expert_panels.ranks(large(ranks=tuple(ranks)), {}, may_operate=True)
    rows = re.findall(r"<tr>(?!<th).*?</tr>", text)
    assert len(rows) == expert_panels.RANKS_SHOWN
    assert "experts-decode-40" in rows[0]
    assert "48 ranks less busy: all ready, 1 to 1× an even share" in text
    (bars,) = re.findall(r"<svg.*?</svg>", text)
    assert 'viewBox="0 0 72 100"' in bars, "all ranks have a bar"


EVIL = "<img src=x onerror=alert(1)>\"'&"


def test_names_never_become_html():
    made = group(
        rank(0, node=EVIL, host=EVIL), model=EVIL, expert_replicas=(1,) * 256, expert_loads=(1.0,) * 256
    )
    made = msgspec.structs.replace(
        made, ranks=tuple(msgspec.structs.replace(r, name=EVIL, rank_id=EVIL) for r in made.ranks)
    )
    parts = (
        expert_panels.summaries([made]),
        expert_panels.figures(made),
        expert_panels.ranks(made, {}, may_operate=True),
        expert_panels.experts(made),
    )
    assert "<img" not in "".join(parts)


# --- problems and checks ----------------------------------------------------------------------------


def state(*groups):
    return ClusterState("life", (Pool("m", {Role.DECODE: 1}),), (), experts=groups)


def texts(*groups):
    found = troubles(state(*groups), None, control="", silent_s=0.0, unreadable=())
    return [f"{one.level}: {one.text}" for one in found if "router" not in one.text]


def test_problems_name_missing_experts_and_ranks():
    assert texts(group()) == []
    assert texts(group(missing=1)) == [
        "bad: No expert rank of decode of m holds 1 expert: sequences that need them wait."
    ]
    assert texts(group(rank(0), rank(1, STARTING))) == ["warn: decode of m: 1 of 2 expert ranks are ready."]


def test_parked_workers_are_a_problem():
    levels = {"baton_parked_workers": {(("worker", "decode-0"),): 1.0, (("worker", "decode-1"),): 0.0}}
    now = MetricsFrame(0.0, 5.0, {}, levels)
    found = troubles(state(group()), now, control="", silent_s=0.0, unreadable=())
    assert [one.text for one in found if "parked" in one.text] == [
        "1 worker parked: no expert rank has what the sequences there need."
    ]


@pytest.mark.parametrize(
    ("fields", "verdict", "says"),
    [
        ({}, "on", "4 ranks computed 6\u202f000 rows"),
        ({"callers": 0}, "bad", "no worker uses its expert ranks: decode of m"),
        ({"is_ready": False}, "bad", "experts without a replica: decode of m"),
    ],
)
def test_the_check_is_on_when_ranks_are_seen_to_compute(fields, verdict, says):
    past = MetricsFrame(0.0, 60.0, {}, {})
    (found,) = [one for one in checks(Config(), state(group(**fields)), past) if one.name == "Expert ranks"]
    assert (found.verdict, found.text) == (verdict, says)
    unused = group(rank(0, rows=0))
    (found,) = [one for one in checks(Config(), state(unused), past) if one.name == "Expert ranks"]
    assert found.verdict == "idle"
    assert "Expert ranks" not in [one.name for one in checks(Config(), state(), past)]


# --- pages and orders -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_runs_by_itself(monkeypatch):
    monkeypatch.setattr(background_tasks, "create", lambda coroutine: coroutine.close())


@contextlib.asynccontextmanager
async def dashboard(scope, *groups):
    setup = DashboardSetup(scope)
    setup.show(state(*groups), seen=False)
    try:
        yield setup
    finally:
        await setup.collector._control.close()


@pytest.mark.parametrize("groups", [(), (group(),), (group(), group(role=Role.PREFILL)), (large(),)])
async def test_the_page_shows_each_group(groups):
    async with dashboard(Scope.OPERATE, *groups) as setup:
        with opened() as client:
            built = ExpertsPage(setup.dash, setup.request())
            built._shell.tick()
            text = shown(client)
        assert built._none.visible is (not groups)
        assert text.count("Rebalance…") == text.count("<h2>Group: ") == len(groups)
        assert ("are too many to draw" in text) is (groups == (large(),))
        for one in groups:
            assert f"<h2>Group: {one.group}</h2>" in text


async def test_the_page_follows_groups_that_come_and_go():
    async with dashboard(Scope.OPERATE) as setup:
        with opened() as client:
            built = ExpertsPage(setup.dash, setup.request())
            for groups in ((group(),), (), (group(role=Role.PREFILL), group())):
                setup.collector.state = state(*groups)
                built._shell.tick()
                text = shown(client)
                assert [one.group in text for one in (group(), group(role=Role.PREFILL))] == [
                    any(found.group == one.group for found in groups)
                    for one in (group(), group(role=Role.PREFILL))
                ]


async def test_losses_reach_the_page_and_the_bar_of_problems():
    async with dashboard(Scope.VIEW, group()) as setup:
        with opened() as client:
            built = ExpertsPage(setup.dash, setup.request())
            built._shell.tick()
            assert "lost" not in re.sub(r"ranks lost", "", shown(client))
            setup.collector.state = state(group(rank(0), rank(1, LOST), missing=5, losses=2))
            built._shell.tick()
            text = shown(client)
        assert '<span class="tag bad">lost</span>' in text
        assert "No expert rank of decode of m holds 5 experts" in text
        assert "Drain…" not in text
        assert "Rebalance…" not in text


async def test_the_overview_has_a_line_for_each_group():
    async with dashboard(Scope.VIEW, group(), group(role=Role.PREFILL, missing=4)) as setup:
        with opened():
            built = OverviewPage(setup.dash, setup.request())
            built._shell.tick()
            assert built._expert_card.visible
            content = built._experts.content
        assert content.count('href="/experts"') == 2
        assert '<span class="tag bad">4</span>' in content


async def test_a_scrape_of_the_cluster_brings_history_and_rates(monkeypatch):
    async with dashboard(Scope.VIEW, group(rank(0, rows=100))) as setup:
        collector = setup.collector
        times = iter((1.0, 2.0, 2.0, 3.0, 4.0, 4.0))
        monkeypatch.setattr(collector, "_now_s", lambda: next(times, 9.0))
        await collector._scrape_all(None)
        collector.state = state(group(rank(0, rows=300), migrations=20))
        await collector._scrape_all(None)
        (found,) = collector.rank_rates.rates().values()
        assert found.rows_per_s > 0
        assert collector.history.latest.gained[c.EXPERT_MIGRATIONS.name] == {NAME: 8.0}


ORDERS = {
    "rebalance": (lambda shell, g: ask_rebalance(shell, g), RebalanceExperts("decode of m")),
    "drain": (lambda shell, g: ask_drain_rank(shell, g.ranks[2]), DrainExpertRank("experts-decode-2")),
    "scale": (lambda shell, g: ask_scale_experts(shell, g), ScaleExperts(4, "decode of m")),
}


@pytest.mark.parametrize("name", ORDERS)
async def test_an_order_is_given_once_it_is_confirmed_and_names_who(name, monkeypatch):
    ask, action = ORDERS[name]
    async with dashboard(Scope.OPERATE, group()) as setup:
        with opened() as client:
            built = ExpertsPage(setup.dash, setup.request())
            monkeypatch.setattr(setup.collector, "order", setup.order)
            asked = ask(built._shell, group())
            assert setup.ordered == []
            asked.dry.set_value(True)
            await asked.send()
            asked.dry.set_value(False)
            await asked.send()
            assert [(o.action, o.is_advice, o.who) for o in setup.ordered] == [
                (action, True, "dashboard ada"),
                (action, False, "dashboard ada"),
            ]
            assert "#8 accepted: on its way" in shown(client)


@pytest.mark.parametrize("name", ORDERS)
async def test_who_may_only_look_orders_nothing(name, monkeypatch):
    ask, _ = ORDERS[name]
    async with dashboard(Scope.VIEW, group()) as setup:
        with opened() as client:
            built = ExpertsPage(setup.dash, setup.request("ask=drain&rank=experts-decode-1"))
            monkeypatch.setattr(setup.collector, "order", setup.order)
            await ask(built._shell, group()).send()
            assert setup.ordered == []
            assert "allows viewing only" in shown(client)


async def test_the_link_of_a_ranks_row_opens_its_dialog():
    async with dashboard(Scope.OPERATE, group()) as setup:
        with opened() as client:
            ExpertsPage(setup.dash, setup.request())
            (link,) = set(re.findall(r'href="/experts\?(ask=drain&amp;rank=\S*-3)"', shown(client)))
        with opened() as client:
            ExpertsPage(setup.dash, setup.request(link.replace("&amp;", "&")))
            assert "Drain experts-decode-3?" in shown(client)
        with opened() as client:
            ExpertsPage(setup.dash, setup.request("ask=drain&rank=walrus"))
            assert "Reason (kept in the log)" not in shown(client)
