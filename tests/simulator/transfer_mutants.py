"""Leases and reads of KV between workers, broken on purpose."""

import msgspec

from baton.core.ids import SeqKey
from decode_worker.read_queue import ReadQueue
from decode_worker.receiver import KVReceiver
from kv_transfer import session
from kv_transfer.lease import ReaderLease
from kv_transfer.read import ReadDone
from kv_transfer.session import ReadSession
from prefill_worker.handovers import Handovers
from simulator.faults import reads
from tests.simulator.mutant import Mutant, Patch


def _lease_book_ignores_readers(patch: Patch) -> None:
    """A cancelled hand-over is freed at once, whoever reads it."""

    def close(self: Handovers, key: SeqKey, reason: str, *, now_s: float) -> list[object]:
        handover = self._handovers.get(key)
        if handover is not None:
            self._end(handover, reason, now_s=now_s)
        return []

    patch.setattr(Handovers, "close", close)


def _lease_book_holds_nothing(patch: Patch) -> None:
    """Granted blocks are the sequence's alone: gone when it is."""
    patch.setattr(Handovers, "_hold", lambda self, handover, blocks: None)


def _lease_never_lapses(patch: Patch) -> None:
    """Blocks of a reader that died are held for ever."""
    patch.setattr(
        Handovers, "_lapse", lambda self, handover, *, now_s: setattr(handover.lease, "end_s", now_s + 1)
    )


def _receiver_ignores_lease_end(patch: Patch) -> None:
    """Reads go on after the lease."""
    granted = ReaderLease.granted

    def for_ever(self: ReaderLease, number: int, *, lease_s: float, slack_s: float) -> None:
        granted(self, number, lease_s=lease_s, slack_s=slack_s)
        self.end_s += 1000.0

    patch.setattr(ReaderLease, "granted", for_ever)


def _receiver_counts_lease_from_the_grant(patch: Patch) -> None:
    """The lease starts at the grant: it is longer by a renewal's length and the network's delay."""
    granted = KVReceiver.granted

    def from_now(self: KVReceiver, owner: object, grant: object, *, now_s: float) -> list[object]:
        incoming = self._incoming_from(owner, SeqKey(grant.seq_id, grant.epoch))
        if incoming is not None:
            sent_s = incoming.lease._sent_s
            incoming.lease._sent_s = dict.fromkeys(sent_s, now_s + self._config.lease_slack_s)
        return granted(self, owner, grant, now_s=now_s)

    patch.setattr(KVReceiver, "granted", from_now)


def _receiver_trusts_unsettled_reads(patch: Patch) -> None:
    """Blocks that a lost read may still write into are used again."""
    read_done = KVReceiver.read_done

    def at_once(self: KVReceiver, done: ReadDone, *, now_s: float) -> list[object]:
        return read_done(self, msgspec.structs.replace(done, is_settled=True), now_s=now_s)

    patch.setattr(KVReceiver, "read_done", at_once)


def _generations_not_compared(patch: Patch) -> None:
    """A read is good when its bytes have arrived."""
    patch.setattr(reads, "generations_match", lambda current, action: True)


def _quarantine_is_skipped(patch: Patch) -> None:
    """A phase that ends frees all of its blocks, those of unsettled reads too."""

    def end(self: KVReceiver, incoming: object, *, tell_owner: bool) -> list[object]:
        del self._incoming[incoming.key]
        self._queue.forget(incoming)
        incoming.end(tell_owner=tell_owner)
        for read in self._reads.of(incoming):
            read.quarantined.clear()
        self._pool.release(incoming.block_ids)
        incoming.block_ids = []
        return self._release_if_due(incoming)

    patch.setattr(KVReceiver, "_end", end)
    patch.setattr(KVReceiver, "check", lambda self: None)


def _released_under_a_read(patch: Patch) -> None:
    """A reader lets go of blocks that one of its reads still copies."""

    def at_once(self: ReadSession) -> bool:
        is_due = self.is_over and self.owes_release
        self.owes_release = False
        return is_due

    patch.setattr(ReadSession, "take_release", at_once)


def _early_requests_stay(patch: Patch) -> None:
    """A request for a sequence that never comes is kept for ever."""
    request_early = Handovers.request_early

    def for_ever(self: Handovers, reader: object, request: object, *, now_s: float) -> list[object]:
        answers = request_early(self, reader, request, now_s=now_s)
        for early in self._early.values():
            early.ends_s = float("inf")
        return answers

    patch.setattr(Handovers, "request_early", for_ever)


def _reads_have_no_bound(patch: Patch) -> None:
    """A reader starts as many reads as it has chunks."""
    following = ReadQueue.next

    def always(self: ReadQueue) -> object:
        reads_max, self._reads_max = self._reads_max, 1 << 30
        found = following(self)
        self._reads_max = reads_max
        return found

    patch.setattr(ReadQueue, "next", always)


def _every_read_is_good(patch: Patch) -> None:
    """A read that failed counts as one that did not."""
    judge = session.judge
    patch.setattr(
        session,
        "judge",
        lambda done, **times: judge(msgspec.structs.replace(done, error="", is_stale=False), **times),
    )


MUTANTS = (
    Mutant("quarantine is skipped", _quarantine_is_skipped, {0, 3, 4}),
    Mutant("released under a read", _released_under_a_read, {4, 5}),
    Mutant("early requests stay", _early_requests_stay, {3, 6}),
    Mutant("reads have no bound", _reads_have_no_bound, {3}),
    Mutant("every read is good", _every_read_is_good, {2, 4, 7}),
    Mutant("lease book ignores readers", _lease_book_ignores_readers, {0, 3, 5}),
    Mutant("lease book holds nothing", _lease_book_holds_nothing, {0, 3, 5}),
    Mutant("lease never lapses", _lease_never_lapses, {3, 6}),
    Mutant("receiver ignores the lease's end", _receiver_ignores_lease_end, {5}),
    Mutant("receiver counts the lease from the grant", _receiver_counts_lease_from_the_grant, {5}),
    Mutant("receiver trusts unsettled reads", _receiver_trusts_unsettled_reads, {2, 4, 7}),
    Mutant("generations are not compared", _generations_not_compared, {4}),
)
