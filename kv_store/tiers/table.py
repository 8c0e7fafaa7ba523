"""Eviction policies by name: what `baton.core.policies` declares, made into objects."""

from collections.abc import Callable
from importlib import import_module
from typing import cast

from baton.core.policies import EVICTION_POLICIES
from kv_store.tiers.policy import EvictionPolicy

MakePolicy = Callable[[int], EvictionPolicy]


def make_eviction_policy(name: str, capacity_blocks: int) -> EvictionPolicy:
    """`name` is one of the table, as configuration ensures. `capacity_blocks`: what the tier holds at most.
    It bounds what is remembered of blocks that left."""
    module, _, attribute = EVICTION_POLICIES[name].factory.partition(":")
    return cast(MakePolicy, getattr(import_module(module), attribute))(capacity_blocks)
