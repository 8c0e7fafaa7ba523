"""Runs the store node of `baton store run`."""

import logging
import secrets
import socket

from baton.config import Config
from baton.core import garbage
from baton.core.errors import SetupError
from baton.core.ids import NodeId
from baton.core.store_admin import NodeStatus
from baton.telemetry.logs import configure_logs
from baton.wire.transport import secure
from commands.serve import die_with_parent, run_on_uvloop, tell_parent

log = logging.getLogger(__name__)


def serve_store(config: Config, *, control_address: str, exit_with_parent: bool) -> None:
    """Raises SetupError; a child process reports it to its parent instead."""
    from control_plane.child import SETUP_ERROR_PREFIX, SETUP_ERROR_STATUS

    if exit_with_parent:
        die_with_parent()
    node_id = NodeId(f"{socket.gethostname()}.{secrets.token_hex(4)}")
    configure_logs("store", config.telemetry)
    try:
        secure(config.tls, config.access)
        run_on_uvloop(_store(node_id, config, control_address, is_child=exit_with_parent))
    except SetupError as error:
        if not exit_with_parent:
            raise
        tell_parent(f"{SETUP_ERROR_PREFIX}{error}")
        raise SystemExit(SETUP_ERROR_STATUS) from None


async def _store(node_id: NodeId, config: Config, control_address: str, *, is_child: bool) -> None:
    with garbage.uncollected():
        from control_plane.child import READY_PREFIX
        from control_plane.shutdown import Shutdown
        from kv_store.directory.connect import connect
        from kv_store.process.store_node import StoreProcess
        from kv_store.ssd.folder import own_folder

    if not config.store.socket:
        raise SetupError("no socket for the workers: name one with --socket")
    if not config.store.host_bytes:
        raise SetupError(
            "store.host_bytes=0: a store node needs some host memory, for example --host-bytes 1073741824"
        )
    # `baton serve` has checked the folder; a later failure costs the SSD tier only
    if config.store.ssd_dir and not is_child:
        own_folder(config.store.ssd_dir).release()

    def ready(status: NodeStatus) -> None:
        tell_parent(f"{READY_PREFIX}{status.socket} {status.address} {status.metrics_address}")

    is_alone = not control_address and not config.store.directory
    shutdown = Shutdown()
    with shutdown.on_signals():
        directory = None if is_alone else await connect(config.store, control_address=control_address)
        process = StoreProcess(node_id, config, directory=directory, towards=control_address)
        await process.run(stop=shutdown.asked, stop_now=shutdown.now, on_ready=ready)
