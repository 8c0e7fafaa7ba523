"""The users that requests belong to: tenants, their keys, and the service class."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import SetupError


@dataclass(frozen=True, slots=True)
class Users:
    """Assigns requests to users. Requests of one session have one tenant. The trace's own tenants and classes
    come first."""

    slo_class: str = ""
    tenants: int = 0
    """Number of tenants that requests are spread over evenly; 0 for none."""
    keys: tuple[tuple[str, str], ...] = ()
    """(tenant, API key). A tenant that is not listed uses the common key."""

    def __post_init__(self) -> None:
        if self.tenants < 0:
            raise SetupError(f"--tenants {self.tenants}: must be 0 or more")

    def tenant_of(self, session: str) -> str:
        """The tenant of a session: a name of the keys file, in its order, or tenant-0 and on."""
        if not self.tenants:
            return ""
        digest = hashlib.blake2b(session.encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big") % self.tenants
        return self.keys[number][0] if number < len(self.keys) else f"tenant-{number}"

    @property
    def first_key(self) -> str:
        """The key for requests without a tenant if no common key is given; empty if there is none."""
        return self.keys[0][1] if self.keys else ""

    def key_of(self, tenant: str) -> str | None:
        return dict(self.keys).get(tenant)


def read_keys(path: Path) -> tuple[tuple[str, str], ...]:
    """Read lines of `tenant key`; blank lines and lines that begin with # are skipped. Raises SetupError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"cannot read keys {path}: {error}") from None
    keys: list[tuple[str, str]] = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or any(not 32 < ord(c) < 127 for c in words[1]):
            raise SetupError(f"{path}:{number}: write `tenant key`, with a key of printable ASCII")
        keys.append((words[0], words[1]))
    return tuple(keys)
