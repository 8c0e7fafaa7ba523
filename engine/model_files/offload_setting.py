"""What `model.offload` may be for a model of so many layers."""

from baton.core.errors import SetupError

BUFFERS = 2
"""Streamed layers that are in memory at any time: one computes, and the next one comes."""


def check_offload(offload: str, layer_count: int) -> None:
    """Raises SetupError: a number that no model of so many layers can have."""
    if not offload.isdigit() or offload == "0":
        return
    count = int(offload)
    if count > layer_count:
        raise SetupError(
            f"model.offload={count}: the model has {layer_count} layers; give a number up to "
            f"{layer_count}, all or auto"
        )
    if count <= BUFFERS:
        raise SetupError(
            f"model.offload={count} saves no memory, since {BUFFERS} layers are in memory at any time: give "
            f"0, or at least {BUFFERS + 1}"
        )
