"""The drivers of all models of a router, for what concerns every one of them."""

from collections.abc import Iterable, Mapping

from baton.core.ids import RouterId
from baton.core.sharing import ExpectedBlocks, RouterUpdate, UnreportedLoad
from router.decisions.events import RouterEvent
from router.decisions.peer_loads import PeerBook
from router.live.driver import Driver


class Drivers:
    """The drivers by the model's name. A worker serves one model, so events about workers may go to all
    drivers: those that do not know the worker ignore them."""

    def __init__(self, by_model: Mapping[str, Driver]) -> None:
        assert by_model, "a router has a model"
        self._by_model = dict(by_model)

    def of(self, model: str) -> Driver | None:
        return self._by_model.get(model)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_model)

    @property
    def all(self) -> tuple[Driver, ...]:
        return tuple(self._by_model.values())

    @property
    def in_flight_count(self) -> int:
        return sum(driver.in_flight_count for driver in self.all)

    @property
    def peers(self) -> "PeerBooks":
        return PeerBooks([driver.peers for driver in self.all])

    def feed(self, event: RouterEvent) -> None:
        """Pass an event about workers or other routers to every driver."""
        for driver in self.all:
            driver.feed(event)

    def crash(self, error: BaseException) -> None:
        """End the router, see `Driver.crash`."""
        self.all[0].crash(error)

    def fail_all(self, message: str) -> None:
        for driver in self.all:
            driver.fail_all(message)


class PeerBooks:
    """The load reports to other routers over all models of this one, see `PeerBook`."""

    def __init__(self, books: Iterable[PeerBook]) -> None:
        self._books = tuple(books)

    def __contains__(self, router_id: RouterId) -> bool:
        return all(router_id in book for book in self._books)

    def snapshot(self, router_id: RouterId) -> RouterUpdate:
        return _merged(router_id, [book.snapshot(router_id) for book in self._books], is_snapshot=True)

    def changes(self, router_id: RouterId) -> RouterUpdate | None:
        found = [book.changes(router_id) for book in self._books]
        updates = [update for update in found if update is not None]
        return _merged(router_id, updates, is_snapshot=False) if updates else None

    def listen(self, *, is_followed: bool) -> None:
        for book in self._books:
            book.listen(is_followed=is_followed)


def _merged(router_id: RouterId, updates: Iterable[RouterUpdate], *, is_snapshot: bool) -> RouterUpdate:
    loads: list[UnreportedLoad] = []
    expected: list[ExpectedBlocks] = []
    for update in updates:
        loads += update.loads
        expected += update.expected
    return RouterUpdate(router_id, is_snapshot=is_snapshot, loads=tuple(loads), expected=tuple(expected))
