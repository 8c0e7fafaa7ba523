"""Where commands print their tables."""

from rich.console import Console

PIPE_COLUMNS = 400


def new_console(*, stderr: bool = False, highlight: bool = True) -> Console:
    """A terminal has its width; a file or a pipe takes lines as long as they are."""
    found = Console(stderr=stderr, highlight=highlight)
    return found if found.is_terminal else Console(stderr=stderr, highlight=highlight, width=PIPE_COLUMNS)
