"""Runs one replay, or the many replays of a search: sends plans to a server, watches them, and makes
reports."""

import time
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated

import typer
from rich.console import Console

from baton.core.errors import SetupError
from loadgen.answers import check_answers, check_same_requests
from loadgen.client import parse_url
from loadgen.early_stop import GoalWatch
from loadgen.expected_cache import expected_cache
from loadgen.files import read_settings_and_records
from loadgen.first_answers import FirstAnswers
from loadgen.lengths import PlannedRequest, ReplayPlan, factor_text, time_scale_for
from loadgen.options import SendingOptions, TrafficOptions
from loadgen.outputs import ObjectiveOptions, OutputOptions
from loadgen.progress import live_progress
from loadgen.prompts import TokenRange
from loadgen.records import RequestOutcome, RequestRecord
from loadgen.report import Report, RunSettings, judged
from loadgen.report.model import Probe, SearchResult
from loadgen.runner import ReplayObserver
from loadgen.search import (
    ScaledRun,
    SearchSettings,
    StopSearch,
    attempt_of,
    search,
    search_scales,
)
from loadgen.senders import Sending, SendLimits, Sent, send_plan, sending
from loadgen.slo import ClassObjectives
from loadgen.sources import SYNTH
from loadgen.target import Api, probe
from loadgen.traffic import Traffic, traffic_of
from loadgen.units import per_second, seconds, share

