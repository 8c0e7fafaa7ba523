"""The directory that the configuration asks for."""

from baton.config import StoreConfig
from baton.core.errors import SetupError
from kv_store.directory.interface import Directory
from kv_store.directory.remote import RemoteDirectory


async def connect(config: StoreConfig, *, control_address: str) -> Directory:
    """Redis where `store.directory` names it, else the control plane's at `control_address` (host:port).

    One that does not answer now is no error: its calls raise DirectoryLost until it does. Raises SetupError
    for what the operator must change: a bad URL, a wrong password, a server that does not speak TLS.
    """
    if config.directory:
        raise SetupError("store.directory: not yet")
    if not control_address:
        raise SetupError("no directory: name the control plane with --control, or a Redis with --store")
    return RemoteDirectory(control_address, timeout_s=config.directory_timeout_s)
