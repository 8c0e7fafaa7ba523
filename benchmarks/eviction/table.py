"""The policies that the bench compares: those that a store can have, and those that it cannot."""

from collections.abc import Callable, Mapping

from baton.core.policies import EVICTION_POLICIES
from benchmarks.eviction.lfu import LfuPolicy
from benchmarks.eviction.sieve import SievePolicy
from kv_store.tiers.policy import EvictionPolicy
from kv_store.tiers.table import make_eviction_policy

ONLY_COMPARED: Mapping[str, Callable[[], EvictionPolicy]] = {"lfu": LfuPolicy, "sieve": SievePolicy}
NAMES = (*EVICTION_POLICIES, *ONLY_COMPARED)


def make_compared_policy(name: str, capacity_blocks: int) -> EvictionPolicy:
    """`name` is one of `NAMES`."""
    if (make := ONLY_COMPARED.get(name)) is not None:
        return make()
    return make_eviction_policy(name, capacity_blocks)
