"""Leases and reads of KV between workers, broken on purpose."""

import msgspec

from baton.core.ids import SeqKey
from decode_worker.receiver import KVReceiver
from kv_transfer.lease import ReaderLease
from kv_transfer.read import ReadDone
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


MUTANTS = (
    Mutant("lease book ignores readers", _lease_book_ignores_readers, {0, 3, 5}, known_seed=5),
    Mutant("lease book holds nothing", _lease_book_holds_nothing, {0, 3, 5}),
    Mutant("lease never lapses", _lease_never_lapses, {3, 6}, known_seed=15),
    Mutant("receiver ignores the lease's end", _receiver_ignores_lease_end, {5}),
    Mutant("receiver counts the lease from the grant", _receiver_counts_lease_from_the_grant, {5}),
    Mutant("receiver trusts unsettled reads", _receiver_trusts_unsettled_reads, {2, 7}, known_seed=5),
    Mutant("generations are not compared", _generations_not_compared, {4}, known_seed=61),
)
