import gc
from collections.abc import Iterator

import pytest

from baton.core import garbage


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins with nothing spared, and ends with what the others' run spares."""
    thresholds = gc.get_threshold()
    monkeypatch.setattr(garbage, "_only_imports", False)
    gc.unfreeze()
    yield
    gc.set_threshold(*thresholds)
    gc.collect()
    gc.freeze()


class Knot:
    """Two that know each other are freed by the collector only."""

    count = 0

    def __init__(self) -> None:
        self.other: Knot | None = None
        Knot.count += 1

    def __del__(self) -> None:
        Knot.count -= 1


def tie() -> None:
    a, b = Knot(), Knot()
    a.other, b.other = b, a


def test_what_is_there_is_not_looked_through_again_and_what_comes_later_is() -> None:
    kept = [[number] for number in range(1000)]
    garbage.spare_what_stays()
    looked_at = {id(one) for one in gc.get_objects()}
    assert not looked_at & {id(one) for one in kept}
    tie()
    assert Knot.count == 2
    gc.collect()
    assert Knot.count == 0


def test_garbage_of_the_start_is_freed_and_not_kept_for_ever() -> None:
    tie()
    garbage.spare_what_stays()
    assert Knot.count == 0


def test_circles_are_found_without_asking() -> None:
    garbage.spare_what_stays()
    for _ in range(2 * garbage.THRESHOLDS[0]):
        tie()
    assert Knot.count < 2 * garbage.THRESHOLDS[0]


def test_for_a_while_only_even_where_it_fails() -> None:
    before = gc.get_threshold()

    def fail() -> None:
        with garbage.spared((7_000, 5, 5)):
            assert gc.get_threshold() == (7_000, 5, 5)
            assert gc.get_freeze_count() > 0
            raise ValueError("ended")

    with pytest.raises(ValueError, match="ended"):
        fail()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_what_a_process_spares_for_good_is_spared_after_such_a_while_too() -> None:
    kept = [[number] for number in range(1000)]
    garbage.spare_what_stays()
    with garbage.spared((7_000, 5, 5)):
        assert gc.get_threshold() == (7_000, 5, 5)
        tie()
    assert gc.get_threshold() == garbage.THRESHOLDS
    assert not {id(one) for one in gc.get_objects()} & {id(one) for one in kept}
    gc.collect()
    assert Knot.count == 0


def test_imports_are_not_collected_and_are_spared_afterwards() -> None:
    collected: list[str] = []

    def note(phase: str, _: object) -> None:
        collected.append(phase)

    gc.callbacks.append(note)
    try:
        with garbage.uncollected():
            with garbage.uncollected():
                kept = [[number] for number in range(2 * garbage.THRESHOLDS[0])]
            assert not gc.isenabled()  # the inner one leaves the end to the outer one
        assert collected == []
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert not {id(one) for one in gc.get_objects()} & {id(one) for one in kept}


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), garbage.uncollected():
        raise ImportError
    assert gc.isenabled()


def test_imports_that_are_spared_do_not_keep_a_while_from_being_spared() -> None:
    with garbage.uncollected():
        pass
    kept = [[number] for number in range(1000)]
    with garbage.spared():
        with garbage.spared():
            pass
        assert not {id(one) for one in gc.get_objects()} & {id(one) for one in kept}
    assert {id(one) for one in gc.get_objects()} >= {id(one) for one in kept}
