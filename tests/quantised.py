"""Writes quantised checkpoints of tiny models by the formats' packing rules, value by value, and the dense
model that each of them stands for.

The rules are those of AutoGPTQ's QuantLinear.pack for GPTQ, of AutoAWQ's WQLinear_GEMM.from_linear for AWQ,
and of compressed-tensors for the others. Integers are unsigned here, u = round(w / s) + z, w = (u - z) * s.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
AWQ_LANES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Lane i of an int32 holds column AWQ_LANES[i] of eight."""


class Rounded:
    """w [O, I] rounded to unsigned integers; group of input i is groups[i]."""

    def __init__(self, weight: torch.Tensor, *, bits: int, group_of: np.ndarray, symmetric: bool) -> None:
        w = weight.float().numpy()
        top, count = 2**bits - 1, int(group_of.max()) + 1
        self.bits, self.group_of = bits, group_of
        self.u = np.zeros(w.shape, np.int64)
        self.scales = np.zeros((w.shape[0], count), np.float16)
        self.zeros = np.zeros((w.shape[0], count), np.int64)
        for g in range(count):
            columns = group_of == g
            part = w[:, columns]
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            if symmetric:
                scale = (2 * np.maximum(-low, high) / top).astype(np.float16)
                zero = np.full(len(w), 2 ** (bits - 1))
            else:
                scale = ((high - low) / top).astype(np.float16)
                zero = np.clip(np.round(-low / scale), 1, top).astype(np.int64)
            integers = np.round(part / scale[:, None]) + zero[:, None]
            self.u[:, columns] = np.clip(integers, 0, top)
            self.scales[:, g], self.zeros[:, g] = scale, zero

    def dense(self) -> torch.Tensor:
        scales = self.scales.astype(np.float32)[:, self.group_of]
        return torch.from_numpy((self.u - self.zeros[:, self.group_of]).astype(np.float32) * scales)


def pack_rows(numbers: np.ndarray, bits: int, lanes: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, m] unsigned -> int32 [n, ceil(m / (32 / bits))]: each int32 holds 32 / bits neighbours of a row."""
    per = 32 // bits
    places = lanes or tuple(range(per))
    padded = np.zeros((numbers.shape[0], -(-numbers.shape[1] // per) * per), np.uint64)
    padded[:, : numbers.shape[1]] = numbers & (2**bits - 1)
    packed = np.zeros((padded.shape[0], padded.shape[1] // per), np.uint64)
    for column in range(packed.shape[1]):
        for lane in range(per):
            packed[:, column] |= padded[:, column * per + places[lane]] << np.uint64(bits * lane)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def gptq_module(
    weight: torch.Tensor,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
    version: int = 1,
) -> tuple[Tensors, torch.Tensor]:
    in_size = weight.shape[1]
    group_of = np.arange(in_size) // (group_size if group_size > 0 else in_size)
    if act_order:
        group_of = group_of[np.random.default_rng(in_size).permutation(in_size)]
    rounded = Rounded(weight, bits=bits, group_of=group_of, symmetric=symmetric)
    stored_zeros = rounded.zeros.T - (1 if version == 1 else 0)
    tensors = {
        "qweight": pack_rows(rounded.u, bits).T.contiguous(),
        "qzeros": pack_rows(stored_zeros, bits),
        "scales": torch.from_numpy(rounded.scales.T.copy()),
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    return tensors, rounded.dense()


def awq_module(weight: torch.Tensor, *, group_size: int = 32) -> tuple[Tensors, torch.Tensor]:
    group_of = np.arange(weight.shape[1]) // group_size
    rounded = Rounded(weight, bits=4, group_of=group_of, symmetric=False)
    tensors = {
        "qweight": pack_rows(rounded.u.T, 4, AWQ_LANES),
        "qzeros": pack_rows(rounded.zeros.T, 4, AWQ_LANES),
        "scales": torch.from_numpy(rounded.scales.T.copy()),
    }
    return tensors, rounded.dense()


def packed_module(
    weight: torch.Tensor,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
) -> tuple[Tensors, torch.Tensor]:
    """group_size 0: one scale per row."""
    in_size = weight.shape[1]
    group_of = np.arange(in_size) // (group_size or in_size)
    if act_order:
        group_of = group_of[np.random.default_rng(in_size).permutation(in_size)]
    rounded = Rounded(weight, bits=bits, group_of=group_of, symmetric=symmetric)
    tensors = {
        "weight_packed": pack_rows(rounded.u, bits),
        "weight_scale": torch.from_numpy(rounded.scales.copy()),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_rows(rounded.zeros.T, bits).T.contiguous()
    if act_order:
        tensors["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    return tensors, rounded.dense()


def int8_module(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 127).float()
    values = (weight / scale).round().to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def grouped_int8_module(weight: torch.Tensor, *, group_size: int = 32) -> tuple[Tensors, torch.Tensor]:
    """Groups of inputs that do not stand side by side, as compressed-tensors' `actorder: group` stores."""
    in_size = weight.shape[1]
    group_of = torch.from_numpy(np.random.default_rng(in_size).permutation(np.arange(in_size) // group_size))
    scales = torch.stack(
        [weight[:, group_of == group].abs().amax(1) / 127 for group in range(in_size // group_size)], dim=1
    )
    values = (weight / scales[:, group_of]).round().to(torch.int8)
    tensors = {"weight": values, "weight_scale": scales, "weight_g_idx": group_of.to(torch.int32)}
    return tensors, values.float() * scales[:, group_of]


def fp8_module(weight: torch.Tensor, *, block: int = 0) -> tuple[Tensors, torch.Tensor]:
    if not block:
        scale = (weight.abs().amax(1, keepdim=True) / 448).float()
        values = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale": scale}, values.float() * scale
    rows, columns = (-(-n // block) for n in weight.shape)
    scales = torch.ones(rows, columns)
    values = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    dense = torch.zeros(weight.shape)
    for i in range(rows):
        for j in range(columns):
            at = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[at].abs().max() / 448
            values[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            dense[at] = values[at].float() * scales[i, j]
    return {"weight": values, "weight_scale_inv": scales}, dense


Module = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
"""`input_activations` of W8A8 as llm-compressor's preset writes it."""


def compressed_config(
    layout: str, *, activations: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def quantise_folder(dense: Path, out: Path, *, module: Module, config: dict[str, Any]) -> Path:
    """Write `out`, the quantised checkpoint of the model in `dense`, and return the folder of the dense model
    that it stands for. Matrices of layers are quantised, all else is as it was."""
    same = out.with_name(out.name + "-dense")
    for folder in (out, same):
        shutil.copytree(dense, folder)
    quantised: Tensors = {}
    plain: Tensors = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        is_matrix = ".layers." in name and tensor.dim() == 2 and not name.endswith("mlp.gate.weight")
        if not is_matrix:
            quantised[name] = plain[name] = tensor
            continue
        tensors, meaning = module(tensor.float())
        prefix = name.removesuffix(".weight")
        quantised.update({f"{prefix}.{suffix}": value for suffix, value in tensors.items()})
        plain[name] = meaning.to(tensor.dtype)
    save_file(quantised, out / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, same / "model.safetensors", metadata={"format": "pt"})
    path = out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return same
