"""Quantisation of a checkpoint's weights, as its config.json declares it. No torch here.

Formats: GPTQ (arXiv 2210.17323, as AutoGPTQ and GPTQModel write it), AWQ (arXiv 2306.00978, the "gemm"
packing of AutoAWQ), compressed-tensors (vLLM's llm-compressor), and fp8 as DeepSeek and vLLM write it. This
module does not read which modules are quantised: tensors show it (`qweight` or `weight`).
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from baton.config import ModelConfig
from baton.core.errors import SetupError

QuantFormat = Literal["gptq", "awq", "packed", "int8", "fp8"]
"""packed, int8: compressed-tensors' `pack-quantized` and `int-quantized`. fp8: e4m3 values with scales."""


class QuantScheme(msgspec.Struct, frozen=True):
    format: QuantFormat
    bits: int
    zero_point_offset: int = 0
    """gptq: what is added to a stored zero point (1 in version 1 of the format)."""
    symmetric: bool = False
    """packed: zero points are not stored."""
    group_size: int = 0
    """gptq, awq, packed, int8: inputs that share a scale; 0: the whole row."""
    activation_bits: int = 0
    """int8: activations are rounded per token to this many bits as they come; 0: they are not, or by scales
    that were fixed before, which are not used: they are taken as they are."""
    fp8_block: int = 0
    """fp8: scales are per square block of this many values; 0: per row or per tensor."""

    @property
    def label(self) -> str:
        """Name for people, such as "GPTQ int4"."""
        names: dict[QuantFormat, str] = {
            "gptq": "GPTQ",
            "awq": "AWQ",
            "packed": "compressed-tensors",
            "int8": "compressed-tensors",
            "fp8": "fp8",
        }
        if self.format == "fp8":
            return names[self.format]
        return f"{names[self.format]} {'W8A8' if self.activation_bits else f'int{self.bits}'}"


def parse_scheme(config: Mapping[str, Any], where: str) -> QuantScheme | None:
    """Parse `quantization_config` of a config.json. None means not quantised, or MXFP4, which has no options.

    Raises SetupError for a format or variant that is not supported, and names it.
    """
    raw: object = config.get("quantization_config") or config.get("compression_config")
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise SetupError(f"{where}: quantization_config must be an object, is {raw!r}")
    fields = cast(dict[str, Any], raw)
    method = str(fields.get("quant_method", "unknown"))
    match method:
        case "gptq":
            return _gptq(fields, where)
        case "awq":
            return _awq(fields, where)
        case "compressed-tensors" | "sparseml":
            return _compressed(fields, where)
        case "fp8":
            return _fp8(fields, where)
        case "mxfp4":
            return None
        case _:
            raise SetupError(
                f"{where}: checkpoints quantised with {method} are not supported; supported are GPTQ, AWQ, "
                "compressed-tensors, fp8, MXFP4 and GGUF, or an unquantised checkpoint with "
                "model.quantization"
            )


def check_quantization(scheme: QuantScheme | None, model: ModelConfig) -> None:
    """Raises SetupError: what the checkpoint has and what is asked for do not go together, or not with
    the device."""
    if scheme is not None and model.quantization != "none":
        raise SetupError(
            f"model.quantization={model.quantization}, but the checkpoint is quantised already "
            f"({scheme.label}): leave it at none"
        )
    if model.device != "cpu":
        if model.quantization == "w8a8":
            raise SetupError(
                "model.quantization=w8a8 is for CPUs: on a GPU use int8 (activations as they are) or fp8"
            )
        return
    if model.quantization == "fp8":
        raise SetupError("model.quantization=fp8 needs a CUDA device; on the CPU use int8 or int4")
    if scheme is not None and scheme.format == "fp8":
        raise SetupError(
            "this checkpoint's weights are fp8, which needs a CUDA device; on the CPU use the unquantised "
            "checkpoint with model.quantization=int8"
        )


def _bits(value: object, supported: tuple[int, ...], method: str, where: str) -> int:
    if isinstance(value, int) and value in supported:
        return value
    listed = " and ".join(map(str, supported))
    raise SetupError(f"{where}: {method} with {value} bits is not supported; supported are {listed}")


def _group_size(fields: Mapping[str, Any]) -> int:
    """Tensors show it too; here it serves to say early which shapes of workers are possible."""
    size: object = fields.get("group_size", fields.get("q_group_size"))
    return size if isinstance(size, int) and size > 0 else 0


