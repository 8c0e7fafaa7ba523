"""What the store's messages may not say."""

import pytest

from baton.core.store import BlocksReady, BlocksWritten
from baton.wire.store_codec import FROM_STORE, FROM_WORKER
from baton.wire.vocabulary import WireError


def test_checksums_are_unsigned_and_of_64_bits():
    sums = (0, None, 2**64 - 1)
    assert FROM_WORKER.decode(FROM_WORKER.encode(BlocksWritten(1, sums))).checksums == sums
    with pytest.raises(WireError, match="checksum"):
        FROM_WORKER.decode(FROM_WORKER.encode(BlocksWritten(1, (None, -1))))
    with pytest.raises(WireError, match="checksum"):
        FROM_STORE.decode(FROM_STORE.encode(BlocksReady(1, 0, (3,), (-1,))))
