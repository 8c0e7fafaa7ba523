"""TLS of the public API, from two files that are read again when they change."""

import asyncio
import logging
import ssl
from pathlib import Path

from baton.config.router import RouterConfig
from baton.core.errors import SetupError

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Time between two looks at the files. New files count for connections made after the next look."""

Stamp = tuple[tuple[int, int, int], ...]


class PublicTls:
    """One TLS context for the life of the router. Later connections use the certificate that is loaded at
    their time."""

    def __init__(self, cert: str, key: str) -> None:
        """Load the files. Raises SetupError."""
        self._cert, self._key = cert, key
        self._stamp = self._stamp_now()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self._load()
        self._trouble = ""

    @classmethod
    def of(cls, config: RouterConfig) -> "PublicTls | None":
        """Return the TLS of a configuration; None: plain HTTP. Raises SetupError."""
        return cls(config.tls_cert, config.tls_key) if config.tls_cert else None

    def _load(self) -> None:
        try:
            self.context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ValueError) as error:  # This catches ssl.SSLError too, which is an OSError.
            reason = getattr(error, "reason", None) or error.__class__.__name__
            raise SetupError(
                f"router.tls_cert {self._cert} and router.tls_key {self._key} cannot be loaded: {reason}; "
                "give a certificate and its unencrypted key in PEM"
            ) from None

    def look(self) -> None:
        """Load the files if they changed. If they do not fit one another, the loaded certificate stays."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        try:
            PublicTls(
                self._cert, self._key
            )  # A separate context is tried first, so that this one stays whole.
            self._load()
        except SetupError as error:
            if str(error) != self._trouble:
                log.warning("public certificate stays as before: %s", error)
            self._trouble = str(error)
            return
        self._stamp, self._trouble = stamp, ""
        log.info("public certificate was replaced")

    async def keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def _stamp_now(self) -> Stamp:
        """Return the identity of both files, or () while one is away."""
        try:
            stats = [Path(path).stat() for path in (self._cert, self._key)]
        except OSError:
            return ()
        return tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in stats)


def _no_password() -> str:
    """Refuse an encrypted key. OpenSSL would ask for the password at the terminal."""
    raise ValueError("the key is encrypted")
