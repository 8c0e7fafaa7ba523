"""Runs a command line. A usage error is reported in one line, like any other error."""

import re
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.main import get_command

from baton.core.errors import SetupError

INTERRUPTED_STATUS = 130
_UsageError: Any = typer.BadParameter.__mro__[1]  # typer does not export this class of its own copy of click
assert _UsageError.__name__ == "UsageError"


def run_app(app: typer.Typer, *, name: str, args: Sequence[str] | None = None) -> NoReturn:
    """`args` are the arguments without the program's name; None takes this process's. Ends with SystemExit.
    Raises SetupError for wrong options."""
    words = None if args is None else list(args)
    try:
        status = get_command(app).main(args=words, prog_name=name, standalone_mode=False)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            raise SystemExit(error.exit_code) from None
        path = error.ctx.command_path if error.ctx else name
        if (option := getattr(error, "option_name", "")) and re.fullmatch(r"-\d.*", option):
            text = f"{option} is read as an option: arguments here cannot be negative"
            raise SetupError(f"{text}; see `{path} --help`") from None
        raise SetupError(f"{_sentence(error.format_message())}; see `{path} --help`") from None
    except typer.Abort:
        raise SystemExit(INTERRUPTED_STATUS) from None
    raise SystemExit(status if isinstance(status, int) else 0)


def _sentence(text: str) -> str:
    """click's message in one line and without a full stop, like our own messages."""
    flat = " ".join(text.split()).rstrip(".")
    return flat[:1].lower() + flat[1:]
