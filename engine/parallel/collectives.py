"""The choice of what carries tensors between ranks. The control plane asks too, so there is no torch here."""

from typing import Literal

from baton.core.errors import SetupError

Collectives = Literal["shared_memory", "torch"]


def collectives_of(setting: Literal["auto", "shared_memory", "torch"], device: str) -> Collectives:
    """What carries the tensors between ranks: `engine.collectives`, settled for a device.

    Raises SetupError for memory of a device that cannot be shared.
    """
    is_cpu = device == "cpu"
    if setting == "auto":
        return "shared_memory" if is_cpu else "torch"
    if setting == "shared_memory" and not is_cpu:
        raise SetupError(
            f"engine.collectives=shared_memory needs tensors in host memory, and model.device={device}: "
            "set it to auto"
        )
    return setting
