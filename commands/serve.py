"""Commands that run the processes of a cluster until they are stopped."""

import asyncio
import contextlib
import importlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from baton.config import Config
from baton.core import garbage
from baton.core.errors import PlatformLost, SetupError
from baton.core.ids import WorkerId
from baton.core.messages import Member, Role
from baton.telemetry.logs import configure_logs
from baton.wire.parent import end_with_parent
from baton.wire.transport import secure
from control_plane.child import PARENT_VARIABLE
from control_plane.ray_ops import worker_environment
from engine.lean_torch import import_torch
from engine.model_files.quick_transformers import import_transformers

log = logging.getLogger(__name__)

DASHBOARD_NICENESS = 5
"""The dashboard gives way to all that serves requests."""


def serve_cluster(config: Config, *, with_router: bool) -> None:
    """Raises SetupError."""
    with garbage.uncollected():
        from control_plane.launch import run_cluster

    configure_logs("serve", config.telemetry)
    secure(config.tls, config.access)
    if with_router:
        from router.setup_check import check_router_setup

        check_router_setup(config)

    def control_command(is_local: bool) -> Sequence[str]:
        command = [sys.executable, "-m", "baton", "control", "--only", "--exit-with-parent"]
        return [*command, "--local-ray"] if is_local else command

    def router_command(control_address: str) -> Sequence[str]:
        command = [sys.executable, "-m", "baton", "router", "--control", control_address]
        return [*command, "--exit-with-parent"]

    def store_command(control_address: str, socket: str) -> Sequence[str]:
        command = [sys.executable, "-m", "baton", "store", "run", "--control", control_address]
        return [*command, "--socket", socket, "--exit-with-parent"]

    running = run_cluster(
        config,
        control_command=control_command,
        router_command=router_command if with_router else None,
        store_command=store_command,
        announce=lambda text: print(text, flush=True),
    )
    try:
        asyncio.run(running)
    except PlatformLost as error:
        log.critical("%s: this process ends and has to be restarted", error)
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)  # Ray's clean-up at exit would wait for the lost cluster


def serve_control(config: Config, *, is_local: bool, exit_with_parent: bool) -> None:
    """Raises SetupError."""
    from control_plane.child import SETUP_ERROR_PREFIX, SETUP_ERROR_STATUS
    from control_plane.launch import check_setup

    configure_logs("control", config.telemetry)
    secure(config.tls, config.access)
    if exit_with_parent:
        die_with_parent()
        config = _told_where_ray_is(config)
    else:
        check_setup(config, with_router=False)
    if not config.cluster.ray_address:
        raise SetupError("--only needs a running Ray cluster: name it with --ray-address")
    try:
        run_on_uvloop(_control(config, is_local=is_local, has_parent=exit_with_parent))
    except SetupError as error:
        if not exit_with_parent:
            raise
        tell_parent(f"{SETUP_ERROR_PREFIX}{error}")
        raise SystemExit(SETUP_ERROR_STATUS) from None


def _told_where_ray_is(config: Config) -> Config:
    """Return the configuration with the address of Ray, which the parent writes when Ray has started. The
    control plane's libraries are loaded meanwhile."""
    with garbage.uncollected():
        for name in ("ray", "control_plane.control", "worker.actor", "worker.expert_rank_actor"):
            importlib.import_module(name)
    address = sys.stdin.readline().strip()
    if not address:
        raise SystemExit(1)  # the parent has ended, or Ray did not start, which it says
    cluster = config.cluster.model_copy(update={"ray_address": address})
    return config.model_copy(update={"cluster": cluster})


def serve_dashboard(config: Config, *, control_address: str, exit_with_parent: bool) -> None:
    """Raises SetupError."""
    from control_plane.child import READY_PREFIX, SETUP_ERROR_PREFIX, SETUP_ERROR_STATUS

    with contextlib.suppress(OSError):  # before it imports what takes more than a second of a core
        os.nice(DASHBOARD_NICENESS)
    configure_logs("dashboard", config.telemetry)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # uvicorn would repeat our own messages
    if exit_with_parent:
        die_with_parent()
    try:
        with garbage.uncollected():
            from control_plane.dashboard.process import run_dashboard

        secure(config.tls, config.access)
        asyncio.run(
            run_dashboard(
                config, control_address, on_ready=lambda where: tell_parent(f"{READY_PREFIX}{where}")
            )
        )
    except SetupError as error:
        if not exit_with_parent:
            raise
        tell_parent(f"{SETUP_ERROR_PREFIX}{error}")
        raise SystemExit(SETUP_ERROR_STATUS) from None


