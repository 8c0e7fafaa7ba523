"""Throughput of expert ranks where few experts get most rows and the popular ones change, with and without
rebalancing."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from baton.config.experts import ExpertsConfig
from baton.core.ids import NodeId
from benchmarks.experts.service import HIDDEN, SKEW, MeasuredRanks
from control_plane.experts.loads import DecayedCounts
from control_plane.experts.place import place
from control_plane.experts.values import ExpertMap, ExpertRank, Loads
from engine.experts.caller import ExpertCaller, ExpertReport

TOKENS = 512
"""Rows of one dispatch."""
MOVES_S, REBALANCE_S, HALF_LIFE_S = 8.0, 1.0, 1.0
"""Times between two changes of the popular experts and between two looks at the placement, and the half-life
of counts. They are shorter than a cluster's, so that a short run sees several changes."""
GAIN_MIN = 1.3


class SkewReport(msgspec.Struct, frozen=True):
    fixed: float
    """Tokens per second with a placement that never changes: each rank holds half of every layer."""
    rebalanced: float
    migrations: int
    """Experts that were loaded in the rebalanced run."""

    @property
    def gain(self) -> float:
        return self.rebalanced / self.fixed

    @property
    def is_within_bounds(self) -> bool:
        return self.gain >= GAIN_MIN


class Skewed:
    """Experts of tokens by Zipf's law with exponent 1, where the popular ones move."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._logs = -np.log(np.arange(1, SKEW.experts + 1))

    def draw(self, moved: int) -> torch.Tensor:
        """int64 [TOKENS, k], distinct for each token. moved: changes of the popular experts so far."""
        noise = self._random.gumbel(size=(TOKENS, SKEW.experts))
        best = np.argpartition(-(self._logs + noise), SKEW.chosen, axis=1)[:, : SKEW.chosen]
        return torch.from_numpy((best + moved * (SKEW.experts // 2 + 5)) % SKEW.experts)


def measure_skew(folder: Path, *, seconds: float, seed: int, progress: Callable[[str], None]) -> SkewReport:
    """Both kinds for `seconds`, on the same two ranks."""
    ranks = MeasuredRanks(folder, "exact")
    reports: list[ExpertReport] = []
    layers, experts = ranks.sizes
    caller = ExpertCaller(
        ExpertsConfig(),
        layer_count=layers,
        expert_count=experts,
        hidden=HIDDEN,
        dtype=torch.bfloat16,
        name="skew",
        report=reports.append,
    )
    try:
        caller.use(ranks.hold(ranks.halves()))
        assert caller.wait_complete(30.0)
        fixed, _ = _run(caller, ranks, seconds, seed, rebalances=False)
        progress(f"without rebalancing: {fixed:.0f} tokens/s")
        rebalanced, migrations = _run(caller, ranks, seconds, seed, rebalances=True)
        progress(f"with rebalancing: {rebalanced:.0f} tokens/s, {migrations} experts migrated")
        return SkewReport(fixed, rebalanced, migrations)
    finally:
        caller.close()
        ranks.end()


def _run(
    caller: ExpertCaller, ranks: MeasuredRanks, seconds: float, seed: int, *, rebalances: bool
) -> tuple[float, int]:
    """Tokens per second and layer, and experts that were loaded."""
    layers, experts = ranks.sizes
    skewed, counts = Skewed(seed), DecayedCounts(layers, experts, half_life_s=HALF_LIFE_S)
    x = torch.randn((TOKENS, HIDDEN), dtype=torch.bfloat16)
    weights = torch.ones((TOKENS, SKEW.chosen))
    begun_s, next_s, done, migrations = time.perf_counter(), REBALANCE_S, 0, 0
    while (now_s := time.perf_counter() - begun_s) < seconds:
        chosen = skewed.draw(int(now_s / MOVES_S))
        layer = done // TOKENS % layers
        caller.finish(caller.begin(layer, x, chosen), weights)
        done += TOKENS
        new = np.zeros((layers, experts), dtype=np.int64)
        new[layer] = np.bincount(chosen.reshape(-1).numpy(), minlength=experts)
        counts.add(new, now_s=now_s)
        if rebalances and now_s >= next_s:
            migrations += _rebalance(caller, ranks, counts.loads(now_s=now_s))
            next_s = now_s + REBALANCE_S
    return done / (time.perf_counter() - begun_s), migrations


def _rebalance(caller: ExpertCaller, ranks: MeasuredRanks, loads: Loads) -> int:
    """Have the ranks hold what the production placement says. Returns the number of experts loaded."""
    layers, experts = ranks.sizes
    ids = [ref.rank_id for ref in ranks.refs]
    slots = experts // len(ids)
    members = [ExpertRank(rank_id, NodeId("this"), slots) for rank_id in ids]
    held = {
        divmod(n, experts): [name for name, own in zip(ids, ranks.held, strict=True) if n in own]
        for n in range(layers * experts)
    }
    replicas = {key: names for key, names in held.items() if names}
    current = ExpertMap.of(
        replicas,  # type: ignore[arg-type]
        epoch=ranks.epoch,
        layer_count=layers,
        expert_count=experts,
        ranks=tuple(ids),
    )
    wanted: list[set[int]] = [set() for _ in ids]
    for (layer, expert), names in place(loads, members, current=current).map.replicas().items():
        for name in names:
            wanted[ids.index(name)].add(layer * experts + expert)
    loaded = sum(len(own - before) for own, before in zip(wanted, ranks.held, strict=True))
    if loaded:
        caller.use(ranks.hold(wanted))
        ranks.drop_rest()
    return loaded
