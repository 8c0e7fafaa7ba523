"""Which models a cluster serves, by the names that clients use. Pure."""

import contextlib
from collections.abc import Generator

from baton.config import Config
from baton.core.errors import SetupError
from engine.model_files import default_name


def served_name(config: Config) -> str:
    """Of the one model of `config.model`."""
    return config.model.name or default_name(config.model.path)


def each_model(config: Config) -> dict[str, Config]:
    """Each model's name and configuration: that of one cluster with this model alone, in the order in which
    they were named.

    Raises SetupError: one model and several are asked for at once, or an adapter has the name of a model.
    """
    if not config.models:
        return {served_name(config): config}
    given = next((setting for setting in ("path", "name", "adapters") if getattr(config.model, setting)), "")
    if given:
        raise SetupError(
            f"model.{given} is of one model, and `models` names {', '.join(config.models)}: leave one out"
        )
    found = {name: config.of_model(name) for name in config.models}
    taken = set(found)
    for name, one in found.items():
        for adapter in (spec.partition("=")[0] for spec in one.model.adapters):
            if adapter in taken:
                raise SetupError(f"models.{name}.model.adapters: {adapter} is the name of something else")
            taken.add(adapter)
    return found


@contextlib.contextmanager
def about(config: Config, name: str) -> Generator[None]:
    """A SetupError in here is about this one of the configuration's models: where there are several, it says
    so."""
    try:
        yield
    except SetupError as error:
        if not config.models:
            raise
        raise SetupError(f"models.{name}: {error}") from error


def worker_count(config: Config) -> int:
    """That the configuration asks for, of all models together. Raises SetupError, see `each_model`."""
    clusters = [one.cluster for one in each_model(config).values()]
    return sum(c.prefill_workers + c.decode_workers + c.aggregated_workers for c in clusters)