async def _control(config: Config, *, is_local: bool, has_parent: bool) -> None:
    from commands.settings import overlay
    from control_plane.child import READY_PREFIX, SETUP_ERROR_PREFIX
    from control_plane.control import Control
    from control_plane.control_child import DASHBOARD_PREFIX, SETTLED_LINE
    from control_plane.shutdown import Shutdown
    from worker.actor import WorkerActor
    from worker.expert_rank_actor import ExpertRankActor

    def dashboard_command(control_address: str) -> Sequence[str]:
        command = [sys.executable, "-m", "baton", "dashboard", "--control", control_address]
        return [*command, "--exit-with-parent"]

    shutdown = Shutdown()
    record = Path(config.cluster.record) if config.cluster.record else None
    with shutdown.on_signals():
        control = Control(
            config,
            actor_class=WorkerActor,
            expert_actor_class=ExpertRankActor,
            overlay=overlay,
            is_local=is_local,
            record=record,
        )
        if config.dashboard.enabled:
            control.with_dashboard(
                dashboard_command, announce=lambda where: tell_parent(f"{DASHBOARD_PREFIX}{where}")
            )
        await control.run(
            shutdown,
            ready=lambda where: tell_parent(f"{READY_PREFIX}{where}"),
            settled=lambda: tell_parent(SETTLED_LINE),
            # The parent ends the routers first and reports this text only, before routers report a lost
            # control plane.
            failed=lambda text: tell_parent(f"{SETUP_ERROR_PREFIX}{text}") if has_parent else None,
        )


def serve_router(
    config: Config, *, control_address: str, workers: Sequence[str], exit_with_parent: bool
) -> None:
    """Raises SetupError."""
    _leave_torch_out()
    with garbage.uncollected():
        import_transformers()
        from control_plane.child import READY_PREFIX, SETUP_ERROR_PREFIX, SETUP_ERROR_STATUS
        from router.process import run_router

    configure_logs("router", config.telemetry)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # uvicorn would repeat our own messages
    if exit_with_parent:
        die_with_parent()
    if not control_address and not workers:
        raise SetupError("no workers: name a control plane with --control, or workers with --worker")
    try:
        secure(config.tls, config.access)
        running = run_router(
            config,
            control_address=control_address,
            workers=list(workers),
            on_ready=lambda urls: tell_parent(f"{READY_PREFIX}{' '.join(urls)}"),
        )
        run_on_uvloop(running)
    except SetupError as error:
        if not exit_with_parent:
            raise
        tell_parent(f"{SETUP_ERROR_PREFIX}{error}")
        raise SystemExit(SETUP_ERROR_STATUS) from None


def _leave_torch_out() -> None:
    """Keep torch out of a router: transformers imports it wherever it finds it, even for a tokenizer. The
    router's image has no torch either. This saves seconds at the start, and hundreds of megabytes."""
    modules: dict[str, Any] = sys.modules
    modules.setdefault("torch", None)  # None makes Python act as if the module did not exist
    # transformers would warn about the missing torch
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def serve_worker(config: Config, *, role_name: str, replica: str, control_address: str, port: int) -> None:
    """Raises SetupError."""
    from control_plane.workers import usable_cores
    from engine.model_files.check import check_shapes

    try:
        role = Role(role_name)
    except ValueError:
        raise SetupError(f"--role {role_name} is not a role: choose prefill, decode or aggregated") from None
    if not config.model.path:
        raise SetupError("no model: name a folder or hub id with --model")
    config = config.of_role(role)
    check_shapes(config)
    threads = config.engine.threads
    if not threads and (rank_count := config.shape_of(role).rank_count) > 1:
        threads = max(1, len(usable_cores()) // rank_count)
    for name, value in worker_environment(threads).items():
        os.environ.setdefault(name, value)  # before torch is imported
    worker_id = WorkerId(f"{replica or role_name}.{secrets.token_hex(4)}")
    configure_logs(worker_id, config.telemetry)
    secure(config.tls, config.access)
    try:
        status = run_on_uvloop(_worker(worker_id, role, config, control_address, port))
    except SetupError:
        raise
    except Exception:
        log.exception("%s crashed", worker_id)
        status = 1
    logging.shutdown()
    sys.stdout.flush()
    # Everything that matters is closed by now. A hanging engine thread, or a transfer library that cannot be
    # unloaded, must not turn an orderly end into a hang or a SIGSEGV.
    os._exit(status)


async def _worker(worker_id: WorkerId, role: Role, config: Config, control_address: str, port: int) -> int:
    with garbage.uncollected():
        import_torch(config.model.device)
        from control_plane.shutdown import Shutdown
        from worker.process import WorkerProcess

    def ready(member: Member) -> None:
        tell_parent(f"ready {member.address}")

    shutdown = Shutdown()
    with shutdown.on_signals():
        process = WorkerProcess(worker_id, role, config, control_address=control_address, port=port)
        await process.run(stop=shutdown.asked, stop_now=shutdown.now, on_ready=ready)
    return 0


def run_on_uvloop(main: Coroutine[Any, Any, Any]) -> Any:
    import uvloop

    return uvloop.run(main)


def tell_parent(line: str) -> None:
    """Print a line that the parent reads. If the parent is gone, this process ends in order and in silence,
    as `die_with_parent` has it end."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is still buffered goes there
        os.close(nowhere)
        os.kill(os.getpid(), signal.SIGTERM)


def die_with_parent() -> None:
    """Ask Linux to send SIGTERM when the process that started this one is gone, however it ended."""
    named = os.environ.get(PARENT_VARIABLE, "")
    end_with_parent(int(named) if named else None)
