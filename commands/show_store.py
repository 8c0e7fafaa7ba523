"""The output of `baton store inspect`."""

from collections.abc import Iterator, Mapping

import msgspec
from rich.table import Table

from baton.core.store_admin import NodeStatus
from baton.files.terminal import new_console

TIERS = ("host", "ssd", "peer")
PATHS = {"ssd_read": "SSD read", "ssd_write": "SSD write", "peer_read": "peer read"}


def show(status: NodeStatus, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(status), indent=2).decode())
        return
    console = new_console()
    for line in heading(status):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_tiers(status.accounts))
    paths = _paths(status.accounts)
    if paths.row_count:
        console.print(paths)
    for line in details(status):
        console.print(line, highlight=False, soft_wrap=True)


def heading(status: NodeStatus) -> Iterator[str]:
    state = (
        "drained" if status.is_drained and status.is_draining else "draining" if status.is_draining else "ok"
    )
    who = f"store node {status.node_id} on {status.host}, pid {status.pid}"
    yield f"{who}, {state}, up {status.uptime_s:.0f} s"
    yield f"  socket {status.socket or '-'}, gRPC {status.address}, metrics http://{status.metrics_address}/metrics"
    workers = int(status.accounts.get("worker_count", 0))
    yield f"  policy {status.policy}, {workers} workers, {len(status.peers)} peers"


def details(status: NodeStatus) -> Iterator[str]:
    """Lines that only some nodes need."""
    accounts = status.accounts
    missed = int(accounts.get("miss_blocks", 0))
    if missed:
        yield f"not found anywhere: {missed} blocks, {size(accounts.get('miss_bytes', 0))}"
    for title, prefix in (
        ("dropped from host memory", "host.dropped."),
        ("dropped from SSD", "ssd.dropped."),
        ("offered but refused", "refused."),
        ("failed loads", "loads_failed."),
        ("corrupt", "corrupt."),
    ):
        reasons = {k.removeprefix(prefix): int(v) for k, v in accounts.items() if k.startswith(prefix) and v}
        if reasons:
            yield f"{title}: " + ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    errors = {k: int(accounts.get(f"ssd_{k}", 0)) for k in ("read_errors", "write_errors", "full", "skipped")}
    if any(errors.values()):
        yield "SSD: " + ", ".join(
            f"{count} {kind.replace('_', ' ')}" for kind, count in errors.items() if count
        )
    for tenant, host_bytes, ssd_bytes in status.tenants:
        yield f"tenant {tenant or '(none)'}: {size(host_bytes)} of host memory, {size(ssd_bytes)} of SSD"
    for node_id, address in status.peers:
        yield f"peer {node_id} at {address}"
    for note in status.notes:
        yield f"note: {note}"


def _tiers(accounts: Mapping[str, float]) -> Table:
    table = Table("tier", "blocks", "used", "limit", "pinned", "hit blocks", "hit bytes", "loaded", box=None)
    for tier in TIERS:
        limit = accounts.get(f"{tier}.limit_bytes", 0)
        loaded = accounts.get(f"loaded_blocks.{tier}", 0)
        if tier != "host" and not limit and not loaded:
            continue
        table.add_row(
            tier,
            f"{accounts.get(f'{tier}.block_count', 0):.0f}",
            size(accounts.get(f"{tier}.bytes", 0)),
            size(limit),
            f"{accounts.get(f'{tier}.pinned_count', 0):.0f}",
            f"{accounts.get(f'{tier}.hit_blocks', 0):.0f}",
            size(accounts.get(f"{tier}.hit_bytes", 0)),
            f"{loaded:.0f}",
        )
    return table


def _paths(accounts: Mapping[str, float]) -> Table:
    table = Table("path", "blocks", "bytes", "bandwidth", "latency", box=None)
    for name, title in PATHS.items():
        if accounts.get(f"{name}.block_count", 0):
            bandwidth = 1 / max(accounts.get(f"{name}.second_per_byte", 0.0), 1e-15)
            table.add_row(
                title,
                f"{accounts[f'{name}.block_count']:.0f}",
                size(accounts.get(f"{name}.bytes", 0)),
                f"{size(bandwidth)}/s",
                f"{accounts.get(f'{name}.latency_s', 0) * 1e3:.2f} ms",
            )
    return table


def size(count: float) -> str:
    """A size in the largest unit that leaves at least one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
