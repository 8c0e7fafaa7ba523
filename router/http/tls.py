"""TLS of the public API, from two files that are read again when they change."""

import asyncio
import logging
import ssl
from pathlib import Path

from baton.config.router import RouterConfig
from baton.core.errors import SetupError

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""New files count for connections made this much later, at most."""

Stamp = tuple[tuple[int, int, int], ...]


class PublicTls:
    """One context for as long as the router lives: connections that are made later see what is loaded now."""

    def __init__(self, cert: str, key: str) -> None:
        """Raises SetupError."""
        self._cert, self._key = cert, key
        self._stamp = self._stamp_now()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self._load()
        self._trouble = ""

    @classmethod
    def of(cls, config: RouterConfig) -> "PublicTls | None":
        """None: plain HTTP. Raises SetupError."""
        return cls(config.tls_cert, config.tls_key) if config.tls_cert else None

    def _load(self) -> None:
        try:
            self.context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "reason", None) or error.__class__.__name__
            raise SetupError(
                f"router.tls_cert {self._cert} and router.tls_key {self._key} are of no use: {reason}"
            ) from None

    def look(self) -> None:
        """Files that do not fit one another leave those before."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        try:
            PublicTls(self._cert, self._key)  # tried elsewhere: this context stays whole
            self._load()
        except SetupError as error:
            if str(error) != self._trouble:
                log.warning("public certificate as before, because: %s", error)
            self._trouble = str(error)
            return
        self._stamp, self._trouble = stamp, ""
        log.info("new public certificate")

    async def keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def _stamp_now(self) -> Stamp:
        """() while a file is away."""
        try:
            stats = [Path(path).stat() for path in (self._cert, self._key)]
        except OSError:
            return ()
        return tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in stats)


def _no_password() -> str:
    """OpenSSL would ask for one at the terminal."""
    raise ValueError("the key is encrypted")
