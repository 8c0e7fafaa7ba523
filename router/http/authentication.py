"""Access to the public API: the tenant of an API key, and whether the tenant's budgets allow one more
request."""

import math

from baton.core.budgets import Ask, Grant, Scarce, Settle, remaining
from baton.core.errors import Forbidden, RateLimited, Unauthorized
from router.http.asgi import JSON, App, Headers, Message, Receive, Scope, Send, header, respond
from router.http.client import ANYBODY, CLIENT, AuthenticatedClient
from router.http.error_shapes import error_answer
from router.tenants.budgets import Budgets
from router.tenants.keyring import LiveKeys
from router.tenants.keys import Tenant, salt_of

RATE_HEADERS = "baton.rate_headers"
"""Key in the scope: rate headers that any answer to the request carries, once they are known."""
ADAPTER_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})


TOKENIZER_PATHS = frozenset({"/tokenize", "/detokenize", "/tokenizer_info"})
"""Paths outside /v1 that do work for a client."""


class AccessControl:
    def __init__(self, keys: LiveKeys | None, budgets: Budgets, *, router_id: str) -> None:
        """Everybody has access, as one tenant without limits, if there are no `keys`."""
        self.keys, self.budgets, self._router_id = keys, budgets, router_id

    def admit(self, scope: Scope) -> AuthenticatedClient:
        """Return the client that the key of the request belongs to. Raises Unauthorized, Forbidden."""
        if self.keys is None:
            return ANYBODY
        found = self.keys.tenant_of(_key_of(scope))
        if found is None:
            raise Unauthorized(
                "Incorrect API key provided: this server does not have it, or it was revoked. Send a "
                "current key."
            )
        name, tenant = found
        if scope["path"] in ADAPTER_PATHS and not tenant.may_load_adapters:
            raise Forbidden(
                "this key's tenant may not load or unload adapters; an operator can allow it "
                "(may_load_adapters)"
            )
        return AuthenticatedClient(name, tenant, salt_of(name, tenant))

    def client_named(self, name: str) -> AuthenticatedClient | None:
        """Return the client of a tenant that asked earlier. None: there is no such tenant any more."""
        if self.keys is None:
            return ANYBODY if name == ANYBODY.name else None
        tenant = self.keys.tenant_named(name)
        return None if tenant is None else AuthenticatedClient(name, tenant, salt_of(name, tenant))

    async def take(
        self, client: AuthenticatedClient, scope: Scope, *, lease: str, lease_s: float, tokens: int
    ) -> Grant:
        """Take a request and its tokens from the tenant's budgets, and put the rate headers into the scope.
        Raises RateLimited."""
        tenant = client.tenant
        grant = await self.budgets.take(
            Ask(
                tenant=client.name,
                lease=lease,
                lease_s=lease_s,
                tokens=tokens,
                requests_per_minute=tenant.requests_per_minute,
                tokens_per_minute=tenant.tokens_per_minute,
                concurrent_max=tenant.concurrent_max,
                router_id=self._router_id,
            )
        )
        scope[RATE_HEADERS] = rate_headers(tenant, grant)
        if not grant.is_granted:
            raise _rate_limited(client, grant, tokens)
        return grant

    async def settle(self, client: AuthenticatedClient, *, lease: str, refund_tokens: int) -> None:
        settle = Settle(client.name, lease, refund_tokens, client.tenant.tokens_per_minute)
        await self.budgets.settle(settle)

    async def close(self) -> None:
        if self.keys is not None:
            await self.keys.close()
        await self.budgets.close()

    def state(self) -> dict[str, str]:
        """Return the state of keys and budgets for /health."""
        if self.keys is None:
            return {"keys": "none"}
        trouble = self.keys.trouble
        keys = f"as before: {trouble}" if trouble else "current"
        is_away = getattr(self.budgets, "is_away", None)
        budgets = "own" if is_away is None else "own part: the shared place is away" if is_away else "shared"
        return {"keys": keys, "budgets": budgets}


def _key_of(scope: Scope) -> str:
    """Return the key that the request came with, in OpenAI's or Anthropic's header. Raises Unauthorized."""
    given = (header(scope, b"authorization") or b"").decode("latin-1")
    scheme, _, key = given.partition(" ")
    if key and scheme.lower() == "bearer":
        return key.strip()
    if key := (header(scope, b"x-api-key") or b"").decode("latin-1").strip():
        return key
    raise Unauthorized(
        "You did not provide an API key. Send it in the header Authorization: Bearer YOUR_KEY (or x-api-key: "
        "YOUR_KEY)."
    )


def is_guarded(path: str) -> bool:
    """Return whether a path needs a key, where there are keys."""
    return path.startswith("/v1") or path in TOKENIZER_PATHS


def _rate_limited(client: AuthenticatedClient, grant: Grant, tokens: int) -> RateLimited:
    tenant = client.tenant
    match grant.scarce:
        case Scarce.REQUESTS:
            what, limit = "requests per min (RPM)", tenant.requests_per_minute
            more = ""
        case Scarce.TOKENS:
            what, limit = "tokens per min (TPM)", tenant.tokens_per_minute
            more = f", Requested {tokens}"
        case _:
            what, limit, more = "requests at once", tenant.concurrent_max, ""
    kind = "tokens" if grant.scarce is Scarce.TOKENS else "requests"
    if math.isinf(grant.retry_after_s):
        message = f"Request too large for tenant {client.name} on {what}: Limit {limit}{more}."
        return RateLimited(f"{message} It can never be served: shorten it.", kind=kind, retry_after_s=None)
    message = f"Rate limit reached for tenant {client.name} on {what}: Limit {limit}{more}."
    return RateLimited(message, kind=kind, retry_after_s=grant.retry_after_s)


def rate_headers(tenant: Tenant, grant: Grant) -> Headers:
    """Return OpenAI's rate limit headers for the budgets that the tenant has."""
    headers: Headers = []
    budgets = (
        (b"requests", tenant.requests_per_minute, grant.requests_left_s),
        (b"tokens", tenant.tokens_per_minute, grant.tokens_left_s),
    )
    for name, limit, whole_in_s in budgets:
        if limit:
            headers += [
                (b"x-ratelimit-limit-" + name, b"%d" % limit),
                (b"x-ratelimit-remaining-" + name, b"%d" % remaining(limit, whole_in_s)),
                (b"x-ratelimit-reset-" + name, duration(whole_in_s).encode()),
            ]
    return headers


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: 12ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(max(0.0, seconds) * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"


class AuthenticationMiddleware:
    """ASGI middleware that demands a key for everything under /v1 and for tokenising, where keys are
    configured. Health and metrics stay open."""

    def __init__(self, app: App, access: AccessControl) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._access.keys is None or not is_guarded(scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            scope[CLIENT] = self._access.admit(scope)
        except (Unauthorized, Forbidden) as error:
            challenge = [(b"www-authenticate", b"Bearer")] if isinstance(error, Unauthorized) else []
            answer = error_answer(scope["path"], error)
            await respond(send, error.http_status, answer, [*JSON, *challenge])
            return

        async def send_with_rates(message: Message) -> None:
            if message["type"] == "http.response.start" and RATE_HEADERS in scope:
                message["headers"] = [*message.get("headers", []), *scope[RATE_HEADERS]]
            await send(message)

        await self._app(scope, receive, send_with_rates)
