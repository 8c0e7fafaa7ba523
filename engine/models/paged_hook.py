"""Our paged attention as a function that transformers' modules call in place of their own."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.core.errors import SetupError
from baton.core.geometry import KVGeometry
from engine.kernels.interface import AttentionSpec, Kernels

_FAR = 2**20
"""A position beyond all windows."""
_names = itertools.count()


class PagedHook:
    """Registered under `name`. Before `plan` is set it records what each layer's attention is."""

    def __init__(self, kernels: Kernels[Any, Any, Any], geometry: KVGeometry) -> None:
        self._kernels, self._geometry = kernels, geometry
        self.specs: dict[int, AttentionSpec] = {}
        self.plan: Any = None
        self.name = f"baton_paged_{next(_names)}"
        _register(self)

    def mask(
        self,
        *,
        mask_function: Callable[..., Tensor],
        q_length: int,
        kv_length: int,
        device: torch.device,
        **_: Any,
    ) -> Tensor | None:
        """The mask that the modules pass on to `attend`. While recording, it is the window, in every element
        of a tensor of the mask's shape, so that it survives slicing."""
        if self.plan is not None:
            return None
        return torch.tensor(_window(mask_function, device), dtype=torch.float32, device=device).view(
            1, 1, 1, 1
        )

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """query [1, H, T, D], key and value [1, K, T, D or less] -> [1, T, H, as value's]."""
        layer: Any = getattr(module, "layer_idx", None)
        value_dim = value.shape[-1]
        if self.plan is None:
            self._record(module, layer, query, key, value, mask, options)
            return query.new_zeros((1, query.shape[2], query.shape[1], value_dim)), None
        if value_dim < key.shape[-1]:
            value = F.pad(value, (0, key.shape[-1] - value_dim))
        q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
        spec = self.specs[layer]
        ready = self._kernels.rotate_and_store(q, k, v, spec=spec, plan=self.plan)
        out = self._kernels.attention(ready, spec=spec, plan=self.plan)
        return out[None, :, :, :value_dim], None

    def _record(
        self,
        module: Any,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> None:
        geometry = self._geometry
        if not isinstance(layer, int) or layer in self.specs:
            raise SetupError(f"{type(module).__name__} does not attend once per layer")
        if (key.shape[1], key.shape[3]) != (geometry.kv_head_count, geometry.head_dim):
            raise SetupError(
                f"layer {layer} has {key.shape[1]} key-value heads of {key.shape[3]} dimensions, config.json "
                f"says {geometry.kv_head_count} of {geometry.head_dim}"
            )
        if value.shape[1] != key.shape[1] or value.shape[3] > key.shape[3]:
            raise SetupError(f"layer {layer} has values of {value.shape[3]} dimensions")
        scale = options.get("scaling")
        sinks = options.get("s_aux")
        self.specs[layer] = AttentionSpec(
            layer=layer,
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            window=int(mask.flatten()[0]) if mask is not None else 0,
            softcap=float(options.get("softcap") or 0.0),
            sinks=None if sinks is None else sinks.detach().float(),
        )


def _register(hook: PagedHook) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    # transformers keeps what is registered for ever: it must not keep the weights.
    reference = weakref.ref(hook)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        found = reference()
        assert found is not None
        return found.attend(module, query, key, value, attention_mask, **options)

    def mask(*_: Any, **options: Any) -> Tensor | None:
        found = reference()
        assert found is not None
        return found.mask(**options)

    AttentionInterface.register(hook.name, attend)
    AttentionMaskInterface.register(hook.name, mask)


def _window(mask_function: Callable[..., Tensor], device: torch.device) -> int:
    """Number of positions that a token sees; 0 means all before it. Raises SetupError if they are not the
    last ones."""
    keys = torch.arange(_FAR + 64, device=device)
    windows = {_seen_at(mask_function, keys, position) for position in (_FAR, _FAR + 37)}
    if windows == {_FAR + 1, _FAR + 38}:
        return 0
    if len(windows) != 1 or min(windows) < 1:
        raise SetupError("its attention is neither causal nor a sliding window")
    return windows.pop()


def _seen_at(mask_function: Callable[..., Tensor], keys: Tensor, position: int) -> int:
    seen = mask_function(0, 0, torch.tensor(position, device=keys.device), keys).expand(len(keys))
    count = int(seen.sum())
    first = position + 1 - count
    return count if first >= 0 and bool(seen[first : position + 1].all()) else -1
