"""Certificates for a private cluster: an authority of its own, and the certificates it signs. A folder has

    ca.pem, ca.key        the authority; ca.pem also has a former one while its certificates are valid
    NAME.pem, NAME.key    one certificate each, for the processes of one host or of one kind

Keys are readable by their owner only (0600). Only hosts that issue certificates need ca.key.
"""

import ipaddress
import re
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.core.errors import SetupError
from baton.files.outputs import opened
from baton.wire.identity import dns_names, is_signed_by
from baton.wire.parties import Party, name_of, parties_named

CA_NAME = "ca"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")
BACKDATED = timedelta(minutes=10)
"""Certificates are valid from a little before they are made, because the clocks of hosts differ."""

Key = ec.EllipticCurvePrivateKey


class Issued(msgspec.Struct, frozen=True):
    """One certificate of a folder, as lists show it."""

    name: str
    subject: str
    parties: tuple[Party, ...]
    domain: str
    """The domain is empty for certificates that name no part of a cluster, like an authority's."""
    hosts: tuple[str, ...]
    ends: datetime


class Authority:
    """A folder with the authority's key."""

    def __init__(self, folder: Path) -> None:
        """Raises SetupError if there is none."""
        self._folder = folder
        self._all = _read_certificates(folder / f"{CA_NAME}.pem")
        self._key = _read_key(folder / f"{CA_NAME}.key")
        signers = [one for one in self._all if one.public_key() == self._key.public_key()]
        if not signers:
            raise SetupError(f"{folder}: ca.key is not the key of a certificate in ca.pem")
        self._signer = signers[0]

    @classmethod
    def make(cls, folder: Path, *, days: int, now: datetime) -> "Authority":
        """Raises SetupError if the folder has one already."""
        if (folder / f"{CA_NAME}.key").exists():
            raise SetupError(
                f"{folder} has an authority already: use it, or run `baton certs rotate-ca {folder}`"
            )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(f"cannot make {folder}: {error.strerror or error}") from None
        certificate, key = _authority(days=days, now=now)
        _write_key(folder / f"{CA_NAME}.key", key)
        _write_certificates(folder / f"{CA_NAME}.pem", [certificate])
        return cls(folder)

    def rotate(self, *, days: int, now: datetime) -> "Authority":
        """Add a new authority, which signs from now on. The former one stays while its certificates are
        valid."""
        certificate, key = _authority(days=days, now=now)
        _write_certificates(self._folder / f"{CA_NAME}.pem", [certificate, self._signer])
        _write_key(self._folder / f"{CA_NAME}.key", key)
        return Authority(self._folder)

    def drop_former(self) -> int:
        """Drop former authorities and return how many there were. Raises SetupError while a certificate of
        the folder is still signed by one of them."""
        for one in listed(self._folder):
            if one.name != CA_NAME and not is_signed_by(self._read(one.name), self._signer):
                raise SetupError(
                    f"{one.name} is signed by the former authority: renew it first with `baton certs renew`"
                )
        _write_certificates(self._folder / f"{CA_NAME}.pem", [self._signer])
        return len(self._all) - 1

    def issue(
        self,
        name: str,
        parties: Sequence[Party],
        *,
        domain: str,
        hosts: Sequence[str] = (),
        days: float,
        now: datetime,
    ) -> Path:
        """Make a certificate, replacing one of that name, and return its path.

        `hosts` are names and addresses that other programs check; Baton looks at the parts only. Raises
        SetupError.
        """
        if not NAME.fullmatch(name) or name == CA_NAME:
            raise SetupError(
                f"name {name!r:.80}: use 1 to 60 letters, digits, '_', '.', '-', and not {CA_NAME}"
            )
        if not parties:
            raise SetupError(f"{name}: name the parts that it is for, for example --role worker")
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(name_of(party, domain)) for party in parties]
        certificate = self._signed(key, name, [*names, *map(_host_name, hosts)], days=days, now=now)
        path = self._folder / f"{name}.pem"
        # A process that reads between the two writes sees that they do not match, and reads again.
        _write_key(self._folder / f"{name}.key", key)
        _write_certificates(path, [certificate])
        return path

    def renew(self, name: str, *, days: float, now: datetime) -> Path:
        """Make the certificate again with a new key and a new end. Raises SetupError."""
        old = describe(name, self._read(name))
        return self.issue(name, old.parties, domain=old.domain, hosts=old.hosts, days=days, now=now)

    def _read(self, name: str) -> x509.Certificate:
        return _read_certificates(self._folder / f"{name}.pem")[0]

    def _signed(
        self, key: Key, name: str, names: Sequence[x509.GeneralName], *, days: float, now: datetime
    ) -> x509.Certificate:
        authority = self._signer
        ends = min(now + timedelta(days=days), authority.not_valid_after_utc)
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        # The backdating is no longer than the lifetime, so that tests can make a certificate that has ended.
        begins = max(min(now - BACKDATED, ends - BACKDATED), authority.not_valid_before_utc)
        return (
            _builder(_subject(name), authority.subject, key, begins=begins, ends=ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs=False), critical=True)
            .add_extension(usages, critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )


def listed(folder: Path) -> list[Issued]:
    """All certificates of a folder, authorities first. Raises SetupError."""
    if not folder.is_dir():
        raise SetupError(f"no folder {folder}: make one with `baton certs init {folder}`")
    found: list[Issued] = []
    for path in sorted(folder.glob("*.pem"), key=lambda p: (p.stem != CA_NAME, p.stem)):
        chain = _read_certificates(path)
        found += [describe(path.stem, one) for one in (chain if path.stem == CA_NAME else chain[:1])]
    return found


def describe(name: str, certificate: x509.Certificate) -> Issued:
    all_names = dns_names(certificate)
    domain = next((n.partition(".")[2] for n in all_names if n.partition(".")[0] in set(Party)), "")
    parties = tuple(sorted(parties_named(all_names, domain))) if domain else ()
    ours = {name_of(party, domain) for party in parties}
    return Issued(
        name=name,
        subject=certificate.subject.rfc4514_string(),
        parties=parties,
        domain=domain,
        hosts=(*(n for n in all_names if n not in ours), *_addresses(certificate)),
        ends=certificate.not_valid_after_utc,
    )


def _addresses(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(address) for address in names.get_values_for_type(x509.IPAddress)]


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", host):
        raise SetupError(f"--host {host!r:.80} is neither a host name nor an address")
    return x509.DNSName(host.lower())


def _authority(*, days: int, now: datetime) -> tuple[x509.Certificate, Key]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject(f"Baton cluster {now:%Y-%m-%d} {secrets.token_hex(4)}")
    certificate = (
        _builder(subject, subject, key, begins=now - timedelta(days=1), ends=now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: Key, *, begins: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    """`signs` says whether the key may sign certificates, which only an authority does."""
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _read_certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise SetupError(f"{path} holds no certificate in PEM") from None


def _read_key(path: Path) -> Key:
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, TypeError):
        raise SetupError(f"{path} holds no private key in PEM, or an encrypted one") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SetupError(f"{path} is not a key of `baton certs`, which makes elliptic-curve keys")
    return key


def _write_key(path: Path, key: Key) -> None:
    _write(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600)


def _write_certificates(path: Path, certificates: Sequence[x509.Certificate]) -> None:
    _write(path, b"".join(one.public_bytes(Encoding.PEM) for one in certificates), mode=0o644)


def _write(path: Path, content: bytes, *, mode: int) -> None:
    """Write in one step, so that a reader sees either the old file or the new one."""
    with opened(path, mode=mode, keeps_mode=False) as file:
        file.write(content)
