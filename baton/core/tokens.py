"""Bearer tokens of people and programs that operate a cluster. Pure: reading files is the caller's business.

A token has 256 random bits, so one round of SHA-256 protects it as well as its own length. Only digests are
kept, one line per token: NAME SCOPE SHA256.
"""

import hmac
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum, auto
from hashlib import sha256

import msgspec

from baton.core.errors import SetupError

TOKEN_LENGTH_MAX = 512
TOKENS_MAX = 10_000
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Scope(StrEnum):
    VIEW = auto()
    """Permission to look: dashboard, metrics, status."""
    OPERATE = auto()
    """Permission to look, drain, clear, switch roles and scale."""

    def covers(self, wanted: "Scope") -> bool:
        return self is Scope.OPERATE or self is wanted


class TokenRecord(msgspec.Struct, frozen=True):
    name: str
    """Name of the holder, for lists and logs."""
    scope: Scope
    sha256: str
    """Digest of the whole token in hexadecimal."""


def digest_of(token: str) -> str:
    return sha256(token.encode()).hexdigest()


class TokenBook:
    """The known tokens, by digest."""

    def __init__(self, records: Iterable[TokenRecord] = ()) -> None:
        self.records = tuple(records)

    def holder_of(self, token: str, *, scope: Scope) -> str | None:
        """Return the holder's name, if the token is known and covers `scope`. Every digest is compared, so
        that the time taken reveals nothing."""
        if not token or len(token) > TOKEN_LENGTH_MAX:
            return None
        digest, found = digest_of(token), None
        for record in self.records:
            if hmac.compare_digest(record.sha256, digest) and record.scope.covers(scope):
                found = record.name
        return found


def read_book(text: str, source: str) -> TokenBook:
    """Parse a token file. Blank lines and comments after # are skipped. Raises SetupError naming the line and
    never its content, which may be a token that somebody put there by mistake."""
    records: list[TokenRecord] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if words:
            records.append(_record(words, f"{source}, line {number}"))
    if len(records) > TOKENS_MAX:
        raise SetupError(f"{source}: {len(records)} tokens, at most {TOKENS_MAX}")
    return TokenBook(records)


def _record(words: list[str], where: str) -> TokenRecord:
    if len(words) != 3 or not NAME.fullmatch(words[0]) or not _DIGEST.fullmatch(words[2]):
        raise SetupError(f"{where}: write NAME SCOPE SHA256, as `baton tokens create` does")
    try:
        scope = Scope(words[1])
    except ValueError:
        raise SetupError(f"{where}: the scope is view or operate") from None
    return TokenRecord(words[0], scope, words[2])


def write_book(book: TokenBook) -> str:
    lines = [f"{record.name} {record.scope} {record.sha256}\n" for record in book.records]
    return "".join(["# name scope sha256; see `baton tokens`\n", *lines])


def bearer_in(headers: Mapping[str, str | bytes]) -> str:
    """Return the token of an `authorization` header (header names in lower case), or an empty string."""
    value = headers.get("authorization", "")
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    kind, _, token = text.partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""
