"""The choice of the layers that are streamed."""

import itertools

import pytest

from baton.core.errors import SetupError
from engine.model_files.offload_setting import check_offload
from engine.offload.choice import Room, WeightSizes, estimate, spread, streamed_layers

MIB = 2**20
WIDE = Room(2**50, "this machine", is_hard=False)


def room(mib: int, *, is_hard: bool = True) -> Room:
    return Room(mib * MIB, "the limit", is_hard=is_hard)


def sizes(*layers: int, rest: int = 0) -> WeightSizes:
    return WeightSizes(tuple(size * MIB for size in layers), rest * MIB)


def chosen(
    offload: str, model: WeightSizes, left: Room, *, layers: range | None = None, of: int = 0
) -> list[int]:
    layers = layers or range(len(model.layers))
    return sorted(streamed_layers(offload, layers, of or len(layers), model, left))


@pytest.mark.parametrize("layer_count", [3, 7, 24])
def test_layers_are_spread_evenly(layer_count: int) -> None:
    for count in range(layer_count + 1):
        layers = sorted(spread(count, layer_count))
        assert len(layers) == count
        gaps = {b - a for a, b in itertools.pairwise(layers)}
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_stages_stream_their_parts_of_what_the_model_streams() -> None:
    model = sizes(*[1] * 4)
    first = chosen("6", model, WIDE, layers=range(4), of=8)
    second = chosen("6", model, WIDE, layers=range(4, 8), of=8)
    assert set(first) | set(second) == spread(6, 8)
    assert len(first) == len(second) == 3


def test_a_stage_with_two_of_them_keeps_both() -> None:
    """Two buffers would hold them for good."""
    assert chosen("4", sizes(*[1] * 4), WIDE, layers=range(4), of=8) == []


@pytest.mark.parametrize("count", [1, 2])
def test_a_number_that_saves_nothing_is_refused(count: int) -> None:
    with pytest.raises(SetupError, match=rf"model.offload={count} saves no memory.*at least 3"):
        check_offload(str(count), 24)


def test_more_layers_than_there_are_are_refused() -> None:
    check_offload("24", 24)
    with pytest.raises(SetupError, match=r"model.offload=25: the model has 24 layers"):
        check_offload("25", 24)


def test_auto_streams_nothing_where_everything_fits() -> None:
    assert chosen("auto", sizes(*[10] * 8), room(200)) == []


def test_auto_streams_as_few_as_memory_demands() -> None:
    """Five of eight: two resident layers beside the first, which is in memory, two buffers, and the head take
    50 MiB of the 54 that are not kept free."""
    assert len(chosen("auto", sizes(*[10] * 8, rest=10), room(60))) == 5


def test_auto_streams_all_where_little_is_left_and_nothing_is_hard() -> None:
    assert chosen("auto", sizes(*[10] * 8), room(1, is_hard=False)) == list(range(8))


@pytest.mark.parametrize(
    ("offload", "needed", "told"), [("0", 80, ""), ("4", 60, " with 4 of 8 layers"), ("all", 20, " with 8")]
)
def test_weights_that_a_hard_limit_forbids_are_refused(offload: str, needed: int, told: str) -> None:
    """The text says what to do. `auto` is refused only where all layers streamed are too many."""
    model = sizes(*[10] * 8, rest=10)
    chosen(offload, model, room(needed))
    with pytest.raises(SetupError, match=rf"{needed} MiB more{told}.*the limit.*auto.*engine.shape"):
        chosen(offload, model, room(needed - 1))
    if offload == "all":
        with pytest.raises(SetupError, match="with 8 of 8 layers"):
            chosen("auto", model, room(needed - 1))


def test_other_layers_are_estimated_by_what_files_hold_of_them() -> None:
    """Layer 2 is a layer of experts; this rank has it and the next one at half their bytes in the files."""
    found = estimate({0: 10, 1: 10, 2: 100, 3: 120}, range(2, 4), 50, 7)
    assert found == WeightSizes((50, 60), 7)


def test_files_that_name_no_layers_make_all_alike() -> None:
    assert estimate({}, range(3), 50, 0) == WeightSizes((50, 50, 50), 0)
