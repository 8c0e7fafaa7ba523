"""The store node of this host as a supervised child process, and its socket."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import psutil

from baton.config import Config, StoreConfig
from baton.core.errors import SetupError
from control_plane.child import LIVE_PATH, Child, child_environment
from control_plane.plane import restart_policy
from control_plane.runtime_folder import RuntimeFolder
from kv_store.ssd.folder import own_folder

log = logging.getLogger(__name__)

READY_S = 15.0
"""Time that the cluster's start waits for the store node; after that the cluster is ready without it."""

END_S = 5.0
"""Time for the node to end after its own drain, which has the same limit as the router's."""

StoreCommand = Callable[[str, str], Sequence[str]]
"""Function that returns the argv of a store node, given the address of the directory and the path of its
socket."""


def check_store(config: StoreConfig) -> None:
    """Check the configuration of a store on this machine. Raises SetupError for what can be known
    beforehand."""
    total = psutil.virtual_memory().total
    if config.host_bytes > total:
        raise SetupError(
            f"store.host_bytes={config.host_bytes} exceeds this machine's memory of {total} bytes: lower it"
        )
    if config.ssd_dir:
        own_folder(config.ssd_dir).release()


class StoreChild(Child):
    """The store node as a child. Its ready line has the socket's path, the gRPC address and the metrics
    address, separated by blanks."""

    name = "store node"

    def live_url(self, ready: str) -> str:
        return f"http://{ready.rsplit(' ', 1)[-1]}{LIVE_PATH}"


class LocalStore:
    """This host's store node for the workers of a cluster, unless the configuration names another
    (`store.socket`) or none (`store.host_bytes` 0)."""

    def __init__(self, config: Config, command: StoreCommand | None, folder: RuntimeFolder) -> None:
        self._command, self._cluster = command, config.cluster
        self._is_ours = False
        self._child: StoreChild | None = None
        self.config = config
        """Configuration for the workers, which names the socket."""
        if command is not None and config.store.host_bytes and not config.store.socket:
            self._is_ours = True
            store = config.store.model_copy(update={"socket": folder.socket()})
            self.config = config.model_copy(update={"store": store})

    def start(self, control_address: str) -> StoreChild | None:
        """Return the child whose `run` must become a task, or None if no store node runs here."""
        if not self._is_ours or self._command is None:
            return None
        log.info("store node of this host starts at %s", self.config.store.socket)
        self._child = StoreChild(
            self._command(control_address, self.config.store.socket),
            environment=child_environment(self.config),
            policy=restart_policy(self._cluster),
            silence_s=self._cluster.router_silence_s,
        )
        return self._child

    async def until_ready(self) -> None:
        """Wait for the store node, for READY_S at most: the cluster serves without it. Raises SetupError."""
        if self._child is None:
            return
        ready = self._child.ready
        await asyncio.wait({ready}, timeout=READY_S)
        if not ready.done():
            log.warning("store node is not ready yet; workers compute everything meanwhile")
        else:
            ready.result()

    def text(self) -> str:
        """Return the text for the cluster's ready line."""
        store = self.config.store
        if self._child is None:
            return f"KV store at {store.socket}" if store.socket else "no KV store"
        if not self._child.ready.done():
            return "KV store not ready yet"
        ssd = f" + {store.ssd_bytes / 2**30:.1f} GiB on SSD" if store.ssd_dir else ""
        return f"KV store of {store.host_bytes / 2**30:.1f} GiB{ssd}"

    async def stop(self, timeout_s: float) -> None:
        """Let the node offer its blocks to its peers, for little more than this time."""
        if self._child is not None:
            await self._child.stop(timeout_s + END_S)

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