IDLE_PROMPT_TOKENS, IDLE_OUTPUT_TOKENS = 16, 2
IDLE_TRIALS = 3
IDLE_SLACK_S = 0.02
WARM_UP_SHARE = 0.05
DISTURBED_MAX = 3
"""Runs in which the load generator may fail to keep up. The next one is taken as it is, with its warning."""
_SEARCH = typer.Option(
    "--search", help="Find the highest rate at which --attain of the requests meet both targets."
)
_RESOLUTION = typer.Option(min=0.005, max=0.5, help="Relative precision of the rate that --search finds.")
_PROBES = typer.Option(min=2, max=200, help="Maximum runs of --search.")
_WARM_UP = typer.Option(
    min=0,
    help="Do not judge this many first requests; default: 0, with --search one in twenty.",
    show_default=False,
)
_COOL_DOWN = typer.Option(min=0, help="Longest wait of --search for an idle server between runs, in seconds.")


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Search for the highest rate"""

    search: Annotated[bool, _SEARCH] = False
    search_resolution: Annotated[float, _RESOLUTION] = 0.05
    search_probes: Annotated[int, _PROBES] = 30
    cool_down: Annotated[float, _COOL_DOWN] = 60.0
    warm_up: Annotated[int | None, _WARM_UP] = None


@dataclass(frozen=True)
class ReplayOptions(OutputOptions, SearchOptions, ObjectiveOptions, SendingOptions, TrafficOptions):
    """The parameters of `replay`."""

    def check(self) -> None:
        """Check what can be checked before the trace is read. Raises SetupError."""
        super().check()
        objectives = ClassObjectives(self.slo, self.class_slos())
        if self.search:
            objectives.check_search()
        if self.search and self.cancel == 1:
            raise SetupError("--search with --cancel 1 leaves nothing to judge: give a smaller share")


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """The judged part of a run, without warm-up."""

    records: list[RequestRecord]
    report: Report
    was_stopped: bool
    """True if Ctrl-C stopped the run."""
    is_disturbed: bool = False
    """True if the load generator did not keep up, so that the figures say as much about it as about the
    server."""


class Replayer:
    """Replays a trace against a server that answered. Raises SetupError."""

    def __init__(self, asked: ReplayOptions, console: Console) -> None:
        self.asked = asked
        self.objectives = ClassObjectives(asked.slo, asked.class_slos())
        self.scales = asked.scales()
        if asked.search and asked.same_answers_as is not None:
            raise SetupError("--search sends other prompts in each run: leave --same-answers-as out")
        earlier = None if asked.same_answers_as is None else read_settings_and_records(asked.same_answers_as)
        self.earlier = None if earlier is None else earlier[1]
        self.traffic = traffic_of(asked)
        self.plan = self.traffic.plan()
        self.objectives.check_classes(r.slo_class for r in self.plan.requests)
        if (asked.warm_up or 0) >= len(self.plan.requests):
            text = f"--warm-up {asked.warm_up} of {len(self.plan.requests)} requests"
            raise SetupError(f"{text} leaves nothing to judge")
        server = parse_url(asked.url, api_key=asked.api_key or self.traffic.users.first_key)
        self.target = probe(server, model=asked.model, api=asked.api, openai_only=asked.openai_only)
        self._console = console
        if earlier is not None:
            for other in check_same_requests(self._settings(self.traffic, self.plan, warm_up=0), earlier[0]):
                self.print(f"answers are compared with a run that differs: {other}")

    def run_once(self) -> JudgedRun:
        """Replay once, at the requested rate."""
        warm_up = self.asked.warm_up or 0
        sent = self._send(self.plan, name="replay", objectives=self.objectives, warm_up=warm_up)
        settings = self._settings(self.traffic, self.plan, warm_up=warm_up, with_expected_hits=not warm_up)
        ran = self._ran(sent, settings, warm_up)
        if self.earlier is None:
            return ran
        answers = check_answers(ran.records, self.earlier)
        return replace(ran, report=replace(ran.report, answers=answers))

    def run_at(
        self, rate_per_s: float, *, number: int, objectives: ClassObjectives, warm_up: int
    ) -> tuple[JudgedRun, bool]:
        """Run once for a search, with prompts of its own, so that nothing of it is cached. Returns the run,
        and whether it was stopped early. Raises StopSearch on Ctrl-C."""
        scaling = replace(self.traffic.scaling, time_scale=time_scale_for(self.traffic.trace, rate_per_s))
        traffic = replace(self.traffic, scaling=scaling, seed=self.asked.seed + number)
        plan = traffic.plan()
        goal_watch = GoalWatch(
            objectives, len(plan.requests), self.asked.goal, warm_up, sees_tokens=self.asked.clients == 1
        )
        name = f"probe {number} at {per_second(rate_per_s)}"
        sent = self._send(
            plan, name=name, objectives=objectives, warm_up=warm_up, goal_watch=goal_watch, number=number
        )
        # The stop reason is read here, because requests that Ctrl-C cut short look like misses.
        if sent.was_stopped and not goal_watch.gave_up:
            raise StopSearch
        ran = self._ran(sent, self._settings(traffic, plan, warm_up=warm_up), warm_up)
        return ran, sent.was_stopped

    def idle_s(self, *, number: int) -> float | None:
        """Seconds that one short request takes now; None if it did not complete.

        Raises StopSearch on Ctrl-C.
        """
        request = PlannedRequest(0, 0.0, IDLE_PROMPT_TOKENS, IDLE_OUTPUT_TOKENS, ())
        plan = ReplayPlan((request,), Fraction(0), 0, 0)
        sent = send_plan(self._job(plan, seed=self.asked.seed + 7_919 * number), _SILENT)
        if sent.was_stopped:
            raise StopSearch
        record = sent.records[0]
        return record.e2e_s if record.outcome is RequestOutcome.COMPLETED else None

    def print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _send(
        self,
        plan: ReplayPlan,
        *,
        name: str,
        objectives: ClassObjectives,
        warm_up: int,
        goal_watch: GoalWatch | None = None,
        number: int = 0,
    ) -> Sent:
        planned = len(plan.requests)
        first = FirstAnswers()
        with live_progress(self._console, planned=planned, objectives=objectives, name=name) as progress:
            observer = progress if goal_watch is None else _watched(progress, goal_watch)
            sent = send_plan(
                self._job(plan, seed=self.asked.seed + number),
                _stopped_by(observer, first),
                clients=self.asked.clients,
            )
        if first.complaint:
            raise SetupError(
                f"the replay was stopped, because every request got this answer: {first.complaint}"
            )
        self._warn(sent)
        return sent

    def _job(self, plan: ReplayPlan, *, seed: int) -> Sending:
        asked, target = self.asked, self.target
        limits = SendLimits(asked.timeout, asked.connections_max)
        job = sending(plan, target, TokenRange(asked.first_token, self._vocab_size), seed=seed, limits=limits)
        return replace(
            job,
            wait_for_turns=self.traffic.wait_for_turns,
            users=self.traffic.users,
            keeps_answers=bool(asked.records_to or asked.same_answers_as),
        )

    @property
    def _vocab_size(self) -> int:
        return self.asked.vocab_size or self.target.vocab_size or self.asked.first_token + 1000

    def _warn(self, sent: Sent) -> None:
        """Warn clearly if the load generator was the bottleneck."""
        for found in sent.health.warnings():
            self._console.print(
                f"[bold red]WARNING: the load generator was the bottleneck:[/] {found}. Latencies include "
                f"it: use more --clients (now {sent.health.clients}), a lower rate, or another machine."
            )

    def _ran(self, sent: Sent, settings: RunSettings, warm_up: int) -> JudgedRun:
        records = [r for r in sent.records if r.index >= warm_up]
        options = {
            **settings.options,
            "turns_waited": sum(r.waited_for_turn for r in records),
            "clients": sent.health.clients,
            "client_loop_lag_p99_s": round(sent.health.loop_lag_p99_s, 6),
            "client_cpu_share_max": round(sent.health.cpu_share_max, 3),
        }
        report = judged(records, replace(settings, options=options), scales=self.scales)
        report = replace(report, began_at_s=_began_at_s(records))
        disturbed = bool(sent.health.warnings())
        return JudgedRun(records, _with_warnings(report, sent), sent.was_stopped, disturbed)

    def _settings(
        self, traffic: Traffic, plan: ReplayPlan, *, warm_up: int, with_expected_hits: bool = False
    ) -> RunSettings:
        asked = self.asked
        expected: float | None = None
        waits = traffic.wait_for_turns and traffic.trace.has_sessions
        if with_expected_hits and asked.api is Api.COMPLETIONS and not waits:
            expected = expected_cache(
                plan, server_block_tokens=asked.server_block_tokens, cache_blocks=asked.server_cache_blocks
            ).hit_ratio
        return RunSettings(
            trace=traffic.name,
            target=self.target.server.origin,
            model=self.target.model,
            slo=self.objectives.default,
            class_slos=dict(self.objectives.by_class),
            attain=asked.goal,
            planned=len(plan.requests) - warm_up,
            label=asked.label,
            trace_format="" if asked.trace.startswith(SYNTH) else traffic.trace.format.value,
            time_scale=factor_text(traffic.scaling.time_scale),
            seed=traffic.seed,
            expected_hit_ratio=expected,
            options={
                "api": asked.api.value,
                "first_token": asked.first_token,
                "vocab_size": self._vocab_size,
                **traffic.described(plan),
                "warm_up_requests": warm_up,
                "server_block_tokens": asked.server_block_tokens,
                "server_cache_blocks": asked.server_cache_blocks,
            },
        )


def _began_at_s(records: list[RequestRecord]) -> float | None:
    """Unix time of the first planned instant."""
    if not records:
        return None
    return time.time() - (time.monotonic() - min(r.planned_s for r in records))


_SILENT = ReplayObserver(lambda record: None, lambda record: None)


def _stopped_by(observer: ReplayObserver, first: FirstAnswers) -> ReplayObserver:
    def on_ended(record: RequestRecord) -> None:
        first.ended(record)
        observer.on_ended(record)

    return ReplayObserver(observer.on_sent, on_ended, lambda: bool(first.complaint) or observer.wants_stop())


def _watched(progress: ReplayObserver, goal_watch: GoalWatch) -> ReplayObserver:
    def on_sent(record: RequestRecord) -> None:
        goal_watch.sent(record)
        progress.on_sent(record)

    def on_ended(record: RequestRecord) -> None:
        goal_watch.ended(record)
        progress.on_ended(record)

    return ReplayObserver(on_sent, on_ended, lambda: goal_watch.wants_stop(now_s=time.monotonic()))


def _with_warnings(report: Report, sent: Sent) -> Report:
    """The report with the warnings of the sender processes about themselves."""
    warnings = sent.health.warnings()
    if not warnings or report.generator.warning:
        return report
    text = "; ".join(warnings)
    return replace(report, generator=replace(report.generator, warning=text))


class LiveSearch:
    """The goodput search against a server: each run has prompts of its own, and starts on an idle server."""

    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer
        asked, requests = replayer.asked, replayer.plan.requests
        span_s = max(r.at_s for r in requests) - min(r.at_s for r in requests)
        if span_s <= 0:
            raise SetupError("--search needs requests at different times: take more of the trace")
        self._warm_up = int(len(requests) * WARM_UP_SHARE) if asked.warm_up is None else asked.warm_up
        self._settings = SearchSettings(
            attain=asked.goal,
            start_per_s=(len(requests) - 1) / span_s,
            resolution=asked.search_resolution,
            probes_max=asked.search_probes,
        )
        self._number = 0
        self._was_stopped = False
        self._idle_s: float | None = None
        self._kept: dict[float, JudgedRun] = {}
        """The latest run by rate; only the best one so far keeps its records."""

    def find(self) -> JudgedRun:
        """The run at the rate found, with the search in its report; if none was found, the run at the lowest
        rate."""
        scales = self._replayer.scales
        if scales:
            points, results = search_scales(self._attempt, scales, self._settings, on_probe=self._tell)
            result = results.get(1.0) or results[max(results)]
        else:
            points, result = (), search(self._at_rate, self._settings, on_probe=self._tell)
        ran = self._run_of(result)
        swept = replace(ran.report.slo_scales, points=points) if points else ran.report.slo_scales
        report = replace(ran.report, search=result, slo_scales=swept)
        return replace(ran, report=report, was_stopped=self._was_stopped)

    def _run_of(self, result: SearchResult) -> JudgedRun:
        if not self._kept:
            raise SetupError("the search was stopped before its first run ended")
        rate_per_s = min(self._kept) if result.rate_per_s is None else result.rate_per_s
        return self._kept[rate_per_s]

    def _at_rate(self, rate_per_s: float) -> Report:
        ran, hopeless = self._run(rate_per_s, self._replayer.objectives)
        return replace(ran.report, interrupted=hopeless)

    def _attempt(self, rate_per_s: float, scale: float) -> ScaledRun:
        objectives = self._replayer.objectives.scaled(scale)
        ran, hopeless = self._run(rate_per_s, objectives)
        return attempt_of(ran.records, self._replayer.objectives, interrupted=hopeless)

    def _run(self, rate_per_s: float, objectives: ClassObjectives) -> tuple[JudgedRun, bool]:
        """Run again if the load generator itself was late, because such a run says nothing about the
        server."""
        ran, hopeless = self._run_once(rate_per_s, objectives)
        for _ in range(DISTURBED_MAX - 1):
            if not ran.is_disturbed:
                break
            self._replayer.print("this run does not count: the load generator did not keep up")
            ran, hopeless = self._run_once(rate_per_s, objectives)
        self._keep(rate_per_s, ran)
        return ran, hopeless

    def _run_once(self, rate_per_s: float, objectives: ClassObjectives) -> tuple[JudgedRun, bool]:
        try:
            self._wait_until_idle()
            self._number += 1
            return self._replayer.run_at(
                rate_per_s, number=self._number, objectives=objectives, warm_up=self._warm_up
            )
        except StopSearch:
            self._was_stopped = True
            raise

    def _keep(self, rate_per_s: float, ran: JudgedRun) -> None:
        """Records are large. Those of a rate below one that attained the goal will not be needed."""
        self._kept[rate_per_s] = ran
        passed = [r for r, kept in self._kept.items() if kept.report.goodput_share >= self._settings.attain]
        for rate in self._kept:
            if rate < max(passed, default=0.0) / 2:
                self._kept[rate] = replace(self._kept[rate], records=[])

    def _wait_until_idle(self) -> None:
        """Send short requests one after another until one is about as fast as before any load."""
        if self._idle_s is None:
            took_s = [self._replayer.idle_s(number=i) for i in range(IDLE_TRIALS)]
            known_s = [t for t in took_s if t is not None]
            if not known_s:
                raise SetupError("the server does not complete even one short request: see its log")
            self._idle_s = min(known_s)
            return
        give_up_s = time.monotonic() + self._replayer.asked.cool_down
        number = IDLE_TRIALS + 1_000 * self._number
        while time.monotonic() < give_up_s:
            number += 1
            took_s = self._replayer.idle_s(number=number)
            if took_s is not None and took_s <= 2 * self._idle_s + IDLE_SLACK_S:
                return
        if self._replayer.asked.cool_down:
            text = f"not as idle as before ({seconds(self._idle_s)} per short request)"
            self._replayer.print(f"the server is still {text} after {self._replayer.asked.cool_down:g} s")

    def _tell(self, probe: Probe) -> None:
        verdict = "stopped, out of reach" if probe.aborted else f"{share(probe.low)} to {share(probe.high)}"
        self._replayer.print(
            f"{per_second(probe.rate_per_s)}: {share(probe.share)} of {probe.judged} met both ({verdict})"
        )
