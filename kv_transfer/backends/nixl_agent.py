"""A typed, thin layer over NIXL's bindings: one agent, its registrations and its requests.

The bindings are used directly because the Python class fixes the progress thread's delay at 0, which
keeps one core busy per agent, all the time; with a delay the thread sleeps in poll() and still wakes on
events. Nothing here is pickled: descriptor lists are built from addresses.

Where UCX may touch a GPU there is no progress thread: before it sleeps it arms CUDA's events, for which it
has no context, and the process dies. `progress`, called often, does that thread's work; the thread that makes
the calls has the device's context current.

Not thread-safe by contract: one thread makes all calls of one agent.
"""

import importlib
import ipaddress
import logging
import os
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from baton.core.errors import SetupError

Request = NewType("Request", int)
"""One prepared or running transfer."""

DescriptorList = NewType("DescriptorList", int)
"""Equal pieces of one registered range, addressed by index."""

log = logging.getLogger(__name__)

PROGRESS_DELAY_US = 50_000
UCX_MODULES = "^efa"
"""UCX's EFA module loads the system's rdma libraries beside the bundled ones, and the process then
crashes at exit wherever rdma-core is installed. UCX reads the variable when it is loaded."""

BINDINGS = ("nixl._bindings", "nixl_cu13._bindings", "nixl_cu12._bindings")
"""The package `nixl` picks the wheel that fits this machine's CUDA; without it, the wheel that is there."""


def set_up_ucx(host: str, *, is_pool_in_host_memory: bool) -> None:
    """Call this before the first agent of a process. What the environment says already is kept."""
    _keep_within(host)
    if is_pool_in_host_memory:
        _leave_hooks_out()


def _keep_within(host: str) -> None:
    """UCX listens on every interface that it finds. A process that only this machine reaches (`host` is of
    loopback) needs one; for others UCX chooses, or UCX_NET_DEVICES."""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return  # a name
    if is_loopback:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")


def _leave_hooks_out() -> None:
    """Keep UCX from hooking calls that release memory (UCX_MEM_MMAP_HOOK_MODE). By default it rewrites the
    code of mmap and of seven calls like it, and spins for 50 ms after each, 0.4 s of a core. Its caches
    of registered memory need that; a pool is registered by us, and stays mapped while its agent lives.
    The other way to hook, the relocation table, makes a later import of torch abort."""
    os.environ.setdefault("UCX_MEM_MMAP_HOOK_MODE", "none")


class NixlPeerLost(Exception):
    """The request can never complete; nothing of it lands any more."""


def load_bindings() -> Any:
    """Raises SetupError if NIXL is not installed or cannot be loaded."""
    os.environ.setdefault("UCX_MODULES", UCX_MODULES)
    reasons: list[str] = []
    for name in BINDINGS:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {error}")
    raise SetupError(f"NIXL cannot be loaded: {'; '.join(reasons)}")


