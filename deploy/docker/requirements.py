"""Prints what the project requires, one requirement a line, without the project itself.

Run `python requirements.py pyproject.toml [EXTRA]`. Images install it before the code, so that a change of
the code changes one small layer.
"""

import sys
import tomllib
from pathlib import Path


def requirements(path: str, extra: str = "") -> list[str]:
    """Return the requirements of the project in this file, with those of one of its extras. Raises KeyError
    for an extra that it does not have."""
    project = tomllib.loads(Path(path).read_text())["project"]
    return [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else ())]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(*sys.argv[1:])) + "\n")
