"""Compiling ahead of time, on a machine without a GPU: kernels are called with tensors that have shapes and
no memory, on a driver that launches nothing. What is compiled is what the same call compiles on a device."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from engine.kernels.triton import attention, blocks, gated, grouping, norm, product, rotary
from engine.kernels.triton.device import DeviceFacts
from engine.kernels.triton.kernels import TritonKernels
from engine.kv.pool import KVPool

META = torch.device("meta")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
KERNELS = (
    attention.attend, attention.merge, rotary.rotate_and_store, rotary.store_latent, norm.rms_norm,
    gated.gated, blocks.copy_rows, product.product, product.add_splits, grouping.count_rows,
    grouping.place_rows, grouping.add_choices,
)  # fmt: skip


class Driver:
    """Stands in for a device of `facts`."""

    def __init__(self, facts: DeviceFacts) -> None:
        self._facts = facts
        self.utils = self

    def get_current_target(self):
        return GPUTarget("cuda", self._facts.capability, 32)

    def get_current_device(self):
        # Kernels are remembered by device.
        return self._facts.capability

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": self._facts.shared_bytes}

    def load_binary(self, name, binary, shared, device):
        return None, None, 0, 0, 1024

    def launcher_cls(self, source, metadata):
        return lambda *arguments: None


@dataclass(frozen=True)
class Compiled:
    kernel: str
    constants: str
    ptx: str
    cubin: bytes
    shared_bytes: int
    warps: int

    def resources(self) -> dict[str, int]:
        """REG per thread; STACK and LOCAL bytes: what does not fit in registers."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}


def compiled_by(facts: DeviceFacts, calls) -> list[Compiled]:
    """Kernels that `calls()` compiles for a device of `facts`."""
    for kernel in KERNELS:
        kernel.device_caches.pop(facts.capability, None)
    driver.set_active(Driver(facts))
    try:
        calls()
        caches = [
            (k, k.device_caches[facts.capability][0]) for k in KERNELS if facts.capability in k.device_caches
        ]
        return [_compiled(kernel, one) for kernel, cache in caches for one in cache.values()]
    finally:
        driver._active = None


def _compiled(kernel, one) -> Compiled:
    (constants,) = [value for value in one.src.constants.values() if not isinstance(value, int | bool)] or [
        ""
    ]
    asm, facts = one.asm, one.metadata
    return Compiled(kernel.__name__, str(constants), asm["ptx"], asm["cubin"], facts.shared, facts.num_warps)


def make_kernels(geometry, facts, blocks=4) -> TritonKernels:
    pool = KVPool(geometry, kv_bytes=blocks * geometry.block_bytes, device=META)
    return TritonKernels(pool, facts)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=META)
