"""Placement policies by name: what `baton.core.policies` declares, made into objects."""

from importlib import import_module
from typing import cast

from baton.core.policies import PLACEMENT_POLICIES
from router.decisions.placement.interface import MakePolicy, PlacementPolicy, PolicyTools


def make_placement_policy(name: str, tools: PolicyTools) -> PlacementPolicy:
    """`name` is one of the table, as configuration ensures."""
    module, _, attribute = PLACEMENT_POLICIES[name].factory.partition(":")
    return cast(MakePolicy, getattr(import_module(module), attribute))(tools)
