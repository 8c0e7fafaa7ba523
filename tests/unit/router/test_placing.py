"""What the admission queue asks about all workers together."""

from random import Random

from baton.config.router import RouterConfig
from baton.core.messages import Role, WorkerHello
from router.decisions.placing import Placing


def placing_of(**roles):
    placing = Placing(config=RouterConfig(), rng=Random(0))
    for name, role in roles.items():
        placing.join(WorkerHello(name, role, "f", "m", 16, 100, 4096), f"{name}:1")
    return placing


def test_every_worker_counts_since_any_may_get_a_whole_sequence():
    placing = placing_of(p=Role.PREFILL, d=Role.DECODE, a=Role.AGGREGATED)
    assert placing.takes_new_beside(set())
    assert placing.takes_new_beside({"p", "a"})
    assert placing.takes_new_beside({"p", "d"})
    assert not placing.takes_new_beside({"p", "d", "a"})


def test_a_draining_worker_takes_none():
    placing = placing_of(a=Role.AGGREGATED, b=Role.AGGREGATED)
    assert placing.takes_new_beside({"a"})
    placing.cluster["b"].update(Role.AGGREGATED, is_draining=True, is_suspect=False)
    assert not placing.takes_new_beside({"a"})
