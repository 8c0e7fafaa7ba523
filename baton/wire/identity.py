"""The identity of this process: its certificate, its key, and the authorities it trusts, from files.

The files are looked at again whenever a connection is made, so replacing them is all that a rotation needs.
If new files are wrong, the log says so and the ones before stay in use.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from baton.config import TlsConfig
from baton.core.errors import SetupError
from baton.wire.parties import Party, parties_named

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 2**20
WARN_SHARE = 0.1
"""The fraction of its life that a certificate has left when the log mentions it."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The contents of the three files at one moment, checked against one another."""

    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ends: datetime
    """The instant, in UTC, from which on every peer refuses us."""
    ends_soon: datetime
    """The instant from which on the log warns of it."""
    parties: frozenset[Party]

    def for_channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def for_server(self) -> Any:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.ca)


def read_credentials(config: TlsConfig, *, now: datetime) -> Credentials:
    """Read and check the three files.

    Raises SetupError, which names the file and what to do, for a file that is unreadable, expired or not of
    the authority, for a key of another certificate, and for names that are no part of this cluster.
    """
    ca, cert, key = (_bytes_of(path) for path in (config.ca, config.cert, config.key))
    leaf = _leaf_of(config.cert, cert)
    _check_key(config, leaf, key)
    _check_authority(config, _certificates(config.ca, ca), _certificates(config.cert, cert))
    _check_dates(config.cert, leaf, now)
    parties = parties_named(dns_names(leaf), config.domain)
    if not parties:
        names = ", ".join(dns_names(leaf)) or "no name"
        raise SetupError(
            f"tls.cert {config.cert}: names {names}, and none of them is PART.{config.domain}: "
            "make one with `baton certs issue`, or set tls.domain"
        )
    return Credentials(ca, cert, key, leaf.not_valid_after_utc, _soon(leaf), parties)


def _bytes_of(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(FILE_BYTES_MAX)
    except OSError as error:
        raise SetupError(f"tls: cannot read {path}: {error.strerror or error}") from None


def _certificates(path: str, pem: bytes) -> "Sequence[Certificate]":
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise SetupError(f"tls: {path} holds no certificate in PEM") from None


def _leaf_of(path: str, pem: bytes) -> "Certificate":
    return _certificates(path, pem)[0]


def _check_key(config: TlsConfig, leaf: "Certificate", pem: bytes) -> None:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key: Any = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        raise SetupError(f"tls.key {config.key} holds no private key in PEM, or an encrypted one") from None
    if key.public_key() != leaf.public_key():
        raise SetupError(f"tls.key {config.key} is not the key of tls.cert {config.cert}")


def _check_authority(
    config: TlsConfig, roots: "Sequence[Certificate]", chain: "Sequence[Certificate]"
) -> None:
    """Each certificate must be signed by the next, and the last one by an authority."""
    signers = [*([c] for c in chain[1:]), roots]
    for certificate, candidates in zip(chain, signers, strict=True):
        if not any(is_signed_by(certificate, one) for one in candidates):
            raise SetupError(
                f"tls.cert {config.cert} is not of the authority in tls.ca {config.ca}: "
                "both must be of one `baton certs` folder"
            )


def is_signed_by(certificate: "Certificate", signer: "Certificate") -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(signer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_dates(path: str, leaf: "Certificate", now: datetime) -> None:
    begins, ends = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    if now >= ends:
        raise SetupError(f"tls.cert {path} expired on {ends:%Y-%m-%d %H:%M} UTC: see `baton certs renew`")
    if now < begins:
        raise SetupError(
            f"tls.cert {path} begins on {begins:%Y-%m-%d %H:%M} UTC, which is not yet: "
            "is this host's clock right?"
        )


def _soon(leaf: "Certificate") -> datetime:
    begins, ends = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    return ends - WARN_SHARE * (ends - begins)


def dns_names(certificate: "Certificate") -> list[str]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return list(names.get_values_for_type(x509.DNSName))


Stamp = tuple[tuple[int, int, int], ...]


class Identity:
    """The credentials as they are now. Any thread may ask; gRPC's own thread does for each new connection."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises SetupError like `read_credentials`."""
        self.config, self.domain = config, config.domain
        self._lock = threading.Lock()
        self._stamp = self._stamp_now()
        self._current = read_credentials(config, now=datetime.now(UTC))
        self._trouble = ""
        self._warned: Credentials | None = None

    def current(self) -> Credentials:
        """The credentials of the files, which are another object after each change."""
        with self._lock:
            stamp = self._stamp_now()
            if stamp != self._stamp:
                self._read_again(stamp)
            self._warn_once(datetime.now(UTC))
            return self._current

    def _warn_once(self, now: datetime) -> None:
        current = self._current
        if now >= current.ends_soon and self._warned is not current:
            self._warned = current
            ends = f"{current.ends:%Y-%m-%d %H:%M}"
            log.warning("tls.cert %s ends on %s UTC: renew it before then", self.config.cert, ends)

    def _read_again(self, stamp: Stamp) -> None:
        try:
            self._current = read_credentials(self.config, now=datetime.now(UTC))
        except SetupError as error:
            # The stamp is not noted: files that are being replaced one by one fit together in a moment.
            if str(error) != self._trouble:
                log.warning("certificates as before, because: %s", error)
            self._trouble = str(error)
            return
        self._stamp, self._trouble = stamp, ""
        log.info("new certificates, valid until %s UTC", f"{self._current.ends:%Y-%m-%d %H:%M}")

    def _stamp_now(self) -> Stamp:
        """What changes when a file does; () while a file is away."""
        try:
            stats = [Path(p).stat() for p in (self.config.ca, self.config.cert, self.config.key)]
        except OSError:
            return ()
        return tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in stats)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a port that refuses callers without a certificate of our authorities."""
        shown = self.current()

        def fetch() -> Any:
            """gRPC calls this for each new connection; None: use those before."""
            nonlocal shown
            current = self.current()
            if current is shown:
                return None
            shown = current
            return current.for_server()

        return grpc.dynamic_ssl_server_credentials(
            shown.for_server(), fetch, require_client_authentication=True
        )