def _gptq(fields: Mapping[str, Any], where: str) -> QuantScheme:
    version = str(fields.get("checkpoint_format") or "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise SetupError(f"{where}: GPTQ checkpoint_format {version} is not supported; gptq and gptq_v2 are")
    bits = _bits(fields.get("bits"), (4, 8), "GPTQ", where)
    offset = 1 if version == "gptq" else 0
    return QuantScheme("gptq", bits, zero_point_offset=offset, group_size=_group_size(fields))


def _awq(fields: Mapping[str, Any], where: str) -> QuantScheme:
    version = str(fields.get("version") or "gemm").lower()
    if version != "gemm":
        raise SetupError(f"{where}: AWQ version {version} is not supported; supported is gemm")
    if fields.get("zero_point") is False:
        raise SetupError(f"{where}: AWQ without zero points is not supported")
    bits = _bits(fields.get("bits", fields.get("w_bit")), (4,), "AWQ", where)
    return QuantScheme("awq", bits, group_size=_group_size(fields))


def _fp8(fields: Mapping[str, Any], where: str) -> QuantScheme:
    fmt = str(fields.get("fmt") or fields.get("weight_format") or "e4m3")
    if fmt != "e4m3":
        raise SetupError(f"{where}: fp8 in {fmt} is not supported; supported is e4m3")
    block: object = fields.get("weight_block_size")
    if block is None:
        return QuantScheme("fp8", 8)
    sides = cast(list[object], block) if isinstance(block, list) else []
    if len(sides) != 2 or sides[0] != sides[1] or not isinstance(sides[0], int) or sides[0] < 1:
        raise SetupError(f"{where}: fp8 weight_block_size {block!r} is not supported; blocks must be square")
    return QuantScheme("fp8", 8, fp8_block=sides[0])


def _compressed(fields: Mapping[str, Any], where: str) -> QuantScheme:
    """https://github.com/vllm-project/compressed-tensors, `QuantizationConfig`."""
    sparsity: object = fields.get("sparsity_config") or {}
    if isinstance(sparsity, dict) and cast(dict[str, Any], sparsity).get("format") not in (None, "dense"):
        raise SetupError(f"{where}: compressed-tensors with sparsity is not supported")
    if fields.get("transform_config"):
        raise SetupError(f"{where}: compressed-tensors with transforms is not supported")
    groups: object = fields.get("config_groups")
    listed = list(cast(dict[str, Any], groups).values()) if isinstance(groups, dict) else []
    schemes = {_group_scheme(group, fields, where) for group in listed}
    if len(schemes) != 1:
        raise SetupError(
            f"{where}: compressed-tensors with {len(schemes)} different schemes is not supported; "
            "all quantised modules must have the same one"
        )
    return schemes.pop()


def _group_scheme(group: object, outer: Mapping[str, Any], where: str) -> QuantScheme:
    fields = cast(dict[str, Any], group) if isinstance(group, dict) else {}
    weights = cast(dict[str, Any], fields.get("weights") or {})
    layout = str(fields.get("format") or outer.get("format") or "unknown")
    kind, bits = weights.get("type"), weights.get("num_bits")
    symmetric = bool(weights.get("symmetric", True))
    strategy = str(weights.get("strategy") or "unknown")
    if layout == "pack-quantized" and kind == "int" and strategy in ("group", "channel"):
        supported = _bits(bits, (4, 8), "compressed-tensors", where)
        return QuantScheme("packed", supported, symmetric=symmetric, group_size=_group_size(weights))
    if layout in ("int-quantized", "naive-quantized") and kind == "int":
        if not symmetric:
            raise SetupError(f"{where}: compressed-tensors {layout} with zero points is not supported")
        if strategy not in ("channel", "tensor", "group", "unknown"):
            raise SetupError(f"{where}: compressed-tensors {layout} by {strategy} is not supported")
        supported = _bits(bits, (8,), "compressed-tensors", where)
        activation_bits = 8 if _rounds_tokens(fields.get("input_activations")) else 0
        return QuantScheme(
            "int8",
            supported,
            symmetric=True,
            group_size=_group_size(weights),
            activation_bits=activation_bits,
        )
    if layout in ("float-quantized", "naive-quantized") and kind == "float" and bits == 8:
        return QuantScheme("fp8", 8, fp8_block=_square_block(weights, strategy, where))
    raise SetupError(
        f"{where}: compressed-tensors format {layout} with {bits}-bit {kind} weights per {strategy} is not "
        "supported; supported are pack-quantized int4 and int8, int-quantized int8, float-quantized fp8"
    )


def _rounds_tokens(activations: object) -> bool:
    """Whether activations are rounded to int8 by a scale per token that is found as they come."""
    fields = cast(dict[str, Any], activations) if isinstance(activations, dict) else {}
    is_int8 = fields.get("type", "int") == "int" and fields.get("num_bits") == 8
    is_per_token = str(fields.get("strategy")) == "token" and fields.get("dynamic") is True
    return is_int8 and is_per_token and bool(fields.get("symmetric", True))


def _square_block(weights: Mapping[str, Any], strategy: str, where: str) -> int:
    if strategy in ("tensor", "channel"):
        return 0
    sides = cast(list[object], weights.get("block_structure") or [])
    if strategy == "block" and len(sides) == 2 and sides[0] == sides[1] and isinstance(sides[0], int):
        return sides[0]
    raise SetupError(f"{where}: fp8 weights per {strategy} {sides or ''} are not supported")
