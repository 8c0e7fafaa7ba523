"""Sign-in sessions. Pure: the clock and the tokens are handed in.

A person signs in once with a token and then has a session: a cookie with 256 random bits, of which only a
digest is kept. A session ends when it was not used for long, when it is old, and when its token is revoked.
"""

import secrets
from collections.abc import Callable, Mapping

import msgspec

from baton.core.tokens import Scope, TokenBook, digest_of

IDLE_S = 12 * 3600.0
AGE_S = 7 * 24 * 3600.0
SESSIONS_MAX = 1000
FAILURES_MAX = 20
"""Wrong tokens within `FAILURES_S` after which further ones get a request to wait and are not logged. They
are counted for everybody together, since all clients behind a proxy or a port-forward share an address. A
right token is always accepted: tokens have 256 bits and cannot be guessed, so a lockout would only hit people
who have one."""
FAILURES_S = 60.0


class Session(msgspec.Struct):
    name: str
    scope: Scope
    token_digest: str
    began_s: float
    used_s: float

    @property
    def may_operate(self) -> bool:
        return self.scope.covers(Scope.OPERATE)


class SessionStore:
    def __init__(
        self,
        book: Callable[[], TokenBook],
        *,
        now_s: Callable[[], float],
        known: Mapping[str, Session] | None = None,
        remember: Callable[[Mapping[str, Session]], None] = lambda sessions: None,
    ) -> None:
        """`book` returns the tokens valid now, and `now_s` Unix time. `known` has the sessions of an earlier
        process by digest of their secrets. `remember` gets all sessions whenever one begins or ends."""
        self._book, self._now_s, self._remember = book, now_s, remember
        self._sessions: dict[str, Session] = dict(known or {})
        self._failures: list[float] = []

    @property
    def has_many_failures(self) -> bool:
        """More wrong tokens were tried lately than people mistype."""
        now_s = self._now_s()
        self._failures = [at_s for at_s in self._failures if now_s - at_s < FAILURES_S]
        return len(self._failures) > FAILURES_MAX

    def sign_in(self, token: str) -> str | None:
        """Return the secret of a new session, or None if the token is not valid."""
        book, now_s = self._book(), self._now_s()
        scope = next((s for s in (Scope.OPERATE, Scope.VIEW) if book.holder_of(token, scope=s)), None)
        if scope is None:
            self._failures = [*self._failures[-FAILURES_MAX:], now_s]
            return None
        name = book.holder_of(token, scope=scope)
        assert name is not None
        self._drop_old(book)
        secret = secrets.token_urlsafe(32)
        self._sessions[digest_of(secret)] = Session(name, scope, digest_of(token), now_s, now_s)
        self._remember(self._sessions)
        return secret

    def of(self, secret: str) -> Session | None:
        """Return the valid session of this secret, and count it as used."""
        key = digest_of(secret)
        session = self._sessions.get(key)
        if session is None:
            return None
        if not self.counts(session):
            del self._sessions[key]
            return None
        session.used_s = self._now_s()
        return session

    def counts(self, session: Session) -> bool:
        return session in self._sessions.values() and self._is_good(session, self._book())

    def _is_good(self, session: Session, book: TokenBook) -> bool:
        now_s = self._now_s()
        if now_s - session.used_s > IDLE_S or now_s - session.began_s > AGE_S:
            return False
        return any(
            record.sha256 == session.token_digest and record.scope is session.scope for record in book.records
        )

    def sign_out(self, secret: str) -> None:
        if self._sessions.pop(digest_of(secret), None) is not None:
            self._remember(self._sessions)

    def _drop_old(self, book: TokenBook) -> None:
        for key in [k for k, session in self._sessions.items() if not self._is_good(session, book)]:
            del self._sessions[key]
        while len(self._sessions) >= SESSIONS_MAX:
            oldest = min(self._sessions, key=lambda key: self._sessions[key].used_s)
            del self._sessions[oldest]
