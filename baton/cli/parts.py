"""Commands that other parts implement: a module with a typer `app`, or with `main(argv) -> status`."""

import importlib
from collections.abc import Sequence

import typer

from baton.core.errors import SetupError


def run_part(name: str, module_name: str, extra: str, args: Sequence[str]) -> None:
    """`extra`: the optional dependencies this part needs, for the advice when they are missing.
    Raises SetupError if it is not installed."""
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        advice = f": pip install 'baton[{extra}]'" if extra else ""
        raise SetupError(f"`baton {name}` needs {error.name}, which is not installed{advice}") from error
    part = getattr(module, "app", None)
    if isinstance(part, typer.Typer):
        part(args=list(args), prog_name=f"baton {name}")
        return
    status = module.main(list(args))
    raise typer.Exit(int(status or 0))
