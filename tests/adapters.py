"""PEFT adapters with random weights for tiny models, and the base with one merged into it."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    base: Path,
    out: Path,
    *,
    seed: int,
    rank: int = 4,
    targets: tuple[str, ...] = ALL,
    ranks: dict[str, int] | None = None,
    strength: float = 0.3,
    **config: Any,
) -> Path:
    """A PEFT folder for the model in `base`. `ranks` is rank_pattern; `config` has further fields."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets or weight.dim() != 2:
            continue
        r = next((own for end, own in (ranks or {}).items() if module.endswith(f".{end}")), rank)
        key = f"base_model.model.{module}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(r, weight.shape[1], generator=random) * strength
        tensors[f"{key}.lora_B.weight"] = torch.randn(weight.shape[0], r, generator=random) * strength
    out.mkdir(parents=True)
    save_file(tensors, out / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)}
    (out / "adapter_config.json").write_text(json.dumps(fields | {"rank_pattern": ranks or {}} | config))
    return out


def merge(base: Path, adapter: Path, out: Path, *, alphas: dict[str, float] | None = None) -> Path:
    """The folder of a plain model: W + scale * B A. `alphas` is lora_alpha by the module's last name."""
    shutil.copytree(base, out)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(base / "model.safetensors")
    lora = load_file(adapter / "adapter_model.safetensors")
    for name, a in lora.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = lora[name.replace("lora_A", "lora_B")]
        rank = a.shape[0]
        alpha = (alphas or {}).get(module.rpartition(".")[2], config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + scale * (b @ a)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out
