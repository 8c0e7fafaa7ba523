"""The Ray that a process starts or joins."""

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
from control_plane.ray_agents import small_agents

log = logging.getLogger(__name__)

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # the default of 15 would let everything else on the machine run first
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
"""Environment for a Ray cluster that somebody else started. Its owner decides whether it wants tokens."""

LOCAL_ENVIRONMENT = {
    # Whoever reaches a port of Ray can run code as this user. Ray does not accept a loopback address, and
    # listens on all interfaces, unless this setting says that the machine has no cluster.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",  # keeps out other users of this machine; a variable, so that Ray writes no file
}
NOT_NEEDED = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's `Node` that start its autoscaler, the reader of its workers' logs, and its dashboard
(which `include_dashboard=False` only empties). Nothing here uses them, and each is an interpreter to
start."""

OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MB; nothing of ours goes through it

NAMESPACE = "baton"
"""Ray namespace of our drivers, in a Ray that others may use too."""

REACH_S, REACH_AGAIN_S = 5.0, 0.25
"""Time for a remote Ray to answer, since it may be starting as we are; and the time between attempts."""

SHUTDOWN_S = 10.0
"""Time for Ray's own orderly end; whatever is left then is killed."""


def namespace_of(control_address: str) -> str:
    """Return the Ray namespace of one control plane's workers. Every actor in it belongs to that control
    plane, whoever else uses this Ray."""
    return f"{NAMESPACE} {control_address}"


def ray_environment(*, is_local: bool) -> dict[str, str]:
    """Return variables to set before Ray is imported; those that the operator set stay. `is_local` means that
    Ray is started here for this cluster alone, and gets a token that nobody else knows."""
    ours = {**RAY_ENVIRONMENT, **(LOCAL_ENVIRONMENT if is_local else JOINED_ENVIRONMENT)}
    if is_local and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        ours["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return {name: os.environ.get(name, value) for name, value in ours.items()}


class RayCluster:
    """A Ray cluster; `ray` is the module once it is open."""

    def __init__(self, address: str) -> None:
        """An empty `address` starts a Ray of our own on this machine, which ends with this process."""
        self._address = address
        self._ray: Any = None
        self.is_lost = False
        """Ray is dead and must not be called any more, since its calls would wait for it for minutes."""

    @property
    def is_ours(self) -> bool:
        return not self._address

    @property
    def ray(self) -> Any:
        assert self._ray is not None, "not open"
        return self._ray

    @property
    def address(self) -> str:
        """Address for others to join. Ray must be open."""
        return self.ray.get_runtime_context().gcs_address

    @property
    def host(self) -> str:
        """Address of this process as Ray's nodes know it. Ray must be open."""
        return str(self.ray.util.get_node_ip_address())

    def key(self) -> dict[str, str]:
        """Return the variables for a process that may join this Ray, if it is ours. Other children do not get
        them."""
        return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}

    def prepare(self) -> None:
        """Set the variables that Ray reads, so that `key` has them before Ray is open."""
        os.environ.update(ray_environment(is_local=self.is_ours))

    async def open(self) -> None:
        """Start or join Ray. Raises SetupError."""
        await _must_answer(self._address)
        self.prepare()
        self._ray = await asyncio.to_thread(importlib.import_module, "ray")
        _quieten()
        try:
            await asyncio.to_thread(self._init)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = self._address or "on this machine"
            raise SetupError(f"Ray cannot start or be joined {where}: {first_line(error)}") from error
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
        with without_helpers(), small_agents():
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
    """Raise SetupError if nobody listens at HOST:PORT. Ray itself would take a minute to say so, in pages.
    Other kinds of address (`auto`, or none) are not checked."""
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
    """Start a Ray within this context without the processes of `NOT_NEEDED`. A version of Ray that has them
    under other names starts them, and takes a second longer."""
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
    """Restore Python's signal handlers. Ray's own handler of SIGTERM prints a stack and ends the process.
    Main thread only."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if (handler := signal.getsignal(number)) is not None:
            signal.signal(number, handler)
            signal.siginterrupt(number, False)


def _quieten() -> None:
    """Log one line for each process that dies, where Ray prints a paragraph on standard output."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    module = importlib.import_module("ray._private.worker")
    if hasattr(module, "print_to_stdstream"):
        setattr(module, "print_to_stdstream", _log_ray_lines)  # noqa: B010 - private, by name


async def _in_daemon(call: Callable[[], object], *, timeout_s: float) -> None:
    """Run a call in a thread that does not keep the process alive. A call that hangs is left behind after
    `timeout_s`, and the caller goes on."""
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
        log.error("Ray did not shut down within %g s; going on without waiting", timeout_s)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _log_ray_lines(data: Mapping[str, Any], *_: Any, **__: Any) -> None:
    for line in data.get("lines", ()):
        log.debug("ray: %s", line)
