"""Any decoder that transformers knows, through its own modules, with our attention plugged in.

The modules get the flat batch as one sequence, with the positions of each token; only attention knows
of sequences, blocks and caches. Whether that gives the model's results is found out at load: a small
batch in chunks is compared with transformers' own attention. So a model that carries state elsewhere
(convolutions, recurrences, position biases) is refused, not served wrongly.
"""

import copy
import inspect
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.core.errors import SetupError
from engine.kernels.interface import BatchLayout, Kernels, RopeTables, Span
from engine.kv.pool import KVPool
from engine.lean_torch import complete_torch
from engine.model_files.spec import ModelSpec
from engine.models.fallback_experts import count_experts
from engine.models.paged_hook import PagedHook

log = logging.getLogger(__name__)

_PROBES = (11, 4)
"""Tokens of the sequences that are computed at load for comparison …"""
_CUTS = (7, 3)
"""… in two steps, the first with so many of each: a chunk after a chunk, and a decode."""
_ERROR_MAX = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Relative, of the logits; median over positions (rounding may choose another expert at some)."""
_QUANTIZED_KV_ERROR_MAX = 0.15


class FallbackModel:
    """Implements `engine.models.model.LanguageModel`."""

    def __init__(self, spec: ModelSpec, folder: Path, kernels: Kernels[Any, Any, Any], kv: KVPool) -> None:
        """Raises SetupError: transformers cannot load it, or its attention cannot be plugged in."""
        complete_torch()  # before transformers, which imports parts of it in an order that does not work
        self._spec, self._kernels, self._kv = spec, kernels, kv
        self._hook = PagedHook(kernels, kv.geometry)
        self._given: Tensor | None = None
        self._made: Any = None
        self._model = _load(spec, folder, self._hook.name, kv)
        self.expert_counts = count_experts(self._model, kv.device)
        self._base: Any = self._model.base_model
        self._base_forward = self._base.forward
        self._base.forward = self._forward_or_given
        self.note = (
            f"{spec.architecture} has no forward pass of its own: it runs through transformers' modules with "
            "paged attention. That is slower, since nothing but attention is fused, packed or batch-invariant"
        )
        """The line for `Member.notes`."""
        log.warning("%s", self.note)
        try:
            with torch.inference_mode():
                self._check()
                if self.expert_counts is not None:
                    self.expert_counts.reset()
        except SetupError as error:
            raise SetupError(f"{spec.architecture} is not supported: {error}") from error
        except (
            Exception
        ) as error:  # modules of any model, called in a way their authors may not have foreseen
            text = str(error).strip() or type(error).__name__
            raise SetupError(
                f"{spec.architecture} is not supported: its modules fail with paged attention: "
                f"{text.splitlines()[0]}"
            ) from error

    def forward(self, tokens: Tensor, layout: BatchLayout, rows: Tensor) -> Tensor:
        positions = torch.from_numpy(layout.positions()).to(tokens.device)
        windows = frozenset(spec.window for spec in self._hook.specs.values())
        self._hook.plan = self._kernels.plan(layout, self._no_rotation(len(tokens)), windows=windows)
        self._made = self._base_forward(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        return self._made.last_hidden_state[0][rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits, computed by the model's own last part, which may scale and cap them. `hidden` is the input
        of that part."""
        self._given = hidden[None]
        try:
            tokens = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            return self._model(input_ids=tokens, use_cache=False).logits[0].float()
        finally:
            self._given = None

    def _forward_or_given(self, *positional: Any, **named: Any) -> Any:
        if self._given is None:
            return self._base_forward(*positional, **named)
        # Which other fields the last part looks for differs between architectures.
        made = copy.copy(self._made)
        made.last_hidden_state = self._given
        return made

    def _no_rotation(self, token_count: int) -> RopeTables:
        """The modules have rotated already."""
        shape = (token_count, self._kv.geometry.head_dim // 2)
        device = self._kv.device
        return {0: (torch.ones(shape, device=device), torch.zeros(shape, device=device))}

    # --- at load ---

    def _check(self) -> None:
        if "position_ids" not in inspect.signature(self._base_forward).parameters:
            raise SetupError("its modules take no positions")
        prompts = [self._probe(length, index) for index, length in enumerate(_PROBES)]
        self._model(input_ids=prompts[0][None], use_cache=False)
        layers = self._spec.layer_count
        if set(self._hook.specs) != set(range(layers)):
            raise SetupError(f"{len(self._hook.specs)} of its {layers} layers attend to keys and values")
        self._model.set_attn_implementation("eager")
        expected = [self._model(input_ids=p[None], use_cache=False).logits[0].float() for p in prompts]
        self._model.set_attn_implementation(self._hook.name)
        errors = [
            (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
            for ours, theirs in zip(self._in_two_steps(prompts), expected, strict=True)
        ]
        error = float(torch.cat(errors).median())
        allowed = _ERROR_MAX[self._model.dtype]
        if self._kv.geometry.is_quantized:
            allowed = max(allowed, _QUANTIZED_KV_ERROR_MAX)
        if not error <= allowed:
            raise SetupError(
                f"with paged attention its results differ by {error:.1%}: they depend on more than keys, "
                "values and positions"
            )

    def _probe(self, length: int, index: int) -> Tensor:
        tokens = (torch.arange(length) * 7919 + 104_729 * index + 17) % self._spec.vocab_size
        return tokens.to(self._kv.device)

    def _in_two_steps(self, prompts: list[Tensor]) -> list[Tensor]:
        geometry = self._kv.geometry
        counts = [geometry.blocks_for(len(prompt)) for prompt in prompts]
        if sum(counts) > self._kv.block_count:
            raise SetupError(f"engine.kv_bytes holds {self._kv.block_count} blocks, too few to try it out")
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        made: list[list[Tensor]] = [[] for _ in prompts]
        for starts, ends in (([0] * len(prompts), _CUTS), (_CUTS, _PROBES)):
            spans = [
                Span(start, end - start, tuple(range(first, first + geometry.blocks_for(end))))
                for start, end, first in zip(starts, ends, firsts, strict=True)
            ]
            layout = BatchLayout.of(spans)
            tokens = torch.cat([prompts[i][starts[i] : ends[i]] for i in layout.order])
            hidden = self.forward(tokens, layout, torch.arange(len(tokens), device=tokens.device))
            parts = self.logits(hidden).split([span.token_count for span in layout.spans])
            for i, part in zip(layout.order, parts, strict=True):
                made[i].append(part)
        return [torch.cat(parts) for parts in made]


def _load(spec: ModelSpec, folder: Path, attention: str, kv: KVPool) -> Any:
    import transformers
    from transformers.utils import logging as transformers_logging

    from engine.devices import TORCH_DTYPES

    transformers_logging.disable_progress_bar()
    model_class: Any = getattr(transformers, spec.architecture)
    try:
        model, report = model_class.from_pretrained(
            folder,
            dtype=TORCH_DTYPES[kv.geometry.dtype],
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except KeyError as error:
        if error.args != (attention,):
            raise
        raise SetupError(
            f"{spec.architecture} is not supported: transformers has no way to replace its attention"
        ) from error
    except Exception as error:  # whatever transformers raises for a damaged checkpoint
        text = str(error).strip() or type(error).__name__
        raise SetupError(f"transformers cannot load {folder}: {text.splitlines()[0]}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise SetupError(f"{folder}: the checkpoint has no tensor {missing[0]}")
    return model.eval().requires_grad_(False).to(kv.device)
