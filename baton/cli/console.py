"""Where commands print their tables."""

from rich.console import Console

PIPE_COLUMNS = 400


def console() -> Console:
    """A terminal has its width; a file or a pipe takes lines as long as they are."""
    found = Console()
    return found if found.is_terminal else Console(width=PIPE_COLUMNS)
