"""Opens a trace by the name that a user gives: a file, or `synth:NAME` for a synthetic one."""

import math
from pathlib import Path

from baton.core.errors import SetupError
from loadgen.formats.base import Trace, TraceFormat
from loadgen.synth.generate import synthesize
from loadgen.synth.library import params_of
from loadgen.traces import read_trace

SYNTH = "synth:"


def open_trace(
    source: str,
    *,
    format: TraceFormat | None = None,
    requests: int | None = None,
    duration_s: float = math.inf,
    seed: int = 0,
) -> Trace:
    """The whole file. A `synth:` trace has this many requests or seconds, or else as many requests as its
    parameters were fitted to.

    Raises SetupError.
    """
    if not source.startswith(SYNTH):
        return read_trace(Path(source), format=format)
    params = params_of(source.removeprefix(SYNTH))
    seconds = None if duration_s == math.inf else duration_s
    made = synthesize(params, seed=seed, requests=requests, duration_s=seconds)
    if not made.requests:
        raise SetupError(f"{source}: no request comes in {duration_s:g} s")
    return made


def name_of(source: str) -> str:
    """The name of the trace in reports."""
    return source if source.startswith(SYNTH) else Path(source).name
