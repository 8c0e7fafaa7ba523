"""The console on which commands print their tables."""

from rich.console import Console

PIPE_COLUMNS = 400


def new_console(*, stderr: bool = False, highlight: bool = True) -> Console:
    """Make a console. Tables fit the width of a terminal; a file or a pipe gets lines of any length."""
    found = Console(stderr=stderr, highlight=highlight)
    return found if found.is_terminal else Console(stderr=stderr, highlight=highlight, width=PIPE_COLUMNS)
