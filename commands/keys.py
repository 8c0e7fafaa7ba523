"""`baton keys` manages API keys and their tenants, in a file or in Redis."""

import asyncio
import json
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.table import Table

from baton.config import Config
from baton.core.errors import SetupError
from baton.files.structured_file import check_ending
from baton.files.terminal import new_console
from kv_store.directory.interface import DirectoryLost
from router.tenants.key_files import changing, read_file, write_file
from router.tenants.keyring import FileSource, RedisSource, source_of
from router.tenants.keys import (
    NAME,
    KeyBook,
    KeyRecord,
    Tenant,
    digest_of,
    new_key,
    with_key,
    without_keys,
)

T = TypeVar("T")

PLACE = Annotated[
    str, typer.Option("--keys", help="File (.toml, .yaml, .json) or Redis URL, as in router.keys.")
]
NAME_OPTION = Annotated[
    str, typer.Option("--directory-name", help="Name of the directory in Redis, as in store.directory_name.")
]
app = typer.Typer(help="Create, list and revoke API keys and their tenants.", no_args_is_help=True)


@app.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Tenant of the key; created if it does not exist.")],
    keys: PLACE = "",
    directory_name: NAME_OPTION = "default",
    note: Annotated[str, typer.Option(help="Note that `baton keys list` shows.")] = "",
    limit: Annotated[
        list[str] | None,
        typer.Option("--set", help="Limit of the tenant, such as requests_per_minute=60; repeatable."),
    ] = None,
) -> None:
    """Make a key and print it.

    It is shown only this once, because only its digest is stored.

    Example: baton keys create acme --keys keys.toml --set requests_per_minute=600 --note billing
    """
    if not NAME.fullmatch(tenant):
        raise SetupError(f"tenant {tenant!r:.80}: use 1 to 64 letters, digits, '_', '.', '@', '-'")
    key = new_key()
    created = datetime.now(UTC).isoformat(timespec="seconds")
    record = KeyRecord(digest_of(key), tenant, created=created, note=note)
    _run(_create(_place(keys), directory_name, tenant, record, limit or []))
    print(key)


@app.command("list")
def list_keys(
    keys: PLACE = "",
    directory_name: NAME_OPTION = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List tenants with their limits, and their keys by id.

    Example: baton keys list --keys keys.toml
    """
    book = _run(_read(_place(keys), directory_name))
    if as_json:
        records = [
            {"id": r.key_id, "tenant": r.tenant, "created": r.created, "note": r.note} for r in book.keys
        ]
        print(json.dumps({"tenants": msgspec.to_builtins(book.tenants), "keys": records}, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("tenant", "id", "created", "note", "limits"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("id", "created"))
    for name, tenant in book.tenants.items():
        limits = ", ".join(f"{k}={v}" for k, v in msgspec.to_builtins(tenant).items() if k != "salt")
        own = [r for r in book.keys if r.tenant == name]
        for record in own:
            table.add_row(name, record.key_id, record.created, record.note, limits)
        if not own:
            table.add_row(name, "no key", "", "", limits)
    new_console().print(table)


@app.command()
def revoke(
    ids: Annotated[list[str], typer.Argument(help="Ids as `baton keys list` shows them, or whole keys.")],
    keys: PLACE = "",
    directory_name: NAME_OPTION = "default",
) -> None:
    """Revoke keys.

    Routers refuse them within two seconds.

    Example: baton keys revoke --keys keys.toml 3f2a91c07b1e
    """
    gone = _run(_revoke(_place(keys), directory_name, ids))
    print(f"{gone} key{'s' * (gone != 1)} revoked")


def _place(keys: str) -> str:
    place = keys or Config().router.keys
    if not place:
        raise SetupError("name the file or Redis: --keys FILE_OR_URL, or BATON_ROUTER__KEYS")
    return place


def _run(call: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(call)
    except DirectoryLost as error:
        raise SetupError(f"keys: {error}") from None


def _source(place: str, name: str) -> FileSource | RedisSource:
    return source_of(place, name=name, timeout_s=5.0)


async def _read(place: str, name: str) -> KeyBook:
    source = _source(place, name)
    try:
        return await source.read(first=True) or KeyBook()
    finally:
        await source.close()


def _changed(tenant: Tenant, sets: list[str]) -> Tenant:
    fields: dict[str, Any] = msgspec.to_builtins(tenant)
    for text in sets:
        name, separator, value = text.partition("=")
        if not separator or name not in Tenant.__struct_fields__:
            known = ", ".join(Tenant.__struct_fields__)
            raise SetupError(f"--set {text}: write field=value; fields are {known}")
        fields[name] = [part.strip() for part in value.split(",")] if name == "slo_classes" else value
    return _tenant(fields)


def _tenant(fields: Mapping[str, Any]) -> Tenant:
    try:
        return msgspec.convert(fields, Tenant, strict=False)
    except msgspec.ValidationError as error:
        raise SetupError(f"--set: {error}") from None


async def _create(place: str, name: str, tenant: str, record: KeyRecord, sets: list[str]) -> None:
    if "://" in place:
        source = _source(place, name)
        assert isinstance(source, RedisSource)
        try:
            book = await source.read(first=True) or KeyBook()
            changed = _changed(book.tenants.get(tenant, Tenant()), sets)
            is_new = tenant not in book.tenants or changed != book.tenants[tenant]
            await source.put(tenant, changed if is_new else None, record)
        finally:
            await source.close()
    else:
        _create_in_file(Path(place), tenant, record, sets)


def _create_in_file(path: Path, tenant: str, record: KeyRecord, sets: list[str]) -> None:
    check_ending(path, what="keys")
    with changing(path):
        book = with_key(read_file(path) if path.exists() else KeyBook(), tenant, record)
        changed = _changed(book.tenants[tenant], sets)
        write_file(path, KeyBook({**book.tenants, tenant: changed}, book.keys))


async def _revoke(place: str, name: str, ids: list[str]) -> int:
    if "://" in place:
        return await _revoke_in_redis(place, name, ids)
    return _revoke_in_file(Path(place), ids)


def _revoke_in_file(path: Path, ids: list[str]) -> int:
    with changing(path):
        book = read_file(path)
        gone = _named(book, ids)
        write_file(path, without_keys(book, [r.key_id for r in gone]))
    return len(gone)


def _named(book: KeyBook, ids: list[str]) -> list[KeyRecord]:
    """Raises SetupError if a key does not exist."""
    gone = [r for r in book.keys if r.key_id in ids or r.sha256 in map(digest_of, ids)]
    known = {r.key_id for r in gone} | {r.sha256 for r in gone}
    for one in ids:
        if one not in known and digest_of(one) not in known:
            raise SetupError(f"no key {one[:12]!r}: list the keys with `baton keys list`")
    return gone


async def _revoke_in_redis(place: str, name: str, ids: list[str]) -> int:
    source = _source(place, name)
    assert isinstance(source, RedisSource)
    try:
        gone = _named(await source.read(first=True) or KeyBook(), ids)
        await source.remove([r.sha256 for r in gone])
    finally:
        await source.close()
    return len(gone)
