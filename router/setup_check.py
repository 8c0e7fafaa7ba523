"""Checks of a router's settings before anything is started."""

from pathlib import Path

from baton.config import Config
from baton.config.served_models import about, each_model
from kv_store.directory.redis_url import parse_redis_url
from router.http.tls import PublicTls
from router.tenants.key_files import read_file
from router.text.parsers.select import choose_parsers
from router.text.sampling_defaults import check_overrides


def check_router_setup(config: Config) -> None:
    """Raise SetupError for what the router would refuse later, once everything else runs."""
    PublicTls.of(config.router)
    if "://" in (keys := config.router.keys):
        parse_redis_url(keys)
    elif keys:
        read_file(Path(keys))
    if url := config.router.budgets_url:
        parse_redis_url(url)
    for name, one in each_model(config).items():
        with about(config, name):
            model = one.model
            check_overrides(model.generation_overrides)
            choose_parsers(
                tool=model.tool_parser, reasoning=model.reasoning_parser, template="", model_type=""
            )
