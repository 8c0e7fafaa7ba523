"""A policy by its name in the configuration."""

from typing import Literal, assert_never

from kv_store.tiers.lfu import LfuPolicy
from kv_store.tiers.lru import LruPolicy
from kv_store.tiers.policy import EvictionPolicy
from kv_store.tiers.s3fifo import S3FifoPolicy
from kv_store.tiers.serving import ServingPolicy
from kv_store.tiers.sieve import SievePolicy

PolicyName = Literal["serving", "lru", "lfu", "s3fifo", "sieve"]
"""As `StoreConfig.policy`."""


def make_policy(name: PolicyName, capacity_blocks: int) -> EvictionPolicy:
    """`capacity_blocks`: what the tier holds at most. It bounds what is remembered of blocks that left."""
    match name:
        case "serving":
            return ServingPolicy(capacity_blocks)
        case "lru":
            return LruPolicy()
        case "lfu":
            return LfuPolicy()
        case "s3fifo":
            return S3FifoPolicy(capacity_blocks)
        case "sieve":
            return SievePolicy()
        case _:
            assert_never(name)
