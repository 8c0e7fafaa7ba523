"""`baton replay`: a production trace against a server that speaks OpenAI's API."""

import asyncio
import math
import signal
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, cast

import httpx
import orjson
import typer
from rich.console import Console

from baton.core.errors import SetupError
from loadgen.client import Server, parse_url, request_bytes, send
from loadgen.expected_cache import expected_cache
from loadgen.lengths import Plan, PlannedRequest, Scaling, make_plan, parse_factor
from loadgen.prompts import PromptMaker, TokenRange
from loadgen.records import Record
from loadgen.report import Report, Settings, Slo, make_report
from loadgen.runner import replay_plan
from loadgen.show import live_progress, show_report
from loadgen.traces import Trace, cut, read_trace

PROBE_TIMEOUT_S = 10.0
INTERRUPTED_STATUS = 130


class Api(StrEnum):
    COMPLETIONS = "completions"
    COMPLETIONS_TEXT = "completions-text"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Target:
    """A server that answered, and what to call its model."""

    server: Server
    model: str
    api: Api
    vocab_size: int | None
    """When the server says."""

    def message(self, prompts: PromptMaker, request: PlannedRequest) -> bytes:
        """The bytes of one request."""
        body: dict[str, object] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        if self.api is Api.CHAT:
            body["messages"] = [{"role": "user", "content": prompts.text(request)}]
        elif self.api is Api.COMPLETIONS_TEXT:
            body["prompt"] = prompts.text(request)
        else:
            body["prompt"] = prompts.tokens(request)
            body["return_token_ids"] = True  # else a token without visible text cannot be timed
        path = "/v1/chat/completions" if self.api is Api.CHAT else "/v1/completions"
        return request_bytes(self.server, path, orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))


