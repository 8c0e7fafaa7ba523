"""torch, imported without what only its exporters and compilers use.

torch registers how each operator acts on tensors that have a shape and no data, and loads `torch.export` with
half of its compiler, whenever it is imported. Nothing of ours traces a model in that way. Models that run
through transformers' modules do, and get the rest by `complete_torch`.

Until then `torch._dynamo`, `torch._decomp`, `torch._inductor`, FakeTensor and torch.Generator fail with
errors of imports in a circle, and so do functions that torch keeps from being compiled (its optimisers, for
example).
"""

import importlib
import sys

from baton.core import garbage
from engine.stand_ins import left_out

_LEFT_OUT = ("torch._meta_registrations", "torch.export")
"""They take 0.8 of 2.5 s of a core (torch 2.13, AMD EPYC Zen 3, 2026-11-30)."""


def import_torch(device: str) -> None:
    """Import torch for a model on this device (`model.device`), unless it is imported already. On GPUs it is
    whole, since without the rest it was not tried there. No other thread may import it meanwhile."""
    if "torch" not in sys.modules and device == "cpu":
        with garbage.uncollected(), left_out(*_LEFT_OUT):
            importlib.import_module("torch")


def complete_torch() -> None:
    """Import what `import_torch` left out, if it did. Modules of torch that need it may be imported only
    after this."""
    for module in _LEFT_OUT:
        importlib.import_module(module)
