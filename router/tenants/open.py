"""Keys and budgets as the configuration asks for them."""

from baton.config import Config
from baton.core.errors import SetupError
from router.tenants.budgets import Budgets, LocalBudgets, RemoteBudgets, SharedBudgets
from router.tenants.keyring import LiveKeys, source_of


async def open_keys(config: Config) -> LiveKeys | None:
    """Open the configured keys; None: there are none. Raises SetupError, since without its keys a router
    serves nobody."""
    if not config.router.keys:
        return None
    store = config.store
    source = source_of(config.router.keys, name=store.directory_name, timeout_s=store.directory_timeout_s)
    keys = LiveKeys(source)
    try:
        await keys.open()
    except SetupError:
        await keys.close()
        raise
    return keys


def budgets_of(config: Config, control_address: str | None, router_id: str) -> Budgets:
    """Return the budgets. All routers share them where there is a Redis or a control plane. Raises SetupError
    for a bad URL."""
    if not config.router.keys:
        return LocalBudgets()
    store = config.store
    if url := config.router.budgets_url or store.directory:
        from kv_store.directory.redis_client import RedisClient  # Only clusters with a Redis load its client.
        from router.tenants.redis_budgets import RedisBudgets

        client = RedisClient(url, timeout_s=store.directory_timeout_s)
        return SharedBudgets(RedisBudgets(client, name=store.directory_name, router_id=router_id))
    if control_address:
        return SharedBudgets(RemoteBudgets(control_address, timeout_s=store.directory_timeout_s))
    return LocalBudgets()
