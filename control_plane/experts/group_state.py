"""What one group of expert ranks looks like to operators. Pure."""

import numpy as np

from baton.core.experts import ExpertGroupState, ExpertRankStatus
from baton.core.ids import ExpertRankId
from control_plane.experts.group import ExpertRankGroup
from control_plane.experts.group_ranks import ExpertRankEntry
from control_plane.experts.place import balance_of
from control_plane.experts.replicas import Counts
from control_plane.experts.values import EMPTY, ExpertMap, Loads, RankId

EXPERTS_SHOWN = 4096
"""Experts of all layers up to which each one is shown."""


def group_state(group: ExpertRankGroup, *, model: str, role: str, now_s: float) -> ExpertGroupState:
    layers, experts = group.placer.sizes if group.placer is not None else (0, 0)
    size = layers * experts
    loads: Loads = np.zeros((layers, experts))
    if group.counts is not None:
        loads = group.counts.loads(now_s=now_s)
    found = group.rollout.map if group.rollout is not None else None
    replicas = _replicas(found, layers, experts)
    balances = balance_of(loads, found.slots) if found is not None and found.ranks else np.ones(layers)
    parts = _rank_parts(found, loads, replicas)
    worst = int(balances.argmin()) if layers else 0
    is_small = size <= EXPERTS_SHOWN
    return ExpertGroupState(
        group=group.name,
        model=model,
        role=role,
        epoch=found.epoch if found is not None else 0,
        layer_count=layers,
        expert_count=experts,
        ranks=tuple(_status(group, entry, parts, now_s) for _, entry in sorted(group.ranks.entries.items())),
        wanted_ranks=group.ranks.wanted,
        replicas_min=int(replicas.min(initial=np.iinfo(np.int64).max)) if size else 0,
        replicas_mean=float(replicas.mean()) if size else 0.0,
        missing=int((replicas == 0).sum()),
        single=int((replicas == 1).sum()),
        balance=float(balances.mean()) if layers else 1.0,
        balance_worst=float(balances[worst]) if layers else 1.0,
        balance_worst_layer=worst,
        expert_replicas=tuple(replicas.ravel().tolist()) if is_small else (),
        expert_loads=tuple(loads.ravel().tolist()) if is_small else (),
        loads_running=sum(group.rollout.loading.values()) if group.rollout is not None else 0,
        migrations=group.migrations,
        migrated_bytes=group.migrations * group.expert_bytes,
        copied=group.copied,
        losses=group.losses,
        rebalances=group.placer.rebalances if group.placer is not None else 0,
        callers=len(group.callers),
        is_ready=bool(size) and bool((replicas > 0).all()),
        lacks_memory=group.placer is not None and group.placer.lacks_memory(group.ranks.serving),
    )


def _replicas(found: ExpertMap | None, layers: int, experts: int) -> Counts:
    """Replicas that callers may use, as [L, E]."""
    counts = np.zeros((layers, experts + 1), dtype=np.int64)
    if found is not None:
        np.add.at(counts, (np.arange(layers)[:, None, None], found.slots), 1)
    return counts[:, :EMPTY]


def _rank_parts(found: ExpertMap | None, loads: Loads, replicas: Counts) -> dict[RankId, float]:
    """Each rank's part of the tokens, if replicas of an expert get as many."""
    total = float(loads.sum())
    if found is None or not total:
        return {}
    sizes = np.zeros((loads.shape[0], loads.shape[1] + 1))
    sizes[:, :EMPTY] = loads / np.maximum(replicas, 1)
    layers = np.arange(len(loads))[:, None, None]
    parts = sizes[layers, found.slots].sum(axis=(0, 2)) / total
    return dict(zip(found.ranks, parts.tolist(), strict=True))


def _status(
    group: ExpertRankGroup, entry: ExpertRankEntry, parts: dict[RankId, float], now_s: float
) -> ExpertRankStatus:
    rank_id = entry.rank_id or ExpertRankId("")
    hello, rollout = entry.hello, group.rollout
    return ExpertRankStatus(
        name=entry.name,
        rank_id=rank_id,
        phase=entry.phase,
        node=hello.node if hello is not None else "",
        host=hello.ref.host if hello is not None else "",
        slots=hello.slots if hello is not None else 0,
        held=len(rollout.held_by(rank_id)) if rollout is not None else 0,
        loading=rollout.loading.get(rank_id, 0) if rollout is not None else 0,
        load=parts.get(rank_id, 0.0),
        rows=entry.rows,
        busy_s=entry.busy_s,
        for_s=max(0.0, now_s - entry.since_s),
        slots_max=hello.slots_max if hello is not None else 0,
    )
