"""States of groups of expert ranks for tests of what operators see and order."""

import msgspec

from baton.core.experts import ExpertGroupState, ExpertRankPhase, ExpertRankStatus, group_name
from baton.core.ids import ExpertRankId
from baton.core.messages import Role


def rank(number, phase=ExpertRankPhase.READY, *, life="a", role=Role.DECODE, **fields):
    """Return one rank, whose name is its role and number."""
    name = f"experts-{role}-{number}"
    given = {
        "node": f"node{number % 4:08x}",
        "host": f"host-{number % 4}",
        "slots": 20,
        "held": 64,
        "loading": 0,
        "load": 0.25,
        "rows": 1000 * number,
        "busy_s": 2.0,
        "for_s": 30.0,
        **fields,
    }
    return ExpertRankStatus(name=name, rank_id=ExpertRankId(f"{name}.{life}"), phase=phase, **given)


def group(*ranks, role=Role.DECODE, model="m", **fields):
    """Return a group of four layers of 64 experts, by default with four ranks that are ready."""
    ranks = ranks or tuple(rank(i, role=role) for i in range(4))
    given = {
        "epoch": 7,
        "layer_count": 4,
        "expert_count": 64,
        "wanted_ranks": len(ranks),
        "replicas_min": 1,
        "replicas_mean": 1.25,
        "missing": 0,
        "single": 192,
        "balance": 0.91,
        "balance_worst": 0.74,
        "balance_worst_layer": 2,
        "expert_replicas": (2,) * 64 + (1,) * 192,
        "callers": 2,
        "expert_loads": tuple(float(i % 7) for i in range(256)),
        "migrations": 12,
        "is_ready": True,
        "migrated_bytes": 12 * 2**20,
        "losses": 1,
        "rebalances": 5,
        **fields,
    }
    return ExpertGroupState(group=group_name(model, role), model=model, role=role, ranks=ranks, **given)


def large(**fields):
    """Return a group of 58 layers of 256 experts on 72 ranks, for which experts are not listed."""
    ranks = tuple(rank(i, slots=5, held=5 * 58, load=1 / 72, rows=10_000 + i) for i in range(72))
    return msgspec.structs.replace(
        group(*ranks, layer_count=58, expert_count=256, expert_replicas=(), expert_loads=()), **fields
    )
