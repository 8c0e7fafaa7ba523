"""`baton replay` sends a production trace to a server that speaks OpenAI's API."""

import typer
from rich.console import Console

from baton.core.errors import SetupError
from loadgen.options import as_command
from loadgen.outputs import publish
from loadgen.replaying import LiveSearch, Replayer, ReplayOptions

INTERRUPTED_STATUS = 130


def _replay_command(asked: ReplayOptions) -> None:
    """Replay a production trace against a server, open loop; report goodput, latencies and cache hits.

    Every request is sent at its planned instant, whatever the server does; latencies count from that instant.
    With --search, the trace is replayed at several rates to find the highest one that attains the goal.

    Example, for a small model on one machine:

    baton replay conversation.jsonl --url http://127.0.0.1:8000 --length-scale 1/16 --time-scale 4
    --ttft-slo 1 --tpot-slo 0.05 --html report.html
    """
    try:
        asked.check()
        replayer = Replayer(asked, Console(stderr=True))
        ran = LiveSearch(replayer).find() if asked.search else replayer.run_once()
        publish(ran.report, ran.records, asked)
    except SetupError as error:
        typer.echo(f"baton: {error}", err=True)
        raise typer.Exit(error.exit_status) from None
    if ran.was_stopped:
        raise typer.Exit(INTERRUPTED_STATUS)
    if ran.report.completed == 0 and ran.report.failed:
        typer.echo("baton: no request was answered; see the errors above", err=True)
        raise typer.Exit(1)
    answers = ran.report.answers
    if answers is not None and answers.differing:
        which = ", ".join(map(str, answers.first_differing))
        typer.echo(f"baton: {answers.differing} answers differ: requests {which}", err=True)
        raise typer.Exit(1)


replay = as_command(ReplayOptions, _replay_command)
