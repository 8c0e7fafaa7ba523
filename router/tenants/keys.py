"""API keys and their tenants, as values. Pure.

A key has 256 random bits, so one round of SHA-256 is as good as its own length: there is nothing to guess.
Only the digest is kept.
"""

import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from hashlib import blake2b, sha256
from typing import Any

import msgspec

from baton.core.errors import SetupError

PREFIX = "sk-baton-"
KEY_BYTES = 32
ID_CHARACTERS = 12
KEY_LENGTH_MAX = 512
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
"""Pattern of tenant names. It has no slash, because the part of a fairness key before the slash is the
tenant."""

KEYS_MAX = 1_000_000


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Permissions and limits of one tenant. A limit of 0 does not bound anything."""

    weight: float = 1.0
    """Weight of the tenant's service relative to others'."""
    slo_class: str = ""
    """Service class of requests that name none."""
    slo_classes: tuple[str, ...] = ()
    """Service classes that requests may name; empty: all."""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Most tokens of prompts and answers per minute."""
    concurrent_max: int = 0
    """Most requests at once."""
    salt: str = ""
    """Salt of the tenant's block hashes; empty: its name. Tenants of one salt share KV, others never do."""
    may_load_adapters: bool = False
    """True if the tenant may use /v1/load_lora_adapter and /v1/unload_lora_adapter."""

    def __post_init__(self) -> None:
        if not 0.001 <= self.weight <= 1000:
            raise ValueError(f"weight must be from 0.001 to 1000, not {self.weight}")
        for name in ("requests_per_minute", "tokens_per_minute", "concurrent_max"):
            if not 0 <= getattr(self, name) < 2**50:
                raise ValueError(f"{name} must not be negative")


class KeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    sha256: str
    """Digest of the whole key, hexadecimal."""
    tenant: str
    created: str = ""
    """Date and time of creation, UTC."""
    note: str = ""

    @property
    def key_id(self) -> str:
        """Name of the key in lists and logs. It reveals nothing of the key."""
        return self.sha256[:ID_CHARACTERS]


class KeyBook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file of keys."""

    tenants: dict[str, Tenant] = {}
    keys: tuple[KeyRecord, ...] = ()


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def read_book(fields: Mapping[str, Any], source: str) -> KeyBook:
    """Return the keys of decoded fields. Raises SetupError naming what is wrong in `source`."""
    try:
        book = msgspec.convert(fields, KeyBook)
    except msgspec.ValidationError as error:
        raise SetupError(f"{source}: {error}") from None
    for name in book.tenants:
        if not NAME.fullmatch(name):
            raise SetupError(f"{source}: tenant {name!r:.80}: 1 to 64 letters, digits, '_', '.', '@', '-'")
    if len(book.keys) > KEYS_MAX:
        raise SetupError(f"{source}: {len(book.keys)} keys, at most {KEYS_MAX}")
    for record in book.keys:
        if not re.fullmatch(r"[0-9a-f]{64}", record.sha256):
            raise SetupError(f"{source}: the sha256 of key {record.key_id!r} is not 64 hexadecimal digits")
        if record.tenant not in book.tenants:
            raise SetupError(
                f"{source}: key {record.key_id} is of tenant {record.tenant!r:.80}, who is not there"
            )
    return book


class Keyring:
    """An index from keys to tenants."""

    def __init__(self, book: KeyBook) -> None:
        self.book = book
        self._by_id: dict[str, list[KeyRecord]] = {}
        for record in book.keys:
            self._by_id.setdefault(record.key_id, []).append(record)

    def tenant_of(self, key: str) -> str | None:
        """Return the tenant of a key; None: it is nobody's. The time does not depend on how much of a digest
        is right."""
        if not key or len(key) > KEY_LENGTH_MAX:
            return None
        digest = digest_of(key)
        found = None
        for record in self._by_id.get(digest[:ID_CHARACTERS], ()):
            if hmac.compare_digest(record.sha256, digest):
                found = record.tenant
        return found


def salt_of(name: str, tenant: Tenant) -> bytes:
    """Return the salt of a tenant's block hashes, to be mixed with the cluster's."""
    return blake2b((tenant.salt or name).encode(), digest_size=16, person=b"baton-tenant").digest()


def with_key(book: KeyBook, name: str, record: KeyRecord) -> KeyBook:
    """Return the keys with one more. An unknown tenant is added without limits."""
    tenants = book.tenants if name in book.tenants else {**book.tenants, name: Tenant()}
    return KeyBook(tenants, (*book.keys, record))


def without_keys(book: KeyBook, key_ids: Iterable[str]) -> KeyBook:
    gone = set(key_ids)
    return KeyBook(book.tenants, tuple(r for r in book.keys if r.key_id not in gone))
