"""How many ranks a group has where one stands beside every worker."""

import pytest

from baton.core.messages import Role
from control_plane.expert_groups import ranks_beside

P, D = Role.PREFILL, Role.DECODE


@pytest.mark.parametrize(
    ("wanted", "started", "calling", "there", "prefill_ranks"),
    [
        ({P: 3, D: 1}, {}, 0, 0, 3),  # nothing has started
        ({P: 3, D: 1}, {P: 3, D: 1}, 3, 3, 3),
        ({P: 2, D: 2}, {P: 3, D: 1}, 3, 3, 3),  # one switched its role, and still uses its first group
        ({P: 2, D: 2}, {P: 2, D: 2}, 3, 3, 3),  # as another control plane sees the same
        ({P: 2, D: 1}, {P: 3, D: 1}, 3, 3, 3),  # one leaves and still computes
        ({P: 2, D: 1}, {P: 2, D: 1}, 2, 3, 2),  # it has left
        ({P: 3, D: 1}, {P: 4, D: 1}, 4, 3, 3),  # a new version comes beside the old one
        ({P: 3, D: 1}, {P: 2, D: 1}, 2, 3, 3),  # a worker is started anew
        ({P: 0, D: 0}, {P: 1}, 1, 1, 1),
        ({P: 0, D: 0}, {}, 0, 1, 0),
    ],
)
def test_no_rank_leaves_that_a_worker_uses(wanted, started, calling, there, prefill_ranks):
    assert ranks_beside(wanted, started, P, calling=calling, there=there) == prefill_ranks


def test_a_role_whose_workers_all_were_started_in_another_one_has_no_ranks():
    assert ranks_beside({P: 1, D: 2}, {P: 3}, D, calling=0, there=0) == 0
