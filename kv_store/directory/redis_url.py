"""URLs of a Redis, and what they mean.

    redis://[user:password@]host[:6379][/db]             one server; rediss:// with TLS
    unix://[user:password@]/path/to/redis.sock[?db=0]    one server on this host
    redis+sentinel://host[:26379],host…/service[/db]     the master that these sentinels name
    redis+cluster://host[:6379],host…                    a Redis Cluster, by some of its nodes

rediss+sentinel:// and rediss+cluster:// take TLS. Options behind `?`, joined by `&`: with TLS `ca=FILE` (whom
to trust; else the system's), `cert=FILE` and `key=FILE` (who we are), `verify=full|ca|none` (ca: any host
name); for sentinels `sentinel_username` and `sentinel_password`. Reserved characters are percent-encoded.
"""

import re
from enum import StrEnum, auto
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote

import msgspec

from baton.core.errors import SetupError

REDIS_PORT, SENTINEL_PORT = 6379, 26379
_TLS_OPTIONS = frozenset({"ca", "cert", "key", "verify"})
_SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})


class RedisKind(StrEnum):
    SERVER = auto()
    SENTINEL = auto()
    CLUSTER = auto()


class Tls(msgspec.Struct, frozen=True):
    ca: str = ""
    cert: str = ""
    key: str = ""
    verify: Literal["full", "ca", "none"] = "full"


class RedisUrl(msgspec.Struct, frozen=True):
    kind: RedisKind
    hosts: tuple[tuple[str, int], ...] = ()
    socket_path: str = ""
    """A path, instead of hosts."""
    service: str = ""
    """The service name that the sentinels know."""
    db: int = 0
    username: str = ""
    password: str = ""
    sentinel_username: str = ""
    sentinel_password: str = ""
    tls: Tls | None = None


def masked(url: str) -> str:
    """The URL for people: without anything secret, whatever is wrong with it."""
    shown = re.sub(r"^([a-z+]*:/*)?.*@", r"\1***@", url, flags=re.DOTALL | re.IGNORECASE)
    return re.sub(r"(pass[^=&]*=)[^&]*", r"\1***", shown, flags=re.IGNORECASE)


def parse_redis_url(url: str) -> RedisUrl:
    """Parse a URL. Raises SetupError, which never shows a password."""
    try:
        return _parse(url)
    except _Wrong as error:
        raise SetupError(f"{masked(url)}: {error}") from None


class _Wrong(Exception):
    pass


def _parse(url: str) -> RedisUrl:
    parts = _split(url)
    scheme, _, kind_name = parts.scheme.partition("+")
    if scheme == "unix" and not kind_name:
        return _parse_socket(parts)
    if scheme not in ("redis", "rediss") or kind_name not in ("", "sentinel", "cluster"):
        raise _Wrong("begin with redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://")
    if parts.fragment or "@" in parts.path:
        raise _Wrong("in a user or password write / as %2F, ? as %3F, # as %23 and @ as %40")
    kind = RedisKind(kind_name) if kind_name else RedisKind.SERVER
    is_sentinel, is_tls = kind is RedisKind.SENTINEL, scheme == "rediss"
    options = _options(
        parts, (_TLS_OPTIONS if is_tls else set()) | (_SENTINEL_OPTIONS if is_sentinel else set())
    )
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, password = _credentials(credentials)
    service, db = _path(kind, parts.path)
    return RedisUrl(
        kind=kind,
        hosts=_hosts(kind, hosts),
        service=service,
        db=db,
        username=username,
        password=password,
        sentinel_username=options.get("sentinel_username", ""),
        sentinel_password=options.get("sentinel_password", ""),
        tls=_tls(options) if is_tls else None,
    )


def _split(url: str) -> SplitResult:
    """Return the parts of a URL (RFC 3986, appendix B). urllib's own newer versions refuse an IPv6 address
    that is not the first of several hosts. Space around it, as files of secrets have, does not count."""
    rule = r"(?:([^:/?#]+):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?"
    match = re.fullmatch(rule, url.strip(), re.DOTALL)
    assert match is not None, "every text has these parts"
    scheme, netloc, path, query, fragment = (part or "" for part in match.groups())
    return SplitResult(scheme.lower(), netloc, path, query, fragment)


def _parse_socket(parts: SplitResult) -> RedisUrl:
    credentials, _, host = parts.netloc.rpartition("@")
    if host or not parts.path:
        raise _Wrong("write unix:///path/to/redis.sock")
    username, password = _credentials(credentials)
    db = _db(_options(parts, {"db"}).get("db", ""))
    path = unquote(parts.path)
    return RedisUrl(RedisKind.SERVER, socket_path=path, db=db, username=username, password=password)


def _options(parts: SplitResult, known: frozenset[str] | set[str]) -> dict[str, str]:
    try:
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise _Wrong("options are written ?name=value&name=value") from None
    for name in options:
        if name in _TLS_OPTIONS - known:
            raise _Wrong(f"{name} is for TLS: rediss:// instead of redis://")
        if name not in known:
            raise _Wrong(f"no such option: {name}")
    return options


def _credentials(text: str) -> tuple[str, str]:
    username, _, password = text.partition(":")
    return unquote(username), unquote(password)


def _path(kind: RedisKind, path: str) -> tuple[str, int]:
    names = [unquote(name) for name in path.strip("/").split("/") if name]
    if kind is RedisKind.SENTINEL:
        if not names:
            raise _Wrong("name the service that the sentinels watch: redis+sentinel://host:26379/service")
        service, *names = names
    else:
        service = ""
    if len(names) > 1:
        raise _Wrong("too many parts behind the host")
    if kind is RedisKind.CLUSTER and names:
        raise _Wrong("a Redis Cluster has no numbered databases")
    return service, _db(names[0] if names else "")


def _db(text: str) -> int:
    if text and not text.isdecimal():
        raise _Wrong("the database is a number, as in redis://host:6379/0")
    return int(text or 0)


def _hosts(kind: RedisKind, text: str) -> tuple[tuple[str, int], ...]:
    default = SENTINEL_PORT if kind is RedisKind.SENTINEL else REDIS_PORT
    hosts = tuple(_host(part, default) for part in text.split(","))
    if kind is RedisKind.SERVER and len(hosts) > 1:
        raise _Wrong("one host; several are for redis+sentinel:// and redis+cluster://")
    return hosts


def _host(text: str, default_port: int) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^:\[\]\s]+))(?::(\d{1,5}))?", text)
    if match is None or not 0 < int(match[3] or default_port) < 65_536:
        raise _Wrong("hosts are written host:port, IPv6 addresses [::1]:port, with ports 1 to 65535")
    return unquote(match[1] or match[2]), int(match[3] or default_port)


def _tls(options: dict[str, str]) -> Tls:
    for name in ("ca", "cert", "key"):
        if options.get(name) and not Path(options[name]).is_file():
            raise _Wrong(f"{name}={options[name]}: no such file")
    if options.get("key") and not options.get("cert"):
        raise _Wrong("key needs cert beside it")
    match options.get("verify", "full"):
        case "full" | "ca" | "none" as verify:
            return Tls(options.get("ca", ""), options.get("cert", ""), options.get("key", ""), verify)
        case other:
            raise _Wrong(f"verify={other}: choose full, ca or none")
