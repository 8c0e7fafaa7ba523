"""Can a model's experts be on expert ranks as the configuration asks? Asked before any process is started. No
torch here."""

from pathlib import Path

import psutil

from baton.config import Config, ModelConfig
from baton.config.served_models import expert_ranks
from baton.core.errors import SetupError
from baton.core.geometry import DTYPE_BYTES
from engine.model_files.read_spec import load_spec
from engine.model_files.spec import ModelSpec, MoeSpec

_QUANTISED_BYTES = {"int8": 1.0, "w8a8": 1.0, "fp8": 1.0, "int4": 0.5}


def check_experts(config: Config, folder: Path | None) -> None:
    """Check one served model; `folder` is None if its files are not here. Raises SetupError, which names the
    setting."""
    experts = config.experts
    if experts.parallel == "off":
        return
    if experts.parallel == "ranks" and not experts.ranks:
        raise SetupError(
            "experts.parallel=ranks asks for expert ranks of their own, and experts.ranks is 0: say how many "
            "with --experts N"
        )
    for role, count in expert_ranks(config).items():
        if experts.replicas > count:
            raise SetupError(
                f"experts.replicas={experts.replicas:g} needs as many expert ranks, and the {role} pool has "
                f"{count}: an expert is at most once on each"
            )
    if folder is None:
        return
    spec = load_spec(folder)
    moe = divisible_experts(spec)
    for role, count in expert_ranks(config).items():
        if count > (most := int(moe.expert_count * experts.replicas)):
            raise SetupError(
                f"the {role} pool would have {count} expert ranks, and its layers {moe.expert_count} experts "
                f"of {experts.replicas:g} replicas: more than {most} ranks would have nothing to hold"
            )
    if not config.cluster.ray_address and config.model.device == "cpu":
        _check_memory(spec, moe, config)


def check_expert_settings(config: Config) -> None:
    """Check what no single model's part shows. Raises SetupError."""
    experts = config.experts
    if experts.ranks and experts.parallel != "ranks" and not config.models:
        raise SetupError(
            f"experts.ranks={experts.ranks} is for experts.parallel=ranks, and experts.parallel is "
            f"{experts.parallel}: set it too, or use --experts {experts.ranks}"
        )


def divisible_experts(spec: ModelSpec) -> MoeSpec:
    """The model's experts. Raises SetupError if they cannot be on ranks of their own."""
    if not spec.is_native or spec.moe is None or not spec.moe.layers:
        raise SetupError(
            "experts.parallel: this model has no routed experts that Baton computes itself; leave "
            "--expert-parallel and --experts out"
        )
    return spec.moe


def expert_bytes(spec: ModelSpec, moe: MoeSpec, model: ModelConfig) -> int:
    """Estimate the memory of one expert of one layer: three matrices in the data type they are kept in."""
    dtype = spec.dtype if model.dtype == "auto" else model.dtype
    per_weight = _QUANTISED_BYTES.get(model.quantization, float(DTYPE_BYTES[dtype]))
    if moe.is_mxfp4 or spec.quantization is not None:
        per_weight = _QUANTISED_BYTES["int4"]  # formats differ: the least that any of them takes
    return int(3 * spec.hidden_size * moe.intermediate_size * per_weight)


def _check_memory(spec: ModelSpec, moe: MoeSpec, config: Config) -> None:
    one = expert_bytes(spec, moe, config.model)
    pools = sum(1 for count in expert_ranks(config).values() if count)
    needed = int(one * len(moe.layers) * moe.expert_count * config.experts.replicas * pools)
    total = psutil.virtual_memory().total
    if needed > total:
        raise SetupError(
            f"the experts do not fit: {len(moe.layers)} layers of {moe.expert_count} experts, each of "
            f"{one / 2**20:.0f} MiB, {config.experts.replicas:g} replicas (experts.replicas) for each of "
            f"{pools} pools need {needed / 2**30:.0f} GiB, and this machine has {total / 2**30:.0f} GiB: use "
            "fewer pools (--aggregated), model.quantization, or more machines (--ray-address)"
        )
