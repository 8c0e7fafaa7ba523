"""`baton store` runs a host's store node, and inspects, drains and clears it."""

from typing import Annotated

import typer

app = typer.Typer(
    help="Run, inspect, drain and clear the KV store node of a host.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Sets = Annotated[
    list[str],
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Any setting of `baton config`; repeatable."),
]
Socket = Annotated[str | None, typer.Option(help="Unix socket of a store node on this host.")]
Node = Annotated[str, typer.Option(metavar="HOST:PORT", help="gRPC address of a store node.")]


@app.command()
def run(
    socket: Socket = None,
    ssd_dir: Annotated[
        str | None, typer.Option("--dir", help="Folder for SSD files; each node needs its own.")
    ] = None,
    host_bytes: Annotated[int | None, typer.Option(help="Bytes of host memory to use.")] = None,
    ssd_bytes: Annotated[int | None, typer.Option(help="Bytes of disk space to use, with --dir.")] = None,
    control: Annotated[str, typer.Option(metavar="HOST:PORT", help="Control plane to join.")] = "",
    directory: Annotated[
        str | None, typer.Option("--store", metavar="URL", help="Redis to join instead of the control plane.")
    ] = None,
    exit_with_parent: Annotated[bool, typer.Option(hidden=True)] = False,
    sets: Sets = [],  # noqa: B006 - typer copies it
) -> None:
    """Run this host's store node.

    SIGTERM offers its blocks to its peers and ends it.

    Prints `ready SOCKET GRPC_ADDRESS METRICS_ADDRESS` when it serves.

    Example: baton store run --socket /run/baton/store.sock --dir /mnt/nvme/baton --control 10.0.0.1:7000
    """
    from commands.serve_store import serve_store
    from commands.settings import load_config

    flags = {
        "store.socket": socket,
        "store.ssd_dir": ssd_dir,
        "store.host_bytes": host_bytes,
        "store.ssd_bytes": ssd_bytes,
        "store.directory": directory,
    }
    serve_store(load_config(sets, flags), control_address=control, exit_with_parent=exit_with_parent)


@app.command()
def inspect(
    socket: Socket = None,
    node: Node = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
    sets: Sets = [],  # noqa: B006 - typer copies it
) -> None:
    """Show the blocks that a store node holds, how useful they were, and the speed of its paths.

    Example: baton store inspect --socket /run/baton/store.sock
    """
    from commands.show_store import show
    from commands.store_calls import status

    show(status(socket, node, sets), as_json=as_json)


@app.command()
def drain(socket: Socket = None, node: Node = "", sets: Sets = []) -> None:  # noqa: B006
    """Drain a store node.

    It takes no new blocks and offers its most valuable ones to the other nodes. The process keeps running;
    end it when `baton store inspect` shows it as drained.

    Example: baton store drain --node 10.0.0.2:7101
    """
    from baton.core.store_admin import AskDrain
    from commands.store_calls import send

    typer.echo(send(socket, node, sets, AskDrain()))


@app.command()
def clear(
    socket: Socket = None,
    node: Node = "",
    tier: Annotated[str | None, typer.Option(help="Tier to clear: host or ssd; default: both.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only the blocks of this tenant.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    sets: Sets = [],  # noqa: B006 - typer copies it
) -> None:
    """Drop blocks of a store node.

    Blocks in use are dropped when their use ends. Dropped blocks are computed
    again when needed.

    Example: baton store clear --socket /run/baton/store.sock --tier ssd --yes
    """
    from baton.core.store_admin import AskClear
    from commands.store_calls import send, tier_named

    request = AskClear(tier_named(tier), tenant)
    if not yes:
        what = f"{tier or 'all tiers'}{'' if tenant is None else f', tenant {tenant}'}"
        typer.confirm(f"Drop the blocks of {what}?", abort=True)
    typer.echo(send(socket, node, sets, request))
