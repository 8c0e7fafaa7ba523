"""Commands that other packages implement run as if they were written here."""

import importlib
from collections.abc import Sequence

import typer

from baton.core.errors import SetupError
from commands.run import run_app


def run_part(name: str, module_name: str, *, extra: str, example: str, args: Sequence[str]) -> None:
    """Run a command of another package.

    The module has a typer `app` with commands of its own, or a function named like the command. `extra` names
    the optional dependencies it needs. Raises SetupError if they are not installed.
    """
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        advice = f": pip install 'baton[{extra}]'" if extra else ""
        raise SetupError(f"`baton {name}` needs {error.name}, which is not installed{advice}") from error
    part = getattr(module, "app", None)
    if not isinstance(part, typer.Typer):
        part = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        function = getattr(module, name.replace("-", "_"))
        part.command(epilog=f"Example: {example}")(function)
    run_app(part, name=f"baton {name}", args=args)
