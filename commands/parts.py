"""Commands that other packages implement run as if they were written here."""

import importlib
from collections.abc import Sequence

import typer

from baton.core import garbage
from baton.core.errors import SetupError
from commands.run import run_app

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a typer command that passes all of its arguments on."""


def run_part(name: str, module_name: str, *, extra: str, args: Sequence[str], example: str = "") -> None:
    """Run a command of another package.

    The module has a typer `app` with commands of its own, or a function named like the last word of the
    command. `extra` names the optional dependencies it needs. Raises SetupError if they are not installed.
    """
    try:
        with garbage.uncollected():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        advice = f": pip install 'baton[{extra}]'" if extra else ""
        raise SetupError(f"`baton {name}` needs {error.name}, which is not installed{advice}") from error
    part = getattr(module, "app", None)
    if not isinstance(part, typer.Typer):
        part = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        function = getattr(module, name.rpartition(" ")[2].replace("-", "_"))
        part.command(epilog=f"Example: {example}" if example else None)(function)
    run_app(part, name=f"baton {name}", args=args)
