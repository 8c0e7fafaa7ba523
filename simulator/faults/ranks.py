"""The ranks of one simulated worker: followers that load, follow plans, stop and die.

The worker's process is the leader. What it knows of its followers, and the way of plans to them, are
production code (`engine.parallel.team_state`, `engine.parallel.order_codec`); so is what each rank holds of
the model (`engine.model_files.division`). Only the times at which a lost rank is noticed are modelled, after
`engine/native/src/segment.cpp`.
"""

import random
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from baton.core.shape import Shape
from baton.core.steps import StepItem, StepPlan
from engine.model_files.division import Division, rank_divisions
from engine.model_files.rope_spec import RopeSpec
from engine.model_files.spec import ModelSpec
from engine.parallel.order_codec import OrderDecoder, OrderEncoder
from engine.parallel.orders import FollowerReady
from engine.parallel.team_state import TeamState
from kv_transfer.layout import Places
from simulator.faults.run_context import RunContext, Violation
from simulator.faults.scenario import GEOMETRY

LOOK_S = 0.05
"""Time in which the others notice that a rank has died: a wait looks every 20 ms."""
STOPPED_S = 1.5
"""Time for which a rank may be stopped until the others give it up."""
LOST_S_MAX = 2.0
"""A worker that has lost a rank is gone after this time (DESIGN: the others notice within 2 s)."""
LOAD_S_MAX = 0.15
"""The longest time for which a follower loads its part."""

SPEC = ModelSpec(
    architecture="sim",
    vocab_size=64,
    hidden_size=8,
    intermediate_size=64,
    layer_count=GEOMETRY.layer_count,
    head_count=4,
    kv_head_count=GEOMETRY.kv_head_count,
    head_dim=GEOMETRY.head_dim,
    norm_eps=1e-5,
    context_tokens=80,
    context_tokens_limit=80,
    tie_embeddings=False,
    dtype="float32",
    eos_token_ids=(),
    windows=(0,) * GEOMETRY.layer_count,
    ropes=(RopeSpec("default", 10000.0, GEOMETRY.head_dim),),
    layer_ropes=(0,) * GEOMETRY.layer_count,
    attention_scale=1.0,
)
"""The simulated model as production divides it."""


class RequestPoint(StrEnum):
    """Moments in the life of a request at which a rank may be lost."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFER = "in a transfer"
    DECODING = "decoding"
    LAST_TOKEN = "at a last token"


class RankState(StrEnum):
    LOADING = "loading"
    RUNS = "runs"
    STOPPED = "stopped"
    DEAD = "dead"


def places_of_shape(shape: Shape) -> tuple[Places, ...]:
    """Return what each rank holds of every block."""
    return tuple(_places(division) for division in rank_divisions(SPEC, shape))


def _places(division: Division) -> Places:
    return Places(division.layers or range(division.spec.layer_count), division.kv_heads())


class RankedWorker(Protocol):
    """The leader's process."""

    run: RunContext
    name: str
    is_alive: bool
    is_frozen: bool

    def post(self, happening: Callable[[], None]) -> None: ...

    def kill(self, *, noticed_s: float) -> None: ...


