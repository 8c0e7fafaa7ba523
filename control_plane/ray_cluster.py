"""The Ray that a process starts, or joins."""

import asyncio
import atexit
import contextlib
import importlib
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

from baton.core.errors import SetupError

log = logging.getLogger(__name__)

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 by default: whatever else runs on the machine would come first
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A lost node is noticed in 1.5 s instead of 15.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # Our processes fork children after gRPC has threads; its fork handlers only get in the way.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
JOINED_ENVIRONMENT = {"RAY_AUTH_MODE": "disabled"}
"""Of a Ray cluster that somebody else started: whether it wants tokens is for them to say."""

LOCAL_ENVIRONMENT = {
    # Who reaches a port of Ray's runs what they like as us. Ray takes no address of loopback for an answer,
    # and listens on all interfaces, unless it is told that this machine has no cluster.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",  # for the other users of this machine; as a variable, Ray writes no file
}
NOT_NEEDED = ("start_monitor", "start_log_monitor", "start_api_server")
"""Of Ray's `Node`: what starts its autoscaler, the reader of its workers' logs, and its dashboard (which
`include_dashboard=False` only empties). Nobody asks them here, and each is an interpreter to start."""

OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MB; nothing of ours goes through it

NAMESPACE = "baton"
"""Of our drivers, in a Ray that others may use too."""

REACH_S, REACH_AGAIN_S = 5.0, 0.25
"""For a Ray elsewhere to answer: it may be starting, as we are."""

SHUTDOWN_S = 10.0
"""For Ray's own orderly end; whatever is left then is killed."""


def namespace_of(control_address: str) -> str:
    """Of the workers of one control plane: all that is there is its own, whoever else uses this Ray."""
    return f"{NAMESPACE} {control_address}"


def ray_environment(*, is_local: bool) -> dict[str, str]:
    """To be set before Ray is imported; what the operator set stays. `is_local`: Ray is started here, for
    this cluster alone, and gets a token that nobody else knows."""
    ours = {**RAY_ENVIRONMENT, **(LOCAL_ENVIRONMENT if is_local else JOINED_ENVIRONMENT)}
    if is_local and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        ours["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return {name: os.environ.get(name, value) for name, value in ours.items()}


class RayCluster:
    """`ray` once it is open."""

    def __init__(self, address: str) -> None:
        """`address` empty: start a Ray of our own on this machine, which ends with this process."""
        self._address = address
        self._ray: Any = None
        self.is_lost = False
        """Ray is dead: it must not be called any more, since its calls would wait for it for minutes."""

    @property
    def is_ours(self) -> bool:
        return not self._address

    @property
    def ray(self) -> Any:
        assert self._ray is not None, "not open"
        return self._ray

    @property
    def address(self) -> str:
        """Where others join. Once it is open."""
        return self.ray.get_runtime_context().gcs_address

    @property
    def host(self) -> str:
        """Of this process, as Ray's nodes know it. Once it is open."""
        return str(self.ray.util.get_node_ip_address())

    def key(self) -> dict[str, str]:
        """Variables of a process that may join this Ray, if it is ours: other children are not given them."""
        return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}

    async def open(self) -> None:
        """Raises SetupError."""
        await _must_answer(self._address)
        os.environ.update(ray_environment(is_local=self.is_ours))
        self._ray = await asyncio.to_thread(importlib.import_module, "ray")
        _quieten()
        try:
            await asyncio.to_thread(self._init)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = self._address or "on this machine"
            raise SetupError(f"Ray does not start {where}: {first_line(error)}") from error
        finally:
            _take_back_signals()

    def _init(self) -> None:
        common: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "configure_logging": False,
            "namespace": NAMESPACE,
        }
        if self._address:
            host = self._address.rpartition(":")[0]
            if host in ("127.0.0.1", "localhost"):
                common["_node_ip_address"] = "127.0.0.1"
            self._ray.init(address=self._address, **common)
            return
        with without_helpers():
            self._ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                # Idle interpreters that nobody asked for cost memory and start-up time.
                _system_config={"prestart_worker_first_driver": False, "num_workers_soft_limit": 0},
                **common,
            )

    async def close(self) -> None:
        """Stop Ray if it is ours, else leave it. Idempotent."""
        if self._ray is None or self.is_lost or not self._ray.is_initialized():
            return
        # Ray would do the same again at the interpreter's exit, and wait there for one that hangs.
        atexit.unregister(self._ray.shutdown)
        await _in_daemon(self._ray.shutdown, timeout_s=SHUTDOWN_S)


async def _must_answer(address: str) -> None:
    """Raises SetupError if nobody listens at HOST:PORT: Ray itself would take a minute to say so, in pages.
    Of other kinds of address (`auto`, and none) nothing is known."""
    host, colon, port = address.rpartition(":")
    if not colon or "://" in address or not port.isdecimal():
        return
    deadline_s = asyncio.get_running_loop().time() + REACH_S
    while True:
        try:
            async with asyncio.timeout_at(deadline_s):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            return
        except (OSError, OverflowError) as error:  # a timeout is an OSError
            if asyncio.get_running_loop().time() + REACH_AGAIN_S >= deadline_s:
                reason = getattr(error, "strerror", None) or str(error) or "no answer"
                raise SetupError(
                    f"no Ray answers at {address} ({reason}): start one there with `ray start --head`, or "
                    "leave --ray-address out to have one started here"
                ) from None
        await asyncio.sleep(REACH_AGAIN_S)


@contextlib.contextmanager
def without_helpers() -> Generator[None]:
    """A Ray that is started meanwhile, by this process, has none of `NOT_NEEDED`. A version of Ray that has
    them under other names starts them, and takes a second longer."""
    node: Any = importlib.import_module("ray._private.node").Node
    theirs = {name: getattr(node, name) for name in NOT_NEEDED if hasattr(node, name)}
    for name in theirs:
        setattr(node, name, _nothing)
    try:
        yield
    finally:
        for name, method in theirs.items():
            setattr(node, name, method)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _take_back_signals() -> None:
    """Ray's own handler of SIGTERM prints a stack and ends the process, whatever Python was told to do.
    Main thread only."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if (handler := signal.getsignal(number)) is not None:
            signal.signal(number, handler)
            signal.siginterrupt(number, False)


def _quieten() -> None:
    """Ray prints a paragraph on standard output for each process that dies; we log a line."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    module = importlib.import_module("ray._private.worker")
    if hasattr(module, "print_to_stdstream"):
        setattr(module, "print_to_stdstream", _log_ray_lines)  # noqa: B010 - private, by name


async def _in_daemon(call: Callable[[], object], *, timeout_s: float) -> None:
    """In a thread that does not keep the process alive: a call that hangs is left behind after
    `timeout_s`, and whoever asked goes on."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            call()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="ray-shutdown", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            await done.wait()
    except TimeoutError:
        log.error("Ray does not shut down within %g s, going on without", timeout_s)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _log_ray_lines(data: Mapping[str, Any], *_: Any, **__: Any) -> None:
    for line in data.get("lines", ()):
        log.debug("ray: %s", line)
