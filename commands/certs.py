"""`baton certs` makes an authority and certificates for a private cluster."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from baton.config import TlsConfig
from baton.core.errors import SetupError
from baton.files.terminal import new_console
from baton.wire.parties import Party

if TYPE_CHECKING:
    from commands.certificates import Authority, Issued

AUTHORITY_DAYS = 3650
DAYS = 90
RENEW_WITHIN_DAYS = 30
DEFAULT_NAME = "node"
OPERATOR_NAME = "operator"

app = typer.Typer(
    help="Create and renew certificates for mutual TLS between the processes of a private cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Folder = Annotated[Path, typer.Argument(help="Folder with the certificates and keys.")]
Domain = Annotated[
    str, typer.Option(help="Value of tls.domain; clusters that share an authority have different ones.")
]
Days = Annotated[float, typer.Option(min=0.01, max=3650, help="Days that the certificates are valid.")]
AuthorityDays = Annotated[int, typer.Option(min=1, max=36_500, help="Days that the authority is valid.")]
DOMAIN = TlsConfig().domain


@app.command()
def init(
    folder: Folder,
    domain: Domain = DOMAIN,
    days: Days = DAYS,
    authority_days: AuthorityDays = AUTHORITY_DAYS,
) -> None:
    """Make an authority, one certificate for all processes of the cluster, and one for operators.

    Example: baton certs init certs && baton serve --model Qwen/Qwen3-0.6B --set tls.ca=certs/ca.pem
    --set tls.cert=certs/node.pem --set tls.key=certs/node.key
    """
    from commands.certificates import Authority

    _check_domain(domain)
    now = datetime.now(UTC)
    authority = Authority.make(folder, days=authority_days, now=now)
    ours = [party for party in Party if party is not Party.OPERATOR]
    authority.issue(DEFAULT_NAME, ours, domain=domain, days=days, now=now)
    authority.issue(OPERATOR_NAME, [Party.OPERATOR], domain=domain, days=days, now=now)
    typer.echo(
        f"{folder}/ca.pem, {DEFAULT_NAME}.pem, {OPERATOR_NAME}.pem. Every host needs ca.pem and "
        f"{DEFAULT_NAME}.pem with {DEFAULT_NAME}.key; ca.key stays here. They are valid for {days:g} days; "
        f"renew them with `baton certs renew {folder}`"
    )


@app.command()
def issue(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="Name of the files: NAME.pem and NAME.key.")],
    role: Annotated[
        list[Party] | None,
        typer.Option(help="Part that it is for; repeatable. Default: all but operator."),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Host name or address to add; repeatable. Baton itself checks the roles only."),
    ] = None,
    domain: Domain = DOMAIN,
    days: Days = DAYS,
) -> None:
    """Make one more certificate, for example for the hosts that only have workers.

    Example: baton certs issue certs gpu-hosts --role worker --role store
    """
    _check_domain(domain)
    parties = role or [party for party in Party if party is not Party.OPERATOR]
    path = _authority(folder).issue(
        name, parties, domain=domain, hosts=host or [], days=days, now=datetime.now(UTC)
    )
    typer.echo(f"{path} and its key, for {', '.join(parties)}")


@app.command()
def renew(
    folder: Folder,
    names: Annotated[
        list[str] | None, typer.Argument(help="Certificates to renew; default: those that end soon.")
    ] = None,
    within_days: Annotated[
        float, typer.Option(min=0, help="Without names: renew those that end within this many days.")
    ] = RENEW_WITHIN_DAYS,
    days: Days = DAYS,
) -> None:
    """Renew the key and the end of certificates.

    Running processes use the new files for their next
    connection, without a restart.

    Example: baton certs renew certs --within-days 30
    """
    authority, now = _authority(folder), datetime.now(UTC)
    due = now + timedelta(days=within_days)
    chosen = names or [one.name for one in _issued(folder) if one.parties and one.ends <= due]
    for name in chosen:
        typer.echo(f"{authority.renew(name, days=days, now=now)} renewed")
    if not chosen:
        typer.echo(f"nothing ends within {within_days:g} days")


@app.command("list")
def list_certificates(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the certificates of a folder, with their parts and ends.

    The exit status is 1 if a certificate has ended.

    Example: baton certs list certs
    """
    found, now = _issued(folder), datetime.now(UTC)
    if as_json:
        print(json.dumps(msgspec.to_builtins(found), indent=2))
    else:
        table = Table(box=None, pad_edge=False)
        for heading in ("name", "for", "domain", "hosts", "ends (UTC)"):
            table.add_column(heading)
        for one in found:
            parties = ", ".join(one.parties) or one.subject
            ends = f"{one.ends:%Y-%m-%d %H:%M}" + (" ended" if one.ends <= now else "")
            table.add_row(one.name, parties, one.domain, ", ".join(one.hosts), ends)
        new_console().print(table)
    raise typer.Exit(int(any(one.ends <= now for one in found)))


@app.command("rotate-ca")
def rotate_ca(
    folder: Folder,
    authority_days: AuthorityDays = AUTHORITY_DAYS,
    finish: Annotated[bool, typer.Option("--finish", help="Stop trusting the former authority.")] = False,
) -> None:
    """Change the authority of a running cluster, in three steps.

    (1) Run this without --finish, and copy
    ca.pem, which then has both authorities, to all hosts. (2) Run `baton certs renew FOLDER --within-days
    99999`, and copy the certificates. (3) Run this with --finish, and copy ca.pem once more.

    Example: baton certs rotate-ca certs
    """
    authority = _authority(folder)
    if finish:
        if not (dropped := authority.drop_former()):
            raise SetupError(f"{folder}/ca.pem has no former authority: nothing to finish")
        typer.echo(f"{dropped} former authorities are no longer trusted: copy ca.pem to all")
        return
    authority.rotate(days=authority_days, now=datetime.now(UTC))
    typer.echo(
        f"{folder}/ca.pem has the new authority and the former one: copy it to all hosts, then run "
        f"`baton certs renew {folder} --within-days 99999`"
    )


def _authority(folder: Path) -> "Authority":
    from commands.certificates import Authority

    return Authority(folder)


def _issued(folder: Path) -> "list[Issued]":
    from commands.certificates import listed

    return listed(folder)


def _check_domain(domain: str) -> None:
    try:
        TlsConfig(domain=domain)
    except ValueError:
        raise SetupError(f"--domain {domain!r:.80}: use small letters, digits, '.' and '-'") from None
