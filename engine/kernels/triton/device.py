"""Facts that the kernels need about the device on which they are launched."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue]
"""The kernels run in Triton's interpreter, on host tensors."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    capability: int
    """80: A100; 89: L40S, RTX 4090; 90: H100, H200."""
    sm_count: int
    shared_bytes: int
    """Shared memory one program may have, at most."""

    @classmethod
    def of(cls, device: torch.device) -> "DeviceFacts":
        """Host tensors, which only the interpreter takes, get an H100's."""
        if device.type != "cuda":
            return H100
        properties = torch.cuda.get_device_properties(device)
        return cls(
            capability=10 * properties.major + properties.minor,
            sm_count=properties.multi_processor_count,
            shared_bytes=properties.shared_memory_per_block_optin,
        )

    @property
    def has_wgmma(self) -> bool:
        """Matrix products of whole groups of 4 warps out of shared memory (Hopper)."""
        return self.capability == 90

    @property
    def has_fp8(self) -> bool:
        """Conversions from e4m3. (The interpreter knows none.)"""
        return self.capability >= 89 and not INTERPRETED


H100 = DeviceFacts(capability=90, sm_count=132, shared_bytes=227 * 1024)

_TRITON_DTYPES: dict[torch.dtype, tl.dtype] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Type of the operands of matrix products. The interpreter has no bfloat16 arithmetic, only
    conversions."""
    return tl.float32 if INTERPRETED else _TRITON_DTYPES[dtype]


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 1, **constants: Any
) -> None:
    """Start `kernel` on the current stream. `constants`: of the compiled kernel."""
    kernel[grid](*arguments, num_warps=warps, num_stages=stages, **constants)