def probe(server: Server, *, model: str, api: Api) -> Target:
    """Ask the server which model it has. Raises SetupError: unreachable, or no model known."""
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    try:
        answer = httpx.get(f"{server.origin}/v1/models", headers=headers, timeout=PROBE_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise SetupError(f"cannot reach {server.origin}: {error}") from None
    name, vocab_size = _first_model(answer, wanted=model)
    if not model and not name:
        raise SetupError(f"{server.origin}/v1/models names no model ({answer.status_code}); give --model")
    return Target(server, model or name, api, vocab_size)


def _first_model(answer: httpx.Response, *, wanted: str) -> tuple[str, int | None]:
    try:
        listed = cast("list[dict[str, object]]", answer.json()["data"])
        chosen = next((m for m in listed if m["id"] == wanted), listed[0])
        vocab_size = chosen.get("vocab_size")
        return str(chosen["id"]), vocab_size if isinstance(vocab_size, int) else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", None


@dataclass(frozen=True, slots=True)
class Limits:
    timeout_s: float
    connections_max: int


async def run(
    plan: Plan, prompts: PromptMaker, target: Target, *, slo: Slo, limits: Limits, console: Console
) -> tuple[list[Record], bool]:
    """The records, and whether Ctrl-C ended it early."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        with live_progress(console, planned=len(plan.requests), slo=slo) as observer:
            records = await replay_plan(
                plan.requests,
                lambda request: target.message(prompts, request),
                lambda message, record: send(target.server, message, record, timeout_s=limits.timeout_s),
                connections_max=limits.connections_max,
                observer=observer,
                stop=stop,
            )
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return records, stop.is_set()


def publish(report: Report, *, json_to: str) -> None:
    """Tables on standard output, or on standard error where that is taken by `--json -`."""
    show_report(Console(stderr=json_to == "-"), report)
    if not json_to:
        return
    text = orjson.dumps(report.as_json(), option=orjson.OPT_INDENT_2) + b"\n"
    if json_to == "-":
        sys.stdout.write(text.decode())
        return
    try:
        Path(json_to).write_bytes(text)
    except OSError as error:
        raise SetupError(f"cannot write {json_to}: {error}") from None


_Trace = Annotated[Path, typer.Argument(help="Mooncake JSON lines or Azure CSV.")]
_Url = Annotated[str, typer.Option(help="Server, with or without /v1.")]
_Model = Annotated[str, typer.Option(help="Model to ask for; default: the first one the server lists.")]
_ApiKey = Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")]
_Api = Annotated[Api, typer.Option(help="completions sends token ids; the others send made-up words.")]
_Limit = Annotated[int | None, typer.Option(min=1, help="At most so many requests.")]
_Start = Annotated[float, typer.Option(min=0, help="Skip so many seconds of the trace.")]
_Duration = Annotated[float, typer.Option(min=0, help="Take so many seconds of the trace.")]
_InputScale = Annotated[str, typer.Option(help="Factor for input lengths, such as 1/16.")]
_OutputScale = Annotated[str, typer.Option(help="Factor for output lengths; default: --length-scale.")]
_TimeScale = Annotated[str, typer.Option(help="Factor for the time between arrivals; 2 is half the rate.")]
_Spread = Annotated[bool, typer.Option(help="Spread arrivals inside a trace's ticks (Mooncake: 3 s).")]
_MaxInput = Annotated[int | None, typer.Option(min=1, help="Cut longer inputs, after scaling.")]
_MaxOutput = Annotated[int | None, typer.Option(min=1, help="Cut longer outputs, after scaling.")]
_Seed = Annotated[int, typer.Option(help="Of arrivals and prompt tokens.")]
_FirstToken = Annotated[int, typer.Option(min=0, help="Lowest token id to send.")]
_Vocab = Annotated[int | None, typer.Option(min=2, help="Send ids below this; default: ask, else 2000.")]
_BlockTokens = Annotated[int, typer.Option(min=1, help="Tokens per block of the server's prefix cache.")]
_CacheBlocks = Annotated[int | None, typer.Option(min=1, help="Blocks it holds; default: no bound.")]
_TtftSlo = Annotated[float | None, typer.Option(min=0, help="Target for the first token, seconds.")]
_TpotSlo = Annotated[float | None, typer.Option(min=0, help="Target per token after the first, seconds.")]
_Timeout = Annotated[float, typer.Option(min=0.001, help="Per request, seconds.")]
_Connections = Annotated[int, typer.Option(min=1, help="Open at once, one per request; more fail at once.")]
_Json = Annotated[str, typer.Option("--json", help="Write the figures there; - is standard output.")]


def replay(
    trace: _Trace,
    url: _Url = "http://127.0.0.1:8000",
    model: _Model = "",
    api_key: _ApiKey = "",
    api: _Api = Api.COMPLETIONS,
    limit: _Limit = None,
    start: _Start = 0.0,
    duration: _Duration = math.inf,
    length_scale: _InputScale = "1",
    output_scale: _OutputScale = "",
    time_scale: _TimeScale = "1",
    spread: _Spread = True,
    max_input: _MaxInput = None,
    max_output: _MaxOutput = None,
    seed: _Seed = 0,
    first_token: _FirstToken = 1000,
    vocab_size: _Vocab = None,
    server_block_tokens: _BlockTokens = 32,
    server_cache_blocks: _CacheBlocks = None,
    ttft_slo: _TtftSlo = None,
    tpot_slo: _TpotSlo = None,
    timeout: _Timeout = 600.0,
    connections_max: _Connections = 800,
    json_to: _Json = "",
) -> None:
    """Replay a production trace, open loop, and report latencies, goodput and cache hits.

    Every request leaves at its planned instant whatever the server does; latencies count from that instant.

    Example, for a small model on one machine:

    baton replay conversation.jsonl --url http://127.0.0.1:8000 --length-scale 1/16 --time-scale 4
    """
    asked = Options(**locals())
    try:
        report, was_stopped = _replay(asked)
        publish(report, json_to=json_to)
    except SetupError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(2) from None
    if was_stopped:
        raise typer.Exit(INTERRUPTED_STATUS)


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of `replay`, by the same names."""

    trace: Path
    url: str
    model: str
    api_key: str
    api: Api
    limit: int | None
    start: float
    duration: float
    length_scale: str
    output_scale: str
    time_scale: str
    spread: bool
    max_input: int | None
    max_output: int | None
    seed: int
    first_token: int
    vocab_size: int | None
    server_block_tokens: int
    server_cache_blocks: int | None
    ttft_slo: float | None
    tpot_slo: float | None
    timeout: float
    connections_max: int
    json_to: str


def _replay(asked: Options) -> tuple[Report, bool]:
    scaling = Scaling(
        parse_factor(asked.length_scale),
        parse_factor(asked.output_scale or asked.length_scale),
        parse_factor(asked.time_scale),
        asked.max_input,
        asked.max_output,
    )
    whole = read_trace(asked.trace)
    taken = cut(whole, start_s=asked.start, duration_s=asked.duration, limit=asked.limit)
    plan = make_plan(taken, scaling, spread=asked.spread, seed=asked.seed)
    server = parse_url(asked.url, api_key=asked.api_key)
    target = probe(server, model=asked.model, api=asked.api)
    vocab_size = asked.vocab_size or target.vocab_size or asked.first_token + 1000
    prompts = PromptMaker(plan, TokenRange(asked.first_token, vocab_size), seed=asked.seed)
    settings = _settings(asked, scaling, taken, plan, target)
    limits = Limits(asked.timeout, asked.connections_max)
    console = Console(stderr=True)
    records, was_stopped = asyncio.run(
        run(plan, prompts, target, slo=settings.slo, limits=limits, console=console)
    )
    return make_report(records, settings), was_stopped


def _settings(asked: Options, scaling: Scaling, taken: Trace, plan: Plan, target: Target) -> Settings:
    expected: float | None = None
    if asked.api is Api.COMPLETIONS:
        expected = expected_cache(
            plan, server_block_tokens=asked.server_block_tokens, cache_blocks=asked.server_cache_blocks
        ).hit_ratio
    return Settings(
        trace=asked.trace.name,
        trace_format=taken.format.value,
        url=target.server.origin,
        api=asked.api.value,
        model=target.model,
        length_scale=str(scaling.input_scale),
        output_scale=str(scaling.output_scale),
        time_scale=str(scaling.time_scale),
        spread_ticks=asked.spread and taken.tick_s > 0,
        seed=asked.seed,
        inputs_cut=plan.inputs_cut,
        outputs_cut=plan.outputs_cut,
        planned=len(plan.requests),
        slo=Slo(asked.ttft_slo, asked.tpot_slo),
        expected_hit_ratio=expected,
        server_block_tokens=asked.server_block_tokens,
        server_cache_blocks=asked.server_cache_blocks,
    )
