"""Frozen snapshots of workers and of the cluster: what every placement policy decides on.

A worker's snapshot is made anew when something about the worker changes, and the cluster's takes over those
of all other workers, so a decision copies nothing."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from baton.core.geometry import blocks_for
from baton.core.ids import WorkerId
from baton.core.messages import Role, WorkerHello
from router.decisions.cluster.load_account import LoadFigures
from router.decisions.cluster.prediction_inputs import PredictionInputs


class WorkerFacts(NamedTuple):
    """What a worker is. Changes only when it joins, takes another role or begins to drain."""

    role: Role
    is_draining: bool
    """The worker gets nothing new, because it is draining, suspected or parked."""
    fingerprint: str
    """KV moves only between workers of one fingerprint."""
    host: str
    block_tokens: int
    block_count: int
    block_bytes: int
    max_model_tokens: int
    step_tokens_max: int
    chunk_tokens_min: int
    batch_sequences_max: int
    tpot_slo_s: float
    """The worker's objective for sequences that name none."""

    @classmethod
    def of(cls, hello: WorkerHello, role: Role, *, is_draining: bool) -> "WorkerFacts":
        return cls(
            role,
            is_draining,
            hello.fingerprint,
            hello.host,
            hello.block_tokens,
            hello.block_count,
            hello.block_bytes,
            hello.max_model_tokens,
            hello.step_tokens_max,
            hello.chunk_tokens_min,
            hello.batch_sequences_max,
            hello.tpot_slo_s,
        )


class WorkerSnapshot(NamedTuple):
    """One worker at one moment."""

    worker_id: WorkerId
    facts: WorkerFacts
    load: LoadFigures
    prediction: PredictionInputs

    def fits(self, token_count: int) -> bool:
        """A sequence of so many tokens can run there when nothing else does."""
        facts = self.facts
        return token_count < facts.max_model_tokens and self.blocks_for(token_count) <= facts.block_count

    def has_room(self, token_count: int) -> bool:
        """Free blocks, less those promised since the last report, suffice now; never while it refuses."""
        return not self.load.is_refusing and self.blocks_for(token_count) <= self.load.free_blocks

    def blocks_for(self, token_count: int) -> int:
        """Blocks of a sequence of so many tokens, with the place of the token that is sampled next."""
        return blocks_for(token_count + 1, self.facts.block_tokens)


class Pools(NamedTuple):
    """The workers that do not drain, by what they may run. Aggregated ones are in either pool."""

    usable: tuple[WorkerSnapshot, ...]
    prefill: tuple[WorkerSnapshot, ...]
    decode: tuple[WorkerSnapshot, ...]
    aggregated: tuple[WorkerSnapshot, ...]


class ClusterSnapshot(NamedTuple):
    """The cluster at one moment."""

    now_s: float
    workers: Mapping[WorkerId, WorkerSnapshot]
    pools: Pools
    has_pairs: bool
    """Somebody can prefill for somebody else who decodes: not so among aggregated workers only."""
    kinds: tuple[tuple[str, int], ...]
    """The fingerprints that there are, and the tokens of a block of each."""
    suspended: frozenset[WorkerId]
    """Workers whose circuit breaker is open: they get nothing while others can."""
    silence_s: float

    @property
    def is_all_aggregated(self) -> bool:
        return len(self.pools.aggregated) == len(self.pools.usable)

    def is_stale(self, worker: WorkerSnapshot) -> bool:
        """No report came for too long: what it does is unknown, so it is assumed to be busy."""
        return self.now_s - worker.load.report_at_s > self.silence_s


def pairable_fingerprints(workers: Iterable[WorkerSnapshot]) -> set[str]:
    """Fingerprints under which somebody prefills and somebody decodes."""
    prefills: set[str] = set()
    decodes: set[str] = set()
    for worker in workers:
        if worker.facts.role.prefills:
            prefills.add(worker.facts.fingerprint)
        if worker.facts.role.decodes:
            decodes.add(worker.facts.fingerprint)
    return prefills & decodes
