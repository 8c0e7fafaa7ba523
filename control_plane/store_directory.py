"""The directory of store nodes that the control plane keeps when the configuration names no Redis."""

import logging
from typing import assert_never

from baton.config import StoreConfig
from baton.core.messages import INFO_NOTE
from baton.telemetry import catalogue
from baton.telemetry.metrics import Meter
from kv_store.directory.book import BookChange, NodeJoined, NodeLapsed, NodeLeft
from kv_store.directory.connect import connect
from kv_store.directory.memory import MemoryDirectory

log = logging.getLogger(__name__)


class StoreDirectory(MemoryDirectory):
    """The directory of store nodes. It implements `baton.wire.store_directory.StoreDirectoryHandler`, and
    logs which nodes come and go."""

    def __init__(self, config: StoreConfig, *, meter: Meter) -> None:
        super().__init__(entries_max=config.directory_entries_max, on_change=_log)
        self._meter, self._counted_dropped = meter, 0

    def count(self) -> None:
        """Update the metrics; called before they are rendered."""
        book = self.book
        self._meter.set(catalogue.STORE_NODES, len(book.members))
        self._meter.set(catalogue.DIRECTORY_ENTRIES, book.entry_count)
        self._meter.inc(catalogue.DIRECTORY_DROPPED, book.dropped_count - self._counted_dropped)
        self._counted_dropped = book.dropped_count


async def check_directory(config: StoreConfig) -> None:
    """Check a configured directory at once, so that the error is not repeated by every node. Raises
    SetupError. A directory that does not answer may still come, and is accepted."""
    if config.directory:
        await (await connect(config, control_address="")).close()


def _log(change: BookChange) -> None:
    match change:
        case NodeJoined(member):
            node = member.node
            where = (node.node_id, node.address, member.metrics_address)
            log.info("store node %s joined at %s, metrics at http://%s/metrics", *where)
            for note in member.notes:
                level = logging.INFO if note.startswith(INFO_NOTE) else logging.WARNING
                log.log(level, "store node %s: %s", node.node_id, note.removeprefix(INFO_NOTE))
        case NodeLapsed(member):
            log.warning("store node %s did not renew its lease", member.node.node_id)
        case NodeLeft(member):
            log.info("store node %s left", member.node.node_id)
        case _:
            assert_never(change)
