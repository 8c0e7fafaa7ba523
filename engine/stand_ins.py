"""Stand-ins for packages that a library imports although this process needs nothing of them."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _AnythingType(type):
    def __getattr__(cls, name: str) -> Any:
        return cls

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        return cls


class _Anything(metaclass=_AnythingType):
    """Stands for every class, function and value of the package, in annotations and constants too."""


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


def leave_out(*packages: str) -> None:
    """Have later imports of these packages find a stand-in, unless they are loaded already."""
    for package in packages:
        sys.modules.setdefault(package, _StandIn(package))


@contextmanager
def left_out(*packages: str) -> Generator[None]:
    """Leave packages out of the imports of this block alone. No other thread may import them meanwhile."""
    absent = [package for package in packages if package not in sys.modules]
    leave_out(*absent)
    try:
        yield
    finally:
        for package in absent:
            del sys.modules[package]
