"""The reader's side of KV that an owner grants: request, grant, reads under the lease, release. Pure.

A user of this module (a decode phase on a worker, a fetch on a store node) keeps one `ReadSession` for what
it reads from one owner, and one `OpenReads` for all of its reads. It chooses what is read next and into which
blocks, and what a failed read leads to; when a lease ends, which grants make sense, which reads are good,
which blocks the network may still write into and when the owner is told to let go is decided here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from baton.core.ids import ReadId
from kv_transfer.lease import ReaderLease
from kv_transfer.read import BlockRead, ReadDone, ReadVerdict, judge


class GrantedBlocks(Protocol):
    """What every message that grants blocks says of them: `KVGrant` and `BlocksGrant`."""

    @property
    def first_block(self) -> int:
        """Position of source_blocks[0] in what was requested."""
        ...

    @property
    def source_blocks(self) -> Sequence[int]: ...
    @property
    def generations(self) -> Sequence[int]: ...
    @property
    def checksums(self) -> Sequence[int]: ...
    @property
    def lease_s(self) -> float: ...
    @property
    def answers_request(self) -> int: ...


class Granted(NamedTuple):
    """Blocks that a grant added: positions `first_block`, `first_block` + 1, …"""

    first_block: int
    source_blocks: tuple[int, ...]
    generations: tuple[int, ...]
    checksums: tuple[int, ...]


class BadGrant(Exception):
    """The grant makes no sense: the owner cannot be trusted with this session."""


@dataclass(slots=True, eq=False)
class ReadSession:
    """What one owner is to grant, and has granted, under one lease."""

    lease: ReaderLease
    block_count: int
    """Blocks that the owner may grant, at most; position `block_count` - 1 is the last."""
    granted_end: int = 0
    """Blocks before this position were granted, or need not be."""
    reads_open: int = 0
    """Reads that have not settled."""
    is_over: bool = False
    """Nothing is read any more; the release waits for the open reads."""
    owes_release: bool = False
    is_owner_lost: bool = False

    def accept(self, grant: GrantedBlocks, *, slack_s: float) -> Granted:
        """Take a grant in and return what it adds: blocks granted before are not read twice. Raises
        BadGrant."""
        fault = self._fault(grant)
        if fault:
            raise BadGrant(fault)
        self.lease.granted(grant.answers_request, lease_s=grant.lease_s, slack_s=slack_s)
        skip = self.granted_end - grant.first_block
        first, self.granted_end = (
            self.granted_end,
            max(self.granted_end, grant.first_block + len(grant.source_blocks)),
        )
        return Granted(
            first,
            tuple(grant.source_blocks[skip:]),
            tuple(grant.generations[skip:]),
            tuple(grant.checksums[skip:]),
        )

    def _fault(self, grant: GrantedBlocks) -> str:
        count = len(grant.source_blocks)
        end = grant.first_block + count
        if len(grant.generations) != count or len(grant.checksums) not in (0, count):
            return "lists of different lengths"
        if not 0 <= grant.first_block <= self.granted_end or end > self.block_count:
            return f"blocks {grant.first_block} to {end}, where {self.granted_end} were granted"
        if any(block < 0 for block in grant.source_blocks):
            return "a block below 0"
        if not all(0 <= checksum < 2**64 for checksum in grant.checksums):
            return "a checksum outside 64 bits"
        if not grant.lease_s > 0:
            return f"a lease of {grant.lease_s} s"
        if not self.lease.is_granted and not self.lease.was_sent(grant.answers_request):
            return f"an answer to request {grant.answers_request}, which was not sent"
        return ""

    def end(self, *, tell_owner: bool) -> None:
        """Nothing more is read. The owner hears of it when the last read has settled, see `take_release`."""
        self.is_over = True
        self.owes_release = tell_owner

    def owner_lost(self) -> None:
        """Nobody is there to hear a release: the owner's lease ends by itself."""
        self.is_owner_lost = True

    def take_release(self) -> bool:
        """Whether the release is to be sent now: True once, when no read of ours is or will be under way."""
        is_due = self.is_over and self.owes_release and not self.is_owner_lost and not self.reads_open
        if is_due:
            self.owes_release = False
        return is_due


SessionT = TypeVar("SessionT", bound=ReadSession)
PartT = TypeVar("PartT")


@dataclass(slots=True, eq=False)
class OpenRead(Generic[SessionT, PartT]):
    """A read that has not settled."""

    read: BlockRead
    session: SessionT
    part: PartT
    """What the user reads: a chunk of a prompt's blocks, some blocks of a fetch."""
    started_s: float
    quarantined: list[int] = field(default_factory=list[int])
    """Local blocks that are this read's alone until it has settled, since bytes may land there: the user
    frees them then."""
    is_done: bool = False
    """Answered by a ReadDone; bytes may still land."""


class OpenReads(Generic[SessionT, PartT]):
    """All reads of one process that have not settled."""

    def __init__(self) -> None:
        self._reads: dict[ReadId, OpenRead[SessionT, PartT]] = {}

    def __iter__(self) -> Iterator[OpenRead[SessionT, PartT]]:
        return iter(self._reads.values())

    def __len__(self) -> int:
        return len(self._reads)

    @property
    def in_flight_count(self) -> int:
        return sum(not read.is_done for read in self)

    @property
    def quarantined_count(self) -> int:
        return sum(len(read.quarantined) for read in self)

    def of(self, session: ReadSession) -> list[OpenRead[SessionT, PartT]]:
        return [read for read in self if read.session is session]

    def start(
        self, read: BlockRead, session: SessionT, part: PartT, *, now_s: float
    ) -> OpenRead[SessionT, PartT]:
        """The caller hands `read` to whoever carries it out. The lease has time left."""
        assert read.read_id not in self._reads
        assert now_s < session.lease.end_s
        session.reads_open += 1
        opened = self._reads[read.read_id] = OpenRead[SessionT, PartT](read, session, part, now_s)
        return opened

    def done(self, done: ReadDone, *, now_s: float) -> tuple[OpenRead[SessionT, PartT], ReadVerdict] | None:
        """None: no such read is in flight. The read stays open until `settled`."""
        read = self._reads.get(done.read_id)
        if read is None or read.is_done:
            return None
        read.is_done = True
        return read, judge(done, lease_end_s=read.session.lease.end_s, now_s=now_s)

    def settled(self, read_id: ReadId) -> OpenRead[SessionT, PartT] | None:
        """Nothing of it can land any more: its quarantined blocks are the caller's to free. None: no such
        read has ended."""
        read = self._reads.get(read_id)
        if read is None or not read.is_done:
            return None
        del self._reads[read_id]
        read.session.reads_open -= 1
        return read

    def check(self) -> None:
        """The sessions' counts are right."""
        counts: dict[int, int] = {}
        for read in self:
            counts[id(read.session)] = counts.get(id(read.session), 0) + 1
        assert all(read.session.reads_open == counts[id(read.session)] for read in self)
