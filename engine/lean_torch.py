"""torch, imported without what only its exporters and compilers use.

torch registers how each operator acts on tensors that have a shape and no data, and loads `torch.export` with
half of its compiler, whenever it is imported. Nothing of ours traces a model in that way. Models that run
through transformers' modules do, and get the rest by `complete_torch`.
"""

import importlib
import sys

from baton.core import garbage
from engine.stand_ins import left_out

_LEFT_OUT = ("torch._meta_registrations", "torch.export")
"""They take 1.1 of 3.1 s of a core (torch 2.13, AMD EPYC Zen 3, 2026-11-30)."""


def import_torch() -> None:
    """Import torch unless it is imported already. No other thread may import it meanwhile."""
    if "torch" not in sys.modules:
        with garbage.uncollected(), left_out(*_LEFT_OUT):
            importlib.import_module("torch")


def complete_torch() -> None:
    """Import what `import_torch` left out, if it did. Modules of torch that need it may be imported only
    after this."""
    for module in _LEFT_OUT:
        importlib.import_module(module)
