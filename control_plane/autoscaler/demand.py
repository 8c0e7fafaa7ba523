"""The demand on each role, estimated from observations: now, and when a replica started now would serve."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp

from baton.core.demand import ClassLoad, Traits
from control_plane.autoscaler.rate import RateEstimator
from control_plane.autoscaler.sizing import DecodeLoad, PromptGroup
from control_plane.autoscaler.values import AutoscalerSettings, Observation

MIX_WINDOWS = 4.0
"""Number of windows over which prompt lengths and cached parts are averaged."""
ENDED_S = 900.0
"""Time over which answer lengths are averaged. When more requests come than before, the first of them to end
are those with short answers, so a short average would see answers become shorter just then."""
LONGER_SIGMAS = 2.0
"""Standard deviations above the usual length at which the mean over the shorter time counts at once: answers
became longer."""
ANSWERS_VARY = 1.0
"""Standard deviation of answer lengths, as a part of their mean."""
OUTPUT_TOKENS = 200.0
"""Assumed length of an answer while none has ended."""
CONTEXT_TOKENS = 1000.0
BACKLOG_S = 30.0
"""Prompts that wait for longer than the objective are to be computed within this time, or within the time of
a start if that is longer: replicas started for them come only then, and stay for the patience."""
ENDED_MIN = 10.0
"""Number of answers that must have ended before their mean length is believed, since the first to end are
short."""
RUNNING_MORE = 1.1
"""The rate at which running sequences produce tokens counts when it exceeds the rate expected from arrivals
by this factor."""


@dataclass(slots=True)
class _Mix:
    """Exponentially fading sums over one service class."""

    bins: dict[int, tuple[float, float]]
    """Prompts and their tokens by length bin."""
    started_tokens: float = 0.0
    cached_tokens: float = 0.0
    ended: float = 0.0
    output_tokens: float = 0.0
    context_tokens: float = 0.0
    ended_long: float = 0.0
    """Answers that ended, fading over `ENDED_S`."""
    output_tokens_long: float = 0.0

    def take(self, load: ClassLoad, keep: float, keep_long: float) -> None:
        faded = {at: (n * keep, tokens * keep) for at, (n, tokens) in self.bins.items() if n * keep > 1e-3}
        for at, one in load.arrived.items():
            n, tokens = faded.get(at, (0.0, 0.0))
            faded[at] = (n + one.prompts, tokens + one.prompt_tokens)
        self.bins = faded
        self.started_tokens = self.started_tokens * keep + load.started_prompt_tokens
        self.cached_tokens = self.cached_tokens * keep + load.cached_tokens
        self.ended = self.ended * keep + load.ended
        self.output_tokens = self.output_tokens * keep + load.output_tokens
        self.context_tokens = self.context_tokens * keep + load.context_tokens
        self.ended_long = self.ended_long * keep_long + load.ended
        self.output_tokens_long = self.output_tokens_long * keep_long + load.output_tokens

    @property
    def is_over(self) -> bool:
        """True if nothing of the class is remembered that could still count."""
        return not self.bins and self.ended < 1e-3 and self.ended_long < 1e-3

    @property
    def cached_share(self) -> float:
        return min(0.99, self.cached_tokens / self.started_tokens) if self.started_tokens else 0.0

    @property
    def output_mean(self) -> float:
        if not self.ended_long:
            return OUTPUT_TOKENS
        usual = self.output_tokens_long / self.ended_long
        lately = self.output_tokens / self.ended if self.ended else 0.0
        is_longer = lately > usual * (1 + LONGER_SIGMAS * ANSWERS_VARY / max(1.0, self.ended) ** 0.5)
        return lately if is_longer else usual


class DemandEstimator:
    """The estimated demand on each phase. Call `observe` once per interval."""

    def __init__(self, settings: AutoscalerSettings) -> None:
        self._settings = settings
        self._mixes: dict[str, _Mix] = {}
        self.prefill, self.decode = RateEstimator(settings), RateEstimator(settings)
        self._backlog_s = 0.0
        self._knows_lengths = False
        self._running_rates: deque[float] = deque(
            maxlen=max(1, round(settings.window_s / settings.interval_s))
        )
        """Tokens per second of the latest intervals."""

    def observe_running(self, seen: Observation, traits: Traits) -> None:
        """Estimate how fast running sequences produce tokens, from the cost of their steps. The length of an
        answer is known only when it ends, so answers that became longer show here first."""
        rate = 0.0
        for role, state in seen.roles.items():
            workers = state.serving + state.draining
            if role.decodes and state.decoding and workers:
                batch, context = state.decoding / workers, state.context_tokens / workers
                rate += state.decoding / traits.costs.step_s(decodes=batch, context_tokens=context)
        self._running_rates.append(rate)

    @property
    def running_tokens_per_s(self) -> float:
        """Token rate of the running sequences if it clearly exceeds the rate expected from arrivals, else
        0."""
        mean = sum(self._running_rates) / len(self._running_rates) if self._running_rates else 0.0
        return mean if mean > RUNNING_MORE * self.decode.mean else 0.0

    def observe(self, seen: Observation, traits: Traits) -> None:
        """Count one interval. `traits` are those of the workers that compute prompts."""
        keep = exp(-seen.interval_s / (MIX_WINDOWS * self._settings.window_s))
        keep_long = exp(-seen.interval_s / ENDED_S)
        for name in {*self._mixes, *seen.classes}:
            mix = self._mixes.setdefault(name, _Mix({}))
            mix.take(seen.classes.get(name, ClassLoad()), keep, keep_long)
            if mix.is_over:
                del self._mixes[name]
        work_s = tokens = 0.0
        for name, load in seen.classes.items():
            mix = self._mixes.get(name, _Mix({}))
            for one in load.arrived.values():
                each_s = _service_s(one.prompt_tokens / one.prompts, mix.cached_share, traits)
                work_s += one.prompts * each_s
                tokens += one.requests * mix.output_mean
        requests = seen.arrived
        self.prefill.observe(
            work_s / seen.interval_s, requests=requests, variation=_variation(self.prompts(traits))
        )
        if self._knows_lengths or sum(mix.ended for mix in self._mixes.values()) >= ENDED_MIN:
            self._knows_lengths = True
            self.decode.observe(tokens / seen.interval_s, requests=requests, variation=1.0)
        self._backlog_s = self._waiting_s(seen, traits)

    def _waiting_s(self, seen: Observation, traits: Traits) -> float:
        """Seconds that one worker would need for the prompts that wait at workers and at routers."""
        prompts = self.prompts(traits)
        tokens = sum(mix[1] for one in self._mixes.values() for mix in one.bins.values())
        seconds = sum(p.weight * p.service_s for p in prompts)
        waiting = seen.queued_prompt_tokens + sum(
            s.waiting_prompt_tokens for role, s in seen.roles.items() if role.prefills
        )
        return waiting * seconds / tokens if tokens else waiting * traits.costs.prompt_token_s

    def prompts(self, traits: Traits) -> list[PromptGroup]:
        """Return the prompts of all classes, grouped by length and weighted by how many came lately."""
        objectives = self._settings.objectives
        found: list[PromptGroup] = []
        for name, mix in self._mixes.items():
            objective = objectives.get(name) or objectives.get("")
            ttft_s = objective.ttft_s if objective else 0.0
            for n, tokens in mix.bins.values():
                found.append(PromptGroup(n, _service_s(tokens / n, mix.cached_share, traits), ttft_s))
        return found

    def hopeless_share(self, traits: Traits) -> float:
        """Return the part of requests whose prompts take longer than their objective even on an idle
        cluster."""
        prompts = self.prompts(traits)
        weight = sum(p.weight for p in prompts)
        late = sum(p.weight for p in prompts if 0 < p.ttft_s <= p.service_s)
        return late / weight if weight else 0.0

    def decoding(self, tokens_per_s: float) -> DecodeLoad:
        """Return a decode load of this token rate, with sequences as they were lately and the strictest
        objective in use."""
        mixes = [(name, mix) for name, mix in self._mixes.items() if mix.bins or mix.ended > 1e-3]
        tokens = sum(mix.output_tokens for _, mix in mixes)
        context = sum(mix.context_tokens for _, mix in mixes) / tokens if tokens else CONTEXT_TOKENS
        objectives = self._settings.objectives
        used = [objectives.get(name) or objectives.get("") for name, _ in mixes]
        strict = min((one.tpot_s for one in used if one and one.tpot_s), default=0.0)
        return DecodeLoad(tokens_per_s, context, strict)

    @property
    def ttft_s(self) -> float:
        """The strictest TTFT objective; 0 if there is none."""
        return min((o.ttft_s for o in self._settings.objectives.values() if o.ttft_s), default=0.0)

    def backlog_rate(self, *, servers: int, start_s: float) -> float:
        """Return the seconds of prompt work per second, on top of arrivals, that clear the prompts which wait
        for longer than the objective."""
        within_s = servers * (self.ttft_s or 1.0)
        return max(0.0, self._backlog_s - within_s) / max(BACKLOG_S, start_s)


def _service_s(prompt_tokens: float, cached_share: float, traits: Traits) -> float:
    end = max(1, round(prompt_tokens))
    start = min(end - 1, int(end * cached_share))
    return traits.costs.prompt_s(start, end, chunk_tokens=traits.chunk_tokens)


def _variation(prompts: list[PromptGroup]) -> float:
    weight = sum(p.weight for p in prompts)
    mean_s = sum(p.weight * p.service_s for p in prompts) / weight if weight else 0.0
    if not mean_s:
        return 1.0
    return max(0.0, sum(p.weight * p.service_s**2 for p in prompts) / weight / mean_s**2 - 1)


def learnt(default: float, seen: Iterable[float]) -> float:
    """Return the longest of the last few observations, or the default: acting early costs less than acting
    late."""
    return max(seen, default=default)
