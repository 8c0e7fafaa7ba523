"""The choice of the layers that stay off the device, without torch or IO.

They are spread evenly over the model: a streamed layer is read while those before it compute, which takes
longer where resident layers are among them. Two buffers hold the layers that compute and come next, so
streaming less than three layers would save nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.errors import SetupError
from engine.model_files.offload_setting import BUFFERS

RESERVE_SHARE = 0.1
"""Part of the memory for weights that `auto` leaves free, for activations and what libraries take."""
MEMORY_ADVICE = (
    "set model.offload to auto or to a number of layers, divide the model over more ranks (engine.shape), or "
    "quantise it (model.quantization)"
)


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that a rank may still take."""

    byte_count: int
    limit: str
    """What sets it, for people."""
    is_hard: bool
    """The system refuses more, or ends the process."""
    reserve: int = 0
    """What `auto` leaves free of it besides its share."""


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes of a rank's weights in the form in which kernels use them. All but the first layer are estimated
    from what the files hold of them."""

    layers: tuple[int, ...]
    rest: int
    """What is read after the layers."""


def estimate(stored: Mapping[int, int], layers: range, first_bytes: int, rest: int) -> WeightSizes:
    """stored: bytes that the files have of each layer of the model. first_bytes: of the first of `layers`, as
    it is in memory."""
    first_stored = stored.get(layers.start, 0)
    ratio = first_bytes / first_stored if first_stored else 0.0
    sizes = (round(stored.get(layer, 0) * ratio) or first_bytes for layer in layers)
    return WeightSizes(tuple(sizes), rest)


def spread(count: int, layer_count: int) -> frozenset[int]:
    """So many of the layers, evenly."""
    return frozenset(
        i for i in range(layer_count) if (i + 1) * count // layer_count > i * count // layer_count
    )


def streamed_layers(
    offload: str, layers: range, layer_count: int, sizes: WeightSizes, room: Room
) -> frozenset[int]:
    """The layers of this rank that are streamed. layers: those that it has, of the model's `layer_count`.
    sizes: of its layers; room: after the first of them was read.

    Raises SetupError: the weights need more than a hard limit leaves.
    """
    if offload == "auto":
        chosen = _fitting(layers, sizes, room)
    else:
        count = layer_count if offload == "all" else int(offload)
        whole = spread(count, layer_count)
        chosen = frozenset(layer for layer in layers if layer in whole)
    chosen = frozenset() if len(chosen) <= BUFFERS else chosen
    needed = _needed(chosen, layers, sizes)
    if room.is_hard and needed > room.byte_count:
        streamed = f" with {len(chosen)} of {len(layers)} layers streamed" if chosen else ""
        raise SetupError(
            f"the weights of this rank need {_mib(needed)} more{streamed}, and {room.limit} leaves "
            f"{_mib(room.byte_count)}: {MEMORY_ADVICE}"
        )
    return chosen


def _fitting(layers: range, sizes: WeightSizes, room: Room) -> frozenset[int]:
    """The fewest layers whose streaming makes the rest fit; all if none does."""
    allowed = room.byte_count * (1 - RESERVE_SHARE) - room.reserve
    for count in (0, *range(BUFFERS + 1, len(layers) + 1)):
        chosen = frozenset(layers.start + i for i in spread(count, len(layers)))
        if _needed(chosen, layers, sizes) <= allowed:
            return chosen
    return frozenset(layers)


def _needed(chosen: frozenset[int], layers: range, sizes: WeightSizes) -> int:
    """Bytes beside the first layer, which is in memory already."""
    kept = sum(size for layer, size in zip(layers, sizes.layers, strict=True) if layer not in chosen)
    streamed = [size for layer, size in zip(layers, sizes.layers, strict=True) if layer in chosen]
    return kept + BUFFERS * max(streamed, default=0) + sizes.rest - sizes.layers[0]


def _mib(byte_count: int) -> str:
    return f"{byte_count / 2**20:,.0f} MiB"
