"""Names from the configuration, as torch objects."""

import torch

from baton.core.errors import SetupError
from baton.core.geometry import DTypeName, QuantName

TORCH_DTYPES: dict[DTypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
STORED_TORCH_DTYPES: dict[DTypeName | QuantName, torch.dtype] = {
    **TORCH_DTYPES,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers from host memory without waiting for the device. The source of the copy is page-locked
    memory, which torch keeps until the copy is done: from other memory torch waits for all that the device
    has to do."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def torch_device(name: str) -> torch.device:
    """Raises SetupError: no such device on this machine."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SetupError(f"device {name!r} is not known: use cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise SetupError(f"device {name!r} is not supported: use cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise SetupError(f"device {name!r} does not exist: torch sees {count} CUDA devices")
    return torch.device("cuda", device.index or 0)
