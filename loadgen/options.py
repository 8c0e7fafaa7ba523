"""What `baton replay` can be asked for, declared once: the command line and the values are derived from it.

A command's function takes one dataclass whose fields are `Annotated` for typer; `as_command` gives it the
signature that typer reads.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from loadgen.slo import target_s
from loadgen.target import Api
from loadgen.traces import TraceFormat

_Asked = TypeVar("_Asked")


def target(text: str | float) -> float:
    """Of an objective's option, or its default."""
    try:
        return target_s(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


class Sessions(StrEnum):
    OPEN = "open"
    """Every turn leaves at its instant in the trace."""
    WAIT = "wait"
    """A turn waits for the end of the turn before, and for its think time."""


@dataclass(frozen=True)
class TrafficOptions:
    """Which requests, how long, when, and from whom."""

    trace: Annotated[
        str,
        typer.Argument(
            help="File of Mooncake, Azure, BurstGPT, Bailian or RAGPulse (.gz too), or synth:NAME for "
            "one made from built-in or fitted parameters; see `baton synth`."
        ),
    ]
    trace_format: Annotated[
        TraceFormat | None, typer.Option("--format", help="Default: told by its content.")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many requests.")] = None
    start: Annotated[float, typer.Option(min=0, help="Skip so many seconds of the trace.")] = 0.0
    duration: Annotated[float, typer.Option(min=0, help="Take so many seconds of the trace.")] = math.inf
    length_scale: Annotated[str, typer.Option(help="Factor for input lengths, such as 1/16.")] = "1"
    output_scale: Annotated[str, typer.Option(help="Factor for output lengths; default: --length-scale.")] = (
        ""
    )
    max_input: Annotated[int | None, typer.Option(min=1, help="Cut longer inputs, after scaling.")] = None
    max_output: Annotated[int | None, typer.Option(min=1, help="Cut longer outputs, after scaling.")] = None
    time_scale: Annotated[
        str, typer.Option(help="Factor for the time between arrivals; 2 is half the rate.")
    ] = "1"
    rate: Annotated[float | None, typer.Option(help="Mean requests per second, instead of --time-scale.")] = (
        None
    )
    ramp: Annotated[
        str, typer.Option(help="FROM:TO:SECONDS, factors of the rate, such as 0.5:2:60; TO stays.")
    ] = ""
    warp: Annotated[
        str, typer.Option(help="Factors of the rate at instants, linear between: 0:1,60:3,90:1.")
    ] = ""
    burst: Annotated[
        list[str], typer.Option(help="AT:SECONDS:FACTOR, such as 30:5:4; may be given again.")
    ] = field(default_factory=list[str])
    spread: Annotated[
        bool, typer.Option(help="Spread arrivals inside the ticks of a trace that has them.")
    ] = True
    sessions: Annotated[
        Sessions, typer.Option(help="wait: a turn waits for the turn before, and sends what was answered.")
    ] = Sessions.OPEN
    cancel: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests that the client hangs up on.")
    ] = 0.0
    cancel_after: Annotated[
        float | None,
        typer.Option(min=0, help="Mean patience in seconds; default: some way through the answer."),
    ] = None
    slo_class: Annotated[str, typer.Option(help="Class to ask for, where the trace has none.")] = ""
    tenants: Annotated[
        int, typer.Option(min=0, help="Spread sessions over so many tenants, where the trace has none.")
    ] = 0
    keys: Annotated[Path | None, typer.Option(help="File of `tenant key` lines: API keys.")] = None
    seed: Annotated[int, typer.Option(help="Of arrivals, prompt tokens and cancellations.")] = 0


@dataclass(frozen=True)
class SendingOptions:
    """To whom, and how."""

    url: Annotated[str, typer.Option(help="Server, with or without /v1.")] = "http://127.0.0.1:8000"
    model: Annotated[str, typer.Option(help="Model to ask for; default: the first one the server lists.")] = (
        ""
    )
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = ""
    api: Annotated[Api, typer.Option(help="completions sends token ids; the others send made-up words.")] = (
        Api.COMPLETIONS
    )
    openai_only: Annotated[
        bool, typer.Option("--openai-only", help="Send no field beyond OpenAI's API, for strict servers.")
    ] = False
    first_token: Annotated[int, typer.Option(min=0, help="Lowest token id to send.")] = 1000
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="Send ids below this; default: ask, else 2000.")
    ] = None
    server_block_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per block of the server's prefix cache.")
    ] = 32
    server_cache_blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks it holds; default: no bound.")
    ] = None
    timeout: Annotated[float, typer.Option(min=0.001, help="Per request, seconds.")] = 600.0
    connections_max: Annotated[
        int, typer.Option(min=1, help="Open at once, one per request; more fail at once.")
    ] = 4000
    clients: Annotated[
        int, typer.Option(min=1, max=64, help="Sending processes; more than one for high rates.")
    ] = 1


def as_command(asked: type[_Asked], run: Callable[[_Asked], None]) -> Callable[..., None]:
    """A function for typer with the fields of `asked` as its parameters, and the docstring of `run`."""
    hints = _in_panels(asked, get_type_hints(asked, include_extras=True))
    parameters = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(f),
            annotation=hints[f.name],
        )
        for f in fields(asked)  # pyright: ignore[reportArgumentType]
    ]

    def command(**given: Any) -> None:
        run(asked(**given))

    command.__doc__ = run.__doc__
    command.__name__ = run.__name__
    command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return command


def _in_panels(asked: type, hints: dict[str, Any]) -> dict[str, Any]:
    """The help shows options in groups: each class of options is one, named by its docstring."""
    for group in asked.__mro__:
        if group in (asked, object):
            continue
        for name in inspect.get_annotations(group):
            for info in getattr(hints[name], "__metadata__", ()):
                if isinstance(info, typer.models.OptionInfo):
                    info.rich_help_panel = (group.__doc__ or "").split("\n")[0].rstrip(".")
    return hints


def _default(option: Any) -> Any:
    if option.default is not MISSING:
        return option.default
    return inspect.Parameter.empty if option.default_factory is MISSING else option.default_factory()
