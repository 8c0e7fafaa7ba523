"""Responses that are kept for `previous_response_id`, with bounds in number, bytes and time. Pure.

Each tenant has its own, and sees nobody else's. Where room is short, the tenant that holds most gives up its
least recently used response.
"""

from collections import OrderedDict
from enum import StrEnum

import msgspec


class StoreBounds(msgspec.Struct, frozen=True):
    count_max: int
    """Most responses of one tenant."""
    bytes_max: int
    """Most bytes of all responses together. One response may have a quarter of it."""
    keep_s: float
    """Seconds after which a response is forgotten."""

    @property
    def one_bytes_max(self) -> int:
        return self.bytes_max // 4


class StoredResponse(msgspec.Struct, frozen=True):
    response: bytes
    """The response as JSON."""
    items: bytes
    """All items that it was made from, as a JSON list: earlier responses' and its own input."""

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items)


class Absence(StrEnum):
    """Why a response is not there."""

    UNKNOWN = "it was never stored here (`store: false`, another router, or before this one started)"
    EXPIRED = "it was forgotten, since it was older than responses are kept"
    EVICTED = "it was forgotten to make room for newer ones"
    DELETED = "it was deleted"


FORGOTTEN_MAX = 8192
"""Ids of forgotten responses that are remembered, to say what became of them."""


class _KeptEntry(msgspec.Struct):
    stored: StoredResponse
    until_s: float


class ResponseStore:
    """The responses of one router."""

    def __init__(self, bounds: StoreBounds) -> None:
        self.bounds = bounds
        self._tenants: dict[str, OrderedDict[str, _KeptEntry]] = {}
        self._sizes: dict[str, int] = {}
        self.size = 0
        """Bytes of all responses."""
        self._forgotten: OrderedDict[tuple[str, str], Absence] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def put(self, tenant: str, response_id: str, stored: StoredResponse, now_s: float) -> bool:
        """Keep a response. Returns False if it is too large to be kept."""
        if stored.size > self.bounds.one_bytes_max:
            self._remember(tenant, response_id, Absence.EVICTED)
            return False
        entries = self._tenants.setdefault(tenant, OrderedDict())
        if response_id in entries:
            self._drop(tenant, response_id, Absence.UNKNOWN)
            entries = self._tenants.setdefault(tenant, OrderedDict())
        entries[response_id] = _KeptEntry(stored, now_s + self.bounds.keep_s)
        self._sizes[tenant] = self._sizes.get(tenant, 0) + stored.size
        self.size += stored.size
        self._expire(tenant, now_s)
        while len(self._tenants.get(tenant, ())) > self.bounds.count_max:
            self._evict(tenant)
        while self.size > self.bounds.bytes_max:
            self._evict(max(self._sizes, key=lambda name: self._sizes[name]))
        return True

    def get(self, tenant: str, response_id: str, now_s: float) -> StoredResponse | Absence:
        """Return a response, which then counts as recently used, or why it is not there."""
        self._expire(tenant, now_s)
        entries = self._tenants.get(tenant)
        if entries is None or (entry := entries.get(response_id)) is None:
            return self._forgotten.get((tenant, response_id), Absence.UNKNOWN)
        if entry.until_s <= now_s:
            self._drop(tenant, response_id, Absence.EXPIRED)
            return Absence.EXPIRED
        entries.move_to_end(response_id)
        return entry.stored

    def delete(self, tenant: str, response_id: str, now_s: float) -> StoredResponse | Absence:
        """Forget a response. Returns what it was, or why it is not there."""
        found = self.get(tenant, response_id, now_s)
        if isinstance(found, StoredResponse):
            self._drop(tenant, response_id, Absence.DELETED)
        return found

    def _expire(self, tenant: str, now_s: float) -> None:
        """Forget what is over at the end of the tenant's order. What was used since waits for its turn."""
        entries = self._tenants.get(tenant)
        while entries and entries[first := next(iter(entries))].until_s <= now_s:
            self._drop(tenant, first, Absence.EXPIRED)

    def _evict(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._tenants[tenant])), Absence.EVICTED)

    def _drop(self, tenant: str, response_id: str, absence: Absence) -> None:
        entries = self._tenants[tenant]
        size = entries.pop(response_id).stored.size
        self._sizes[tenant] -= size
        self.size -= size
        if not entries:
            del self._tenants[tenant], self._sizes[tenant]
        self._remember(tenant, response_id, absence)

    def _remember(self, tenant: str, response_id: str, absence: Absence) -> None:
        self._forgotten[tenant, response_id] = absence
        self._forgotten.move_to_end((tenant, response_id))
        if len(self._forgotten) > FORGOTTEN_MAX:
            self._forgotten.popitem(last=False)
