"""Placement policies: pure objects that choose among the workers that may run a sequence."""

from baton.config.router import RouterConfig
from router.decisions.placement.baselines import LeastLoaded, RandomChoice, RoundRobin
from router.decisions.placement.cached_prefix import CachedPrefix
from router.decisions.placement.views import Policy


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
