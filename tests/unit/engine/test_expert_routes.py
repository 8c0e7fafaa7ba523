"""Epochs of the maps that a caller uses, as it reports them."""

from baton.core.experts import ExpertEpochUsed, ExpertMapRank, ExpertMapUpdate, ExpertRankRef
from baton.core.ids import ExpertRankId
from engine.scheduling.expert_routes import ExpertRoutes


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
