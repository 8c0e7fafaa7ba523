"""Counts of experts in transformers' own modules.

Its mixtures agree on one call, whatever their routers do: the experts of a layer are a module that is told
which of them each token chose (`top_k_index`).
"""

import inspect
import re
from typing import Any

import torch
from torch import Tensor

from engine.models.expert_counts import ExpertCounts

_CHOSEN = "top_k_index"
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def count_experts(model: Any, device: torch.device) -> ExpertCounts | None:
    """Counts from now on. None: no module takes such a choice, or layers differ in the number of experts."""
    found = {
        int(match[1]): module for name, module in model.named_modules() if (match := _mixture(name, module))
    }
    sizes = {getattr(module, "num_experts", None) for module in found.values()}
    if len(sizes) != 1 or not isinstance(size := sizes.pop(), int):
        return None
    counts = ExpertCounts(tuple(sorted(found)), size, device)
    for row, layer in enumerate(counts.layers):
        found[layer].register_forward_pre_hook(_counter(counts, row), with_kwargs=True)
    return counts


def _mixture(name: str, module: Any) -> re.Match[str] | None:
    if not name.endswith("experts") or _CHOSEN not in inspect.signature(module.forward).parameters:
        return None
    return _LAYER.search(name)


def _counter(counts: ExpertCounts, row: int) -> Any:
    def count(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        chosen: Tensor = named[_CHOSEN] if _CHOSEN in named else positional[1]
        counts.add(row, chosen.reshape(-1, chosen.shape[-1]), None)

    return count