class SimRanks:
    """The followers of one life of a worker, and the leader's view of them."""

    def __init__(self, worker: RankedWorker, shape: Shape) -> None:
        self.shape, self._worker, self._run = shape, worker, worker.run
        self._team = TeamState(shape.rank_count)
        self._encode = OrderEncoder().encode
        self._decoders = [OrderDecoder() for _ in range(1, shape.rank_count)]
        self._states = dict.fromkeys(range(1, shape.rank_count), RankState.LOADING)
        self._stops = 0
        """Count of the times that a rank was stopped, so that a later stop is told from an earlier one."""
        self.strike: tuple[RequestPoint, Callable[[], None]] | None = None
        """A fault that waits for its moment. It happens once."""
        rng: random.Random = self._run.stream(f"ranks/{worker.name}")
        for rank in self._states:
            seconds = rng.uniform(0.0, LOAD_S_MAX)
            self._run.clock.after(seconds, lambda rank=rank, seconds=seconds: self._loaded(rank, seconds))

    @property
    def followers(self) -> tuple[int, ...]:
        return tuple(self._states)

    @property
    def is_ready(self) -> bool:
        """Whether the worker may be announced."""
        return self._team.is_ready

    @property
    def can_compute(self) -> bool:
        return all(state is RankState.RUNS for state in self._states.values())

    def check(self) -> None:
        """Check at rest that no rank is missing."""
        if not self.can_compute:
            raise Violation(6, f"{self._worker.name} goes on with ranks {dict(self._states)}")

    def follow(self, plan: StepPlan) -> tuple[StepPlan, ...]:
        """Send a plan to the followers. Return it as each of them reads it."""
        if not self._decoders:
            return ()
        loading = [rank for rank, state in self._states.items() if state is RankState.LOADING]
        if loading:
            raise Violation(9, f"{self._worker.name} computes while ranks {loading} load their parts")
        data = self._encode(plan)
        plans = [decoder.decode(data) for decoder in self._decoders]
        return tuple(plan for plan in plans if isinstance(plan, StepPlan))

    def planned(self, plan: StepPlan, is_last: Callable[[StepItem], bool]) -> None:
        """Say at which points of their lives the requests of a step are."""
        if self.strike is None:
            return
        for item in plan.items:
            if item.sample_index is None:
                self.reached(RequestPoint.PREFILLING)
            elif is_last(item):
                self.reached(RequestPoint.LAST_TOKEN)
            elif item.sample_index:
                self.reached(RequestPoint.DECODING)

    def reached(self, point: RequestPoint) -> None:
        """A request of this worker is at this point of its life."""
        if self.strike is not None and self.strike[0] is point:
            strike, self.strike = self.strike[1], None
            self._run.counts[f"ranks struck while {point}"] += 1
            self._run.clock.after(0.0, strike)

    # --- what happens to ranks ----------------------------------------------------------------------

    def _loaded(self, rank: int, seconds: float) -> None:
        if self._states[rank] is RankState.LOADING:
            self._states[rank] = RankState.RUNS
            self._worker.post(lambda: self._ready(rank, seconds))

    def _ready(self, rank: int, seconds: float) -> None:
        self._team.reported(rank, FollowerReady("", seconds))

    def die(self, rank: int) -> None:
        """Kill a follower's process."""
        if not self._worker.is_alive or self._states[rank] is RankState.DEAD:
            return
        self._run.counts["ranks killed"] += 1
        self._states[rank] = RankState.DEAD
        self._run.clock.after(LOOK_S, lambda: self._notice(f"rank {rank} has died"))
        self._expect_end(rank, lambda: True)

    def stop(self, rank: int) -> None:
        """Stop a follower's process, as SIGSTOP does."""
        if not self._worker.is_alive or self._states[rank] is not RankState.RUNS:
            return
        self._run.counts["ranks stopped"] += 1
        self._states[rank] = RankState.STOPPED
        self._stops += 1
        number = self._stops

        def is_same() -> bool:
            return self._states[rank] is RankState.STOPPED and number == self._stops

        def look() -> None:
            if is_same():
                self._notice(f"rank {rank} is stopped")

        self._run.clock.after(STOPPED_S + LOOK_S, look)
        self._expect_end(rank, is_same)

    def go_on(self, rank: int) -> None:
        if self._states[rank] is RankState.STOPPED:
            self._states[rank] = RankState.RUNS

    def leader_stopped(self) -> None:
        """The leader's process was stopped. Followers that wait for it too long end themselves."""
        self._stops += 1
        number, worker = self._stops, self._worker

        def look() -> None:
            if worker.is_alive and worker.is_frozen and number == self._stops:
                for rank in self._states:
                    self.die(rank)

        if self._states:
            self._run.clock.after(STOPPED_S + LOOK_S, look)

    def end(self) -> None:
        """The leader is gone, and its followers with it."""
        self._states = dict.fromkeys(self._states, RankState.DEAD)

    # --- what the leader makes of it ----------------------------------------------------------------

    def _notice(self, reason: str) -> None:
        self._worker.post(lambda: self._lost(reason))

    def _lost(self, reason: str) -> None:
        if self._team.ended(reason):
            self._run.counts["workers ended with a rank"] += 1
            self._worker.kill(noticed_s=0.0)

    def _expect_end(self, rank: int, is_lost: Callable[[], bool]) -> None:
        """Check that the worker ends soon, as one. A leader that is stopped is asked when it goes on."""

        def look() -> None:
            if self._worker.is_alive and is_lost():
                raise Violation(
                    6, f"{self._worker.name} goes on {LOST_S_MAX:g} s after the loss of rank {rank}"
                )

        self._run.clock.after(LOST_S_MAX, lambda: self._worker.post(look))
