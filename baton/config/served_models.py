"""The models that a cluster serves, by the names that clients use. Pure."""

import contextlib
from collections.abc import Generator
from pathlib import PurePath

from baton.config import ROLES, Config
from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.core.shape import Shape


def default_name(path_or_hub_id: str) -> str:
    """The name by which clients call a model that was given none: the last part of its path or hub id,
    without ".gguf". (The folder of a downloaded snapshot would not do: it is named by its commit.)"""
    return PurePath(path_or_hub_id.rstrip("/")).name.removesuffix(".gguf")


def served_name(config: Config) -> str:
    """The name of the one model that `config.model` describes."""
    return config.model.name or default_name(config.model.path)


def each_model(config: Config) -> dict[str, Config]:
    """Configurations by model name, in the order in which the models were named. Each is the configuration
    of a cluster that serves this model alone.

    Raises SetupError if `model` and `models` are both given, or if an adapter has the name of a model.
    """
    if not config.models:
        return {served_name(config): config}
    given = next((setting for setting in ("path", "name", "adapters") if getattr(config.model, setting)), "")
    if given:
        raise SetupError(
            f"model.{given} describes one model, but `models` names {', '.join(config.models)}: leave one out"
        )
    found = {name: config.of_model(name) for name in config.models}
    taken = set(found)
    for name, one in found.items():
        for adapter in (spec.partition("=")[0] for spec in one.model.adapters):
            if adapter in taken:
                raise SetupError(
                    f"models.{name}.model.adapters: the name {adapter} is taken by a model or another adapter"
                )
            taken.add(adapter)
    return found


@contextlib.contextmanager
def about(config: Config, name: str) -> Generator[None]:
    """Names the model in every SetupError that is raised inside, if the configuration has several models."""
    try:
        yield
    except SetupError as error:
        if not config.models:
            raise
        raise SetupError(f"models.{name}: {error}") from error


def worker_count(config: Config) -> int:
    """Workers that the configuration asks for, of all models. Raises SetupError like `each_model`."""
    clusters = [one.cluster for one in each_model(config).values()]
    return sum(c.prefill_workers + c.decode_workers + c.aggregated_workers for c in clusters)


def worker_shapes(config: Config) -> list[tuple[str, Shape]]:
    """The role and the shape of every worker that one model's configuration asks for."""
    counts = {role: getattr(config.cluster, f"{role}_workers") for role in ROLES}
    return [(role, config.shape_of(role)) for role, count in counts.items() for _ in range(count)]


def rank_count(config: Config) -> int:
    """Ranks of the workers that the configuration asks for, of all models. Raises SetupError like
    `each_model`."""
    return sum(shape.rank_count for one in each_model(config).values() for _, shape in worker_shapes(one))


def expert_ranks(config: Config) -> dict[str, int]:
    """Expert ranks by role that one model's configuration asks for: roles without workers have none."""
    workers = {role: getattr(config.cluster, f"{role}_workers") for role in ROLES}
    match config.experts.parallel:
        case "off":
            return {}
        case "workers":
            return {role: count for role, count in workers.items() if count}
        case "ranks":
            return {role: config.experts.ranks for role, count in workers.items() if count}


def lone_expert_ranks(config: Config) -> list[str]:
    """Roles of one model's configuration whose experts are all on one rank."""
    return [role for role, count in expert_ranks(config).items() if count == 1]


def device_ranks(config: Config, role: Role) -> int:
    """Ranks of one worker of a role, with the expert rank beside it where that has a device of its own. On
    cores both share those of the worker."""
    is_beside = config.experts.parallel == "workers" and config.model.device.startswith("cuda")
    return config.shape_of(role).rank_count + is_beside


def apart_expert_ranks(config: Config) -> int:
    """Expert ranks of all models that have cores of their own. Those beside workers have the workers'."""
    models = each_model(config).values()
    return sum(sum(expert_ranks(one).values()) for one in models if one.experts.parallel == "ranks")
