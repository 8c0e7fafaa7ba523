"""The tables of policies, and that everybody who offers a choice of policies reads them."""

import random

import pytest
from pydantic import ValidationError

from baton.config import StoreConfig
from baton.config.router import RouterConfig
from baton.core.policies import (
    DEFAULT_EVICTION,
    DEFAULT_PLACEMENT,
    EVICTION_POLICIES,
    PLACEMENT_POLICIES,
)
from benchmarks.eviction.table import NAMES, make_compared_policy
from benchmarks.placement import POLICIES
from kv_store.tiers.table import make_eviction_policy
from router.decisions.placement.interface import PolicyTools
from router.decisions.placement.table import make_placement_policy
from router.decisions.prediction.predictor import Predictor


@pytest.mark.parametrize("name", PLACEMENT_POLICIES)
def test_every_placement_policy_of_the_table_can_be_configured_and_made(name):
    config = RouterConfig(policy=name)
    made = make_placement_policy(name, PolicyTools(config, Predictor(error_max=1.0), random.Random(1)))
    assert callable(made.place)
    assert isinstance(made.uses_prefix, bool)
    assert name in POLICIES


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_every_eviction_policy_of_the_table_can_be_configured_and_made(name):
    assert StoreConfig(policy=name).policy == name
    assert make_eviction_policy(name, 10).name == name
    assert name in NAMES


def test_configuration_offers_the_tables_and_nothing_else():
    for section, table, default in (
        (RouterConfig, PLACEMENT_POLICIES, DEFAULT_PLACEMENT),
        (StoreConfig, EVICTION_POLICIES, DEFAULT_EVICTION),
    ):
        setting = section.model_json_schema()["properties"]["policy"]
        assert setting["enum"] == list(table)
        assert setting["default"] == default == section().policy
        assert all(entry.description in setting["description"] for entry in table.values())
        with pytest.raises(ValidationError, match=f"should be one of {', '.join(table)}"):
            section(policy="no such policy")


def test_what_is_only_compared_cannot_be_configured():
    for name in set(NAMES) - set(EVICTION_POLICIES):
        assert make_compared_policy(name, 10).name == name
        with pytest.raises(ValidationError):
            StoreConfig(policy=name)
