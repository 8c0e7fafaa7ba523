"""The options of `baton replay`, declared once. The command line and the values are derived from this
declaration.

The function of a command takes one dataclass whose fields are `Annotated` for typer. `as_command` gives it
the signature that typer reads.
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
    """Parse the value or the default of an objective's option."""
    try:
        return target_s(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


class SessionMode(StrEnum):
    OPEN = "open"
    """Every turn is sent at its instant in the trace."""
    WAIT = "wait"
    """A turn waits for the end of the earlier turn, and for its think time."""


@dataclass(frozen=True)
class TrafficOptions:
    """Requests: which, how long, when, and from whom"""

    trace: Annotated[
        str,
        typer.Argument(
            help="Trace file of Mooncake, Azure, BurstGPT, Bailian or RAGPulse (also .gz), or synth:NAME for "
            "one made from built-in or fitted parameters; see `baton synth`."
        ),
    ]
    trace_format: Annotated[
        TraceFormat | None,
        typer.Option("--format", help="Format of the trace; default: detected from its content."),
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Take at most this many requests.")] = None
    start: Annotated[float, typer.Option(min=0, help="Skip this many seconds of the trace.")] = 0.0
    duration: Annotated[float, typer.Option(min=0, help="Take this many seconds of the trace.")] = math.inf
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
        str,
        typer.Option(help="Ramp FROM:TO:SECONDS of a factor on the rate, such as 0.5:2:60; it stays at TO."),
    ] = ""
    warp: Annotated[
        str, typer.Option(help="Factors on the rate at these seconds, linear in between: 0:1,60:3,90:1.")
    ] = ""
    burst: Annotated[
        list[str], typer.Option(help="Burst AT:SECONDS:FACTOR on the rate, such as 30:5:4; repeatable.")
    ] = field(default_factory=list[str])
    spread: Annotated[
        bool, typer.Option(help="Spread arrivals inside the ticks of a trace with coarse timestamps.")
    ] = True
    sessions: Annotated[
        SessionMode,
        typer.Option(help="wait: each turn waits for the earlier turn and sends its real answer back."),
    ] = SessionMode.OPEN
    cancel: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests that the client cancels by disconnecting.")
    ] = 0.0
    cancel_after: Annotated[
        float | None,
        typer.Option(
            min=0, help="Mean seconds until it disconnects; default: at a random point of the answer."
        ),
    ] = None
    slo_class: Annotated[str, typer.Option(help="Service class to request if the trace has none.")] = ""
    tenants: Annotated[
        int, typer.Option(min=0, help="Spread sessions over this many tenants if the trace has none.")
    ] = 0
    keys: Annotated[Path | None, typer.Option(help="File of API keys, one `tenant key` per line.")] = None
    seed: Annotated[int, typer.Option(help="Seed of arrivals, prompt tokens and cancellations.")] = 0


@dataclass(frozen=True)
class SendingOptions:
    """Server and connections"""

    url: Annotated[str, typer.Option(help="URL of the server, with or without /v1.")] = (
        "http://127.0.0.1:8000"
    )
    model: Annotated[
        str, typer.Option(help="Model to request; default: the first one that the server lists.")
    ] = ""
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="API key, sent as a bearer token.")
    ] = ""
    api: Annotated[
        Api, typer.Option(help="API to use; completions sends token ids, the others send generated words.")
    ] = Api.COMPLETIONS
    openai_only: Annotated[
        bool, typer.Option("--openai-only", help="Send only fields of OpenAI's API, for strict servers.")
    ] = False
    first_token: Annotated[int, typer.Option(min=0, help="Lowest token id to send.")] = 1000
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="Send token ids below this; default: ask the server, else 2000.")
    ] = None
    server_block_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per block of the server's prefix cache.")
    ] = 32
    server_cache_blocks: Annotated[
        int | None,
        typer.Option(min=1, help="Blocks that the server's prefix cache holds; default: no bound."),
    ] = None
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until a request is given up.")] = 600.0
    connections_max: Annotated[
        int, typer.Option(min=1, help="Open connections at once, one per request; requests beyond it fail.")
    ] = 4000
    clients: Annotated[
        int, typer.Option(min=1, max=64, help="Sender processes; use more than one for high rates.")
    ] = 1


def as_command(asked: type[_Asked], run: Callable[[_Asked], None]) -> Callable[..., None]:
    """A function for typer that has the fields of `asked` as its parameters, and the docstring of `run`."""
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
    """Group the options in the help: each class of options is a panel, titled by its docstring."""
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
