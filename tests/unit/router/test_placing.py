"""What the admission queue asks about all workers together."""

from random import Random

import pytest

from baton.config.router import RouterConfig
from baton.core.messages import Role, WorkerHello
from router.decisions.placing import Placing


def placing_of(*, any_role, **roles):
    placing = Placing(config=RouterConfig(any_role=any_role), rng=Random(0))
    for name, role in roles.items():
        placing.join(WorkerHello(name, role, "f", "m", 16, 100, 4096), f"{name}:1")
    return placing


@pytest.mark.parametrize(
    ("any_role", "waited_for", "is_left"),
    [
        (False, {"p"}, True),
        (False, {"p", "a"}, False),
        (True, {"p", "a"}, True),
        (True, {"p", "a", "d"}, False),
        (False, set(), True),
    ],
)
def test_a_decode_worker_takes_prompts_where_any_role_may(any_role, waited_for, is_left):
    placing = placing_of(any_role=any_role, p=Role.PREFILL, d=Role.DECODE, a=Role.AGGREGATED)
    assert placing.takes_prompts_beside(waited_for) == is_left


def test_a_draining_worker_takes_none():
    placing = placing_of(any_role=True, a=Role.AGGREGATED, b=Role.AGGREGATED)
    assert placing.takes_prompts_beside({"a"})
    placing.cluster["b"].update(Role.AGGREGATED, is_draining=True, is_suspect=False)
    assert not placing.takes_prompts_beside({"a"})
