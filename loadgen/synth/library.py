"""The parameters that come with Baton, fitted to public traces."""

from importlib.resources import files
from pathlib import Path

from baton.core.errors import SetupError
from loadgen.synth.params import SynthParams, from_toml, read_params

_FOLDER = files("loadgen.synth") / "builtin"


def names() -> list[str]:
    return sorted(
        entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir() if entry.name.endswith(".toml")
    )


def params_of(name: str) -> SynthParams:
    """The built-in parameters of this name, or those of a file. Raises SetupError."""
    if name in names():
        return from_toml((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"), name=name)
    if not name.endswith(".toml"):
        raise SetupError(f"no parameters {name!r}: built in are {', '.join(names())}; or give a .toml file")
    return read_params(Path(name))
