"""The policies that configuration chooses from: one table for placement, one for eviction.

A row is a name, where the policy is made, and one line for people. Configuration takes its choices from here,
and so do `baton config`, the chart's schema, benches and simulators. A policy of one's own is one file and
one row. Factories are named and not imported, since they live in rooms that stand on this one."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class PlacementEntry(NamedTuple):
    name: str
    factory: str
    """module:callable; takes `PolicyTools` and makes a `PlacementPolicy`."""
    description: str
    predicts: bool = False
    """Its placements carry a forecast: admission decides by it, and while predictions are not to be trusted
    `cached_prefix` places in its stead."""


class EvictionEntry(NamedTuple):
    name: str
    factory: str
    """module:callable; takes a tier's capacity in blocks and makes an `EvictionPolicy`."""
    description: str


_PLACEMENT = "router.decisions.placement"
_TIERS = "kv_store.tiers"

DEFAULT_PLACEMENT = "slo"
DEFAULT_EVICTION = "serving"

PLACEMENT_POLICIES: Mapping[str, PlacementEntry] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            PlacementEntry(
                "slo",
                f"{_PLACEMENT}.slo:SloPolicy",
                "by predicted seconds, so that the objectives of most requests hold",
                predicts=True,
            ),
            PlacementEntry(
                "cached_prefix",
                f"{_PLACEMENT}.cached_prefix:cached_prefix",
                "longest cached prefix under a load bound",
            ),
            PlacementEntry("least_loaded", f"{_PLACEMENT}.baselines:least_loaded", "least load"),
            PlacementEntry("round_robin", f"{_PLACEMENT}.baselines:round_robin", "taking turns"),
            PlacementEntry("random", f"{_PLACEMENT}.baselines:random_choice", "chance"),
        )
    }
)

EVICTION_POLICIES: Mapping[str, EvictionEntry] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            EvictionEntry(
                "serving",
                f"{_TIERS}.serving:ServingPolicy",
                "the block least worth its place, by return times learnt online; never much worse than lru",
            ),
            EvictionEntry("lru", f"{_TIERS}.lru:LruPolicy", "the block that was used longest ago"),
            EvictionEntry(
                "s3fifo",
                f"{_TIERS}.s3fifo:S3FifoPolicy",
                "first in, first out, with a trial and second chances",
            ),
        )
    }
)


def choices_text(table: Mapping[str, PlacementEntry] | Mapping[str, EvictionEntry]) -> str:
    """The rows of a table as one sentence part each, for the description of a setting."""
    return "; ".join(f"{entry.name}: {entry.description}" for entry in table.values())