class NixlAgent:
    """Raises SetupError if UCX cannot work on this machine."""

    def __init__(self, name: str, *, progresses_itself: bool = True) -> None:
        """`progresses_itself`: with a thread of NIXL's own; otherwise `progress` is called."""
        self.name = name
        self._b = load_bindings()
        config = self._b.nixlAgentConfig()
        config.useProgThread = progresses_itself  # the target of a read must progress without being asked to
        config.pthrDelay = PROGRESS_DELAY_US
        config.syncMode = self._b.NIXL_THREAD_SYNC_STRICT
        self._regions: list[Any] = []
        try:
            self._agent = self._b.nixlAgent(name, config)
            # "peer": a dead peer fails its transfers instead of hanging them.
            self._agent.createBackend("UCX", {"ucx_error_handling_mode": "peer"})
        except Exception as error:  # the bindings' errors share no base class
            raise SetupError(f"NIXL's UCX backend cannot start: {error}") from error

    def _memory_kind(self, device: str) -> tuple[Any, int]:
        kind, _, index = device.partition(":")
        return (self._b.DRAM_SEG, 0) if kind == "cpu" else (self._b.VRAM_SEG, int(index or 0))

    def register(self, address: int, size_bytes: int, device: str = "cpu") -> None:
        """Raises SetupError."""
        kind, index = self._memory_kind(device)
        region = self._b.nixlRegDList(kind, [(address, size_bytes, index, "")])
        try:
            self._agent.registerMem(region, [])
        except Exception as error:
            raise SetupError(f"NIXL cannot register {size_bytes} B of {device}: {error}") from error
        self._regions.append(region)

    def metadata(self) -> bytes:
        return self._agent.getLocalMD()

    def add_remote(self, metadata: bytes) -> str:
        """The remote agent's name. Raises ValueError if NIXL does not understand the metadata."""
        try:
            return self._agent.loadRemoteMD(metadata).decode()
        except Exception as error:
            raise ValueError(f"NIXL refused the peer's metadata: {error}") from error

    def remove_remote(self, name: str) -> None:
        """No request to it may be in flight: NIXL would not stop its bytes from landing."""
        self._tidy(self._agent.invalidateRemoteMD, name)

    def pieces(
        self, owner: str | None, address: int, piece_bytes: int, count: int, device: str = "cpu"
    ) -> DescriptorList:
        """`count` adjacent pieces; `owner` None is this agent. Raises ValueError if they are not
        inside memory that the owner registered."""
        kind, index = self._memory_kind(device)
        row = np.array([[address, piece_bytes, index, piece_bytes, count]], np.uint64)
        try:
            who = self._b.NIXL_INIT_AGENT if owner is None else owner
            return DescriptorList(self._agent.prepXferDlist(who, kind, row))
        except Exception as error:
            raise ValueError(f"NIXL refused {count} x {piece_bytes} B at {address:#x}: {error}") from error

    def scattered(
        self, owner: str | None, places: npt.NDArray[np.uint64], device: str = "cpu"
    ) -> DescriptorList:
        """Pieces of any size anywhere: rows of (address, bytes). Raises ValueError as `pieces` does."""
        kind, index = self._memory_kind(device)
        whose = np.full(len(places), index, np.uint64)
        rows = np.column_stack([places, whose, places[:, 1], np.ones_like(whose)])
        try:
            who = self._b.NIXL_INIT_AGENT if owner is None else owner
            return DescriptorList(self._agent.prepXferDlist(who, kind, np.ascontiguousarray(rows)))
        except Exception as error:
            raise ValueError(f"NIXL refused {len(places)} pieces: {error}") from error

    def release_pieces(self, pieces: DescriptorList) -> None:
        self._tidy(self._agent.releasedDlistH, pieces)

    def make_read(
        self,
        local: DescriptorList,
        local_indices: npt.NDArray[np.int32],
        remote: DescriptorList,
        remote_indices: npt.NDArray[np.int32],
    ) -> Request:
        """NIXL itself merges neighbours that are adjacent on both sides. Raises NixlPeerLost."""
        try:
            read = self._b.NIXL_READ
            return Request(self._agent.makeXferReq(read, local, local_indices, remote, remote_indices))
        except Exception as error:
            raise NixlPeerLost(str(error)) from error

    def post(self, request: Request) -> bool:
        """Whether it is complete already, as within one host. The GIL is free meanwhile.
        Raises NixlPeerLost."""
        return self._is_done(self._agent.postXferReq, request)

    def is_done(self, request: Request) -> bool:
        """Raises NixlPeerLost."""
        return self._is_done(self._agent.getXferStatus, request)

    def _is_done(self, call: Any, request: Request) -> bool:
        try:
            return call(request) == self._b.NIXL_SUCCESS
        except Exception as error:
            raise NixlPeerLost(f"{type(error).__name__}: {error}") from error

    def progress(self) -> None:
        """Serve peers that read from here. Nobody sends notifications: to look for some is how the bindings
        let UCX go on."""
        try:
            self._agent.getNotifs({}, [])
        except Exception as error:
            log.debug("NIXL does not progress: %s", error)

    def release(self, request: Request) -> None:
        """Release a request that is complete or failed; releasing another one does not stop its bytes."""
        self._tidy(self._agent.releaseXferReq, request)

    def _tidy(self, call: Any, what: object) -> None:
        """What NIXL will not let go of leaks, and is logged: nobody could do better with the error."""
        try:
            call(what)
        except Exception as error:
            log.warning("NIXL keeps %s: %s", what, error)

    def close(self) -> None:
        """Stops the progress thread and closes every connection: afterwards nothing lands."""
        for region in self._regions:
            self._agent.deregisterMem(region, [])
        self._regions.clear()
        del self._agent
