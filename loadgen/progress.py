"""The progress of a run: one line that changes on a terminal, or a line every few seconds elsewhere."""

import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from loadgen.records import RequestOutcome, RequestRecord
from loadgen.runner import ReplayObserver
from loadgen.slo import ClassObjectives
from loadgen.units import share

LINE_EVERY_S = 5.0
RECENT_S = 10.0
RECENT_MAX = 10_000
CLASSES_MAX = 4


@dataclass(slots=True)
class ProgressStats:
    """Counts of requests so far, and of those that met their objectives. The caller has the clock."""

    objectives: ClassObjectives
    planned: int
    sent: int = 0
    outcomes: Counter[RequestOutcome] = field(default_factory=Counter[RequestOutcome])
    judged: Counter[str] = field(default_factory=Counter[str])
    """Judged requests by class, without those that the client cancelled as planned."""
    met: Counter[str] = field(default_factory=Counter[str])
    _recent: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=RECENT_MAX))

    def ended(self, record: RequestRecord, *, now_s: float) -> None:
        outcome = record.outcome or RequestOutcome.FAILED
        self.outcomes[outcome] += 1
        if outcome is RequestOutcome.CANCELLED:
            return
        is_met = self.objectives.is_met(record)
        self.judged[record.slo_class] += 1
        self.met[record.slo_class] += is_met
        self._recent.append((now_s, is_met))

    @property
    def ended_count(self) -> int:
        return self.outcomes.total()

    @property
    def running(self) -> int:
        return self.sent - self.ended_count

    def goodput(self) -> float | None:
        """Goodput share of the requests judged so far; None before the first."""
        judged = self.judged.total()
        return self.met.total() / judged if judged else None

    def recent_goodput(self, *, now_s: float) -> float | None:
        """Goodput share of the requests that ended within the last seconds."""
        while self._recent and self._recent[0][0] < now_s - RECENT_S:
            self._recent.popleft()
        return sum(is_met for _, is_met in self._recent) / len(self._recent) if self._recent else None

    def goodput_text(self, *, now_s: float) -> str:
        """A text such as `goodput 93.1 % (last 10 s 88.0 %; chat 91.0 %, batch 99.0 %)`."""
        parts = [f"last {RECENT_S:g} s {share(self.recent_goodput(now_s=now_s))}"]
        classes = sorted(self.judged)
        if len(classes) > 1:
            text = [f"{name or 'no class'} {share(self.met[name] / self.judged[name])}" for name in classes]
            parts.append(", ".join(text[:CLASSES_MAX]) + (", ..." if len(text) > CLASSES_MAX else ""))
        return f"goodput {share(self.goodput())} ({'; '.join(parts)})"

    def counts_text(self) -> str:
        done, refused, failed, cancelled = (
            self.outcomes[o]
            for o in (
                RequestOutcome.COMPLETED,
                RequestOutcome.REFUSED,
                RequestOutcome.FAILED,
                RequestOutcome.CANCELLED,
            )
        )
        text = f"{self.running} running, {done} done, {refused} refused, {failed} failed"
        return f"{text}, {cancelled} given up" if cancelled else text


@contextmanager
def live_progress(
    console: Console,
    *,
    planned: int,
    objectives: ClassObjectives,
    name: str = "replay",
    now: Callable[[], float] = time.monotonic,
) -> Generator[ReplayObserver]:
    """Show counts and goodput; the yielded observer keeps them up to date."""
    stats = ProgressStats(objectives, planned)
    if console.is_terminal:
        with _bar(console, name) as bar:
            yield _observer(stats, _redraw(bar, bar.add_task(name, total=planned, text=""), stats, now), now)
        return
    lines = _LineProgress(console, stats, name, now)
    yield _observer(stats, lines.print_if_due, now)
    lines.print_line()


def _observer(stats: ProgressStats, changed: Callable[[], None], now: Callable[[], float]) -> ReplayObserver:
    def on_sent(record: RequestRecord) -> None:
        stats.sent += 1
        changed()

    def on_ended(record: RequestRecord) -> None:
        stats.ended(record, now_s=now())
        changed()

    return ReplayObserver(on_sent, on_ended)


def _bar(console: Console, name: str) -> Progress:
    columns = (
        TextColumn(escape(name)),
        BarColumn(bar_width=10),
        TextColumn("{task.completed}/{task.total}: {task.fields[text]}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, refresh_per_second=4)


def _redraw(
    bar: Progress, task: TaskID, stats: ProgressStats, now: Callable[[], float]
) -> Callable[[], None]:
    drawn_s = 0.0

    def redraw() -> None:
        # The text is made when it is drawn, not for every event.
        nonlocal drawn_s
        now_s = now()
        if now_s - drawn_s >= 0.2 or stats.ended_count == stats.planned:
            drawn_s = now_s
            text = f"{stats.counts_text()}; {stats.goodput_text(now_s=now_s)}"
            bar.update(task, completed=stats.ended_count, text=escape(text))

    return redraw


@dataclass(slots=True)
class _LineProgress:
    console: Console
    stats: ProgressStats
    name: str
    now: Callable[[], float]
    began_s: float = field(init=False)
    printed_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.began_s = self.printed_s = self.now()

    def print_if_due(self) -> None:
        if self.now() - self.printed_s >= LINE_EVERY_S:
            self.print_line()

    def print_line(self) -> None:
        now_s = self.printed_s = self.now()
        self.console.print(
            f"{self.name} {now_s - self.began_s:.0f} s: {self.stats.ended_count}/{self.stats.planned}: "
            f"{self.stats.counts_text()}; {self.stats.goodput_text(now_s=now_s)}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
