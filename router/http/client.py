"""The authenticated client of a request."""

import msgspec

from router.http.asgi import Scope
from router.tenants.keys import Tenant
from router.tenants.service_classes import DEFAULT_TENANT

CLIENT = "baton.client"
"""Key in the scope: the `AuthenticatedClient`."""


class AuthenticatedClient(msgspec.Struct, frozen=True):
    name: str
    """Name of the tenant, as authenticated."""
    tenant: Tenant
    salt: bytes
    """Salt of the tenant's block hashes. It is empty where no keys are configured."""

    @property
    def has_limits(self) -> bool:
        tenant = self.tenant
        return bool(tenant.requests_per_minute or tenant.tokens_per_minute or tenant.concurrent_max)


ANYBODY = AuthenticatedClient(DEFAULT_TENANT, Tenant(), b"")


def client_of(scope: Scope) -> AuthenticatedClient:
    return scope.get(CLIENT, ANYBODY)
