"""A prompt by transformers, in this process: what a user would have without Baton."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from baton.core.errors import SetupError


def transformers_prefill(path: Path, tokens: Sequence[int], dtype: str = "bfloat16") -> Callable[[], float]:
    """Load a Hugging Face folder or a GGUF file, and return a call that computes the prompt with a KV cache
    and the logits of its last token, and returns the seconds. It uses torch's threads. Raises SetupError."""
    from transformers import AutoModelForCausalLM, GgufConfig

    place: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.suffix == ".gguf":  # else its blocks are unpacked to float32 in every product
        place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        place["quantization_config"] = GgufConfig(dequantize=True)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=getattr(torch, dtype))
    except (ImportError, OSError, ValueError) as error:
        raise SetupError(f"transformers does not load {path}: {error}") from error
    model: Any = loaded.eval()
    prompt = torch.tensor([list(tokens)])

    def run() -> float:
        started_s = time.perf_counter()
        with torch.inference_mode():
            model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - started_s

    return run
