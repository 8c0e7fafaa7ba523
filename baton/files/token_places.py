"""Tokens are read from the places that the configuration names: files or environment variables."""

import logging
import os
import secrets
from pathlib import Path

from baton.core.errors import SetupError
from baton.core.tokens import TOKEN_LENGTH_MAX, Scope, TokenBook, read_book

log = logging.getLogger(__name__)

ENVIRONMENT = "env:"
FILE_BYTES_MAX = 2**20
PREFIX = "bt-"
TOKEN_BYTES = 32


def new_token() -> str:
    """Draw a token from the kernel's random bits."""
    return PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


class LiveTokens:
    """The tokens that are valid now. The file is read again when it changes, so that a revoked token is
    refused from then on. While the file cannot be read, the previous tokens stay valid."""

    def __init__(self, place: str) -> None:
        """`place` is a path, or env:NAME. Raises SetupError."""
        self._place, self._stamp = place, _stamp(place)
        self._book = read_book(_text(place), place)
        self._trouble = ""

    def holder_of(self, token: str, *, scope: Scope) -> str | None:
        """See `TokenBook.holder_of`."""
        self._look()
        return self._book.holder_of(token, scope=scope)

    @property
    def book(self) -> TokenBook:
        self._look()
        return self._book

    def _look(self) -> None:
        stamp = _stamp(self._place)
        if stamp == self._stamp:
            return
        try:
            self._book = read_book(_text(self._place), self._place)
        except SetupError as error:
            if str(error) != self._trouble:
                log.warning("tokens as before, because: %s", error)
            self._trouble = str(error)
            return
        self._stamp, self._trouble = stamp, ""


def token_at(place: str) -> str:
    """The token that this process presents to others. Raises SetupError."""
    token = _text(place).strip()
    if not token or len(token) > TOKEN_LENGTH_MAX or not token.isprintable() or " " in token:
        raise SetupError(f"access.token {place}: holds no token, see `baton tokens create`")
    return token


def _text(place: str) -> str:
    if place.startswith(ENVIRONMENT):
        name = place.removeprefix(ENVIRONMENT)
        if name not in os.environ:
            raise SetupError(f"access: the environment has no {name}")
        return os.environ[name]
    try:
        with Path(place).open(encoding="utf-8") as file:
            return file.read(FILE_BYTES_MAX)
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"access: cannot read {place}: {error}") from None


def _stamp(place: str) -> tuple[int, int, int] | None:
    if place.startswith(ENVIRONMENT):
        return None
    try:
        stat = Path(place).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
