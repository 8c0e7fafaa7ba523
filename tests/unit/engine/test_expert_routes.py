"""Epochs of the maps that a caller uses, as it reports them, and connections that end."""

from baton.core.experts import (
    ExpertEpochUsed,
    ExpertMapRank,
    ExpertMapUpdate,
    ExpertRankRef,
    ExpertRankSuspected,
)
from baton.core.ids import ExpertRankId
from engine.scheduling.expert_routes import CloseExpertRank, ConnectExpertRank, ExpertRoutes


def update(epoch: int, *experts: tuple[int, ...]) -> ExpertMapUpdate:
    ranks = tuple(
        ExpertMapRank(ExpertRankRef(ExpertRankId(f"r{number}"), "h", "@s", "", "s"), held)
        for number, held in enumerate(experts)
    )
    return ExpertMapUpdate(epoch, 1, 4, ranks)


def reported(actions) -> list[int]:
    return [one.epoch for one in actions if isinstance(one, ExpertEpochUsed)]


def test_an_older_map_is_in_use_until_its_dispatches_end():
    routes = ExpertRoutes(1, 4)
    assert reported(routes.on_map(update(1, (0, 1), (2, 3)), now_s=0.0)) == [1]
    first, second = routes.on_dispatch(), routes.on_dispatch()
    assert reported(routes.on_map(update(2, (0, 1), (2,)), now_s=1.0)) == []
    assert reported(routes.on_dispatched(first)) == []
    assert reported(routes.on_dispatched(second)) == [2]


def test_rows_that_wait_for_a_rank_hold_no_older_map():
    """The expert that they wait for may be loaded into the memory of what only the older map names."""
    routes = ExpertRoutes(1, 4)
    routes.on_map(update(1, (0, 1), (2, 3)), now_s=0.0)
    waiting, other = routes.on_dispatch(), routes.on_dispatch()
    routes.on_map(update(2, (0, 1)), now_s=1.0)
    waiting, actions = routes.on_waiting(waiting)
    assert (waiting, reported(actions)) == (2, [])  # the other one is under way by the first map
    other, actions = routes.on_waiting(other)
    assert (other, reported(actions)) == (2, [2])
    assert routes.on_waiting(other) == (2, [])
    routes.on_map(update(3, (0, 1), (2, 3)), now_s=2.0)
    assert reported(routes.on_dispatched(waiting)) == []
    assert reported(routes.on_dispatched(other)) == [3]


def connected(*experts: tuple[int, ...]) -> tuple[ExpertRoutes, list[int]]:
    """Routes whose ranks are all connected, and their links."""
    routes = ExpertRoutes(1, 4, retry_s=0.4)
    actions = routes.on_map(update(1, *experts), now_s=0.0)
    links = [one.link for one in actions if isinstance(one, ConnectExpertRank)]
    for number, link in enumerate(links):
        routes.on_connected(ExpertRankId(f"r{number}"), link)
    return routes, links


R0 = ExpertRankId("r0")


def ended(routes, link: int, *, now_s: float, is_gone: bool = True):
    """What follows from a failure of r0, as the links that it closes, those it makes, and the suspicions."""
    actions = routes.on_failed(R0, link, "it broke", is_gone=is_gone, now_s=now_s)
    kinds = (CloseExpertRank, ConnectExpertRank, ExpertRankSuspected)
    return [[one for one in actions if isinstance(one, kind)] for kind in kinds]


def test_a_connection_that_ends_is_made_anew_once_before_its_rank_is_suspected():
    routes, links = connected((0, 1), (0, 1, 2, 3))
    closed, made, suspected = ended(routes, links[0], now_s=1.0)
    assert ([one.link for one in closed], len(made), suspected) == ([links[0]], 1, [])
    assert links[0] not in routes.table.links.tolist()  # its rows go to the other replica meanwhile
    routes.on_connected(R0, made[0].link)
    assert made[0].link in routes.table.links.tolist()
    assert routes.tick(now_s=9.0) == []
    again = ended(routes, made[0].link, now_s=9.0)[1]
    routes.on_connected(R0, again[0].link)
    _, made, suspected = ended(routes, again[0].link, now_s=9.5)  # it ends again at once
    assert (made, [one.is_gone for one in suspected]) == ([], [False])


def test_a_rank_whose_process_has_ended_is_suspected_when_it_cannot_be_reached():
    routes, links = connected((0, 1), (0, 1, 2, 3))
    made = ended(routes, links[0], now_s=1.0)[1]
    suspected = ended(routes, made[0].link, now_s=1.01)[2]
    assert [one.is_gone for one in suspected] == [True]
    assert routes.suspected == (R0,)


def test_a_rank_that_does_not_answer_the_second_connection_is_suspected_at_the_deadline():
    routes, links = connected((0, 1), (0, 1, 2, 3))
    made = ended(routes, links[0], now_s=1.0)[1]
    assert routes.next_tick_s == 1.4
    assert routes.tick(now_s=1.3) == []
    closed, suspected = routes.tick(now_s=1.4)
    assert closed == CloseExpertRank(made[0].link, R0)
    assert (suspected.rank_id, suspected.is_gone) == (R0, False)
    routes.on_connected(R0, made[0].link)  # too late
    assert routes.suspected == (R0,)


def test_a_silent_rank_is_suspected_at_once():
    routes, links = connected((0, 1), (0, 1, 2, 3))
    _, made, suspected = ended(routes, links[0], now_s=1.0, is_gone=False)
    assert (made, len(suspected)) == ([], 1)
