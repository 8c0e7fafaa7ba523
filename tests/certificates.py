"""Certificates for tests: one folder per run, and mutual TLS for everything if BATON_TEST_TLS says so."""

import atexit
import os
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from baton.config import Config, TlsConfig
from baton.wire.parties import Party
from baton.wire.transport import secure

SWITCH = "BATON_TEST_TLS"


def make_folder(folder: Path) -> Path:
    """An authority, `node` for all processes, `operator`, and one certificate per part."""
    from commands.certificates import Authority

    now = datetime.now(UTC)
    authority = Authority.make(folder, days=30, now=now)
    every = list(Party)
    for name, parties in {"node": every, **{party.value: [party] for party in Party}}.items():
        authority.issue(name, parties, domain=TlsConfig().domain, days=1, now=now)
    return folder


def tls_of(folder: Path, name: str = "node", *, ca: Path | None = None) -> TlsConfig:
    """`ca` is the folder whose authority is trusted; the default is the certificate's own."""
    authority = (ca or folder) / "ca.pem"
    return TlsConfig(ca=str(authority), cert=str(folder / f"{name}.pem"), key=str(folder / f"{name}.key"))


def tls_environment(tls: TlsConfig) -> dict[str, str]:
    return {
        "BATON_TLS__CA": tls.ca,
        "BATON_TLS__CERT": tls.cert,
        "BATON_TLS__KEY": tls.key,
        "BATON_TLS__DOMAIN": tls.domain,
    }


def secure_tests() -> None:
    """Set this process's identity through the environment, where the processes that tests start find it,
    too."""
    if os.environ.get(SWITCH, "0") != "0" and "BATON_TLS__CA" not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="baton-test-certs-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ.update(tls_environment(tls_of(make_folder(folder))))
    secure(Config().tls)
