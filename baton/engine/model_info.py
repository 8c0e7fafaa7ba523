"""What a process without torch (the router) must know of a model."""

from pathlib import Path

import msgspec

from baton.core.geometry import DTypeName
from baton.engine.models.read import load_spec


class ModelInfo(msgspec.Struct, frozen=True):
    name: str
    """The folder's last part."""
    architecture: str
    context_tokens: int
    """Prompt plus generated tokens of one sequence; workers may have less room."""
    vocab_size: int
    """Rows of the embedding: valid token ids are below it."""
    eos_token_ids: tuple[int, ...]
    dtype: DTypeName


def read_model_info(path: Path | str) -> ModelInfo:
    """Of a local model folder. Raises SetupError, see `baton.engine.models.spec.load_spec`."""
    folder = Path(path)
    spec = load_spec(folder)
    return ModelInfo(
        name=folder.resolve().name,
        architecture=spec.architecture,
        context_tokens=spec.context_tokens,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        dtype=spec.dtype,
    )
