"""Names of things. Each is a NewType so that the type checker keeps them apart."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""One HTTP request, as the client sees it ("chatcmpl-…")."""

SequenceId = NewType("SequenceId", str)
"""One stream of generated tokens. A request with n=2 has two: "<request id>/0" and "<request id>/1"."""

RouterId = NewType("RouterId", str)
"""One router process, unique per process life."""

WorkerId = NewType("WorkerId", str)
"""One worker process *life*: "<replica name>.<incarnation>". A restarted worker has a new id, so
whatever still names the old one is recognisably stale."""

ExpertRankId = NewType("ExpertRankId", str)
"""One expert rank's process *life*, like `WorkerId`."""

NodeId = NewType("NodeId", str)
"""One store node process *life*, like `WorkerId`."""

BlockId = NewType("BlockId", int)
"""Index of a block in one worker's KV pool, 0 … block_count-1."""

BlockHash = NewType("BlockHash", bytes)
"""Content address of one full block, see `baton.core.hashing`."""

ReadId = NewType("ReadId", int)
"""One transfer read, unique within a worker's life."""


_BETWEEN = "\x1f"


def fairness_key(tenant: str, user: str) -> str:
    """Return the key under which a sequence counts for fair shares: tenants share an engine first, and a
    tenant's users share what it gets."""
    if not tenant:
        return user
    return f"{tenant}{_BETWEEN}{user}" if user else tenant


def tenant_of(key: str) -> str:
    """Return the tenant of a fairness key. Where there are no tenants, each user counts as one."""
    return key.partition(_BETWEEN)[0]


class SeqKey(tuple[SequenceId, int]):
    """(sequence id, epoch): one attempt at a sequence. A higher epoch replaces a lower one."""

    __slots__ = ()

    def __new__(cls, seq_id: SequenceId, epoch: int) -> "SeqKey":
        return super().__new__(cls, (seq_id, epoch))

    @property
    def seq_id(self) -> SequenceId:
        return self[0]

    @property
    def epoch(self) -> int:
        return self[1]

    def __str__(self) -> str:
        return f"{self[0]}@{self[1]}"


def replica_name(worker_id: WorkerId) -> str:
    """Return the stable part of a worker id: "decode-0" of "decode-0.1f3a"."""
    return worker_id.rsplit(".", 1)[0]
