"""Placement policies: pure objects that choose among the workers that may run a sequence."""

from baton.config_router import RouterConfig
from router.policy.baselines import LeastLoaded, RandomChoice, RoundRobin
from router.policy.cached_prefix import CachedPrefix
from router.policy.views import Policy


def make_policy(config: RouterConfig) -> Policy:
    match config.policy:
        case "cached_prefix" | "slo":  # slo: what it falls back to
            return CachedPrefix(load_bound=config.load_bound)
        case "least_loaded":
            return LeastLoaded()
        case "round_robin":
            return RoundRobin()
        case "random":
            return RandomChoice()
