"""`baton tokens` manages the tokens of those who may view or operate a cluster."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from baton.config import Config
from baton.core.errors import SetupError
from baton.core.tokens import NAME, Scope, TokenBook, TokenRecord, digest_of, read_book, write_book
from baton.files.outputs import write_whole
from baton.files.terminal import new_console
from baton.files.token_places import new_token

app = typer.Typer(
    help="Create, list and revoke tokens of the people and programs that operate a cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Place = Annotated[str, typer.Option("--tokens", metavar="FILE", help="Token file, as in access.tokens.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Owner of the token.")],
    scope: Annotated[
        Scope, typer.Option(help="view: look only. operate: also scale, drain, switch roles and clear.")
    ],
    tokens: Place = "",
) -> None:
    """Make a token and print it.

    It is shown only this once, because only its digest is stored.

    Example: baton tokens create ada --scope operate --tokens tokens.txt > ada.token
    """
    if not NAME.fullmatch(name):
        raise SetupError(f"name {name!r:.80}: use 1 to 64 letters, digits, '_', '.', '@', '-'")
    path = _path(tokens)
    book, token = _read(path, may_be_missing=True), new_token()
    _write(path, TokenBook([*book.records, TokenRecord(name, scope, digest_of(token))]))
    print(token)


@app.command("list")
def list_tokens(tokens: Place = "") -> None:
    """List the owners of tokens and what each may do.

    Example: baton tokens list --tokens tokens.txt
    """
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "scope", "id"):
        table.add_column(heading)
    for record in _read(_path(tokens)).records:
        table.add_row(record.name, record.scope, record.sha256[:12])
    new_console().print(table)


@app.command()
def revoke(
    names: Annotated[list[str], typer.Argument(help="Names or ids as `baton tokens list` shows them.")],
    tokens: Place = "",
) -> None:
    """Revoke tokens.

    Processes that read this file refuse them from then on.

    Example: baton tokens revoke ada --tokens tokens.txt
    """
    path = _path(tokens)
    records = _read(path).records
    kept = [r for r in records if r.name not in names and r.sha256[:12] not in names]
    known = {r.name for r in records} | {r.sha256[:12] for r in records}
    if missing := [name for name in names if name not in known]:
        raise SetupError(f"no token of {missing[0][:12]!r}: list the tokens with `baton tokens list`")
    _write(path, TokenBook(kept))
    print(f"{len(records) - len(kept)} tokens revoked")


def _path(tokens: str) -> Path:
    place = tokens or Config().access.tokens
    if not place or place.startswith("env:"):
        raise SetupError("name the file: --tokens FILE, or BATON_ACCESS__TOKENS")
    return Path(place)


def _read(path: Path, *, may_be_missing: bool = False) -> TokenBook:
    if may_be_missing and not path.exists():
        return TokenBook()
    try:
        return read_book(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _write(path: Path, book: TokenBook) -> None:
    """Write the file in one step. A new file is readable by its owner only."""
    write_whole(path, (write_book(book).encode(),), mode=0o600)
