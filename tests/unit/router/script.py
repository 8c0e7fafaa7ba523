"""A router core under a script of events, with a record of all its actions."""

import random
from typing import Any

from baton.config.router import RouterConfig
from baton.core.ids import RequestId, SequenceId, WorkerId
from baton.core.messages import (
    BlockEvents,
    CancelSequence,
    FailureReason,
    LoadReport,
    Phase,
    RefusalReason,
    Role,
    SequenceFailed,
    SequenceJoined,
    SequenceOutput,
    SequenceRefused,
    StartSequence,
    StepOutput,
    WorkerHello,
)
from baton.core.sampling import FinishReason, SamplingParams
from router.decisions.core import RouterCore
from router.decisions.events import (
    ClientGone,
    Deliver,
    Failed,
    Finished,
    FromWorker,
    Note,
    RetryCause,
    RouterAction,
    RouterEvent,
    Submit,
    Tick,
    ToWorker,
    WorkerJoined,
    WorkerLost,
)

BLOCK_TOKENS = 4


class Script:
    """A router core, a clock, and a record of all actions."""

    def __init__(self, **config: Any) -> None:
        self.core = RouterCore(
            config=RouterConfig(**{"policy": "cached_prefix"} | config), rng=random.Random(7), now_s=0.0
        )
        self.now_s = 0.0
        self.actions: list[RouterAction] = []
        """Actions of the last event."""
        self.delivered: dict[str, list[int]] = {}
        self.ends: dict[str, Finished | Failed] = {}
        self.starts: dict[str, dict[str, StartSequence]] = {}
        """Newest start by sequence and worker."""

    def do(self, event: RouterEvent) -> list[RouterAction]:
        self.actions = self.core.handle(event, now_s=self.now_s)
        self.core.check()
        for action in self.actions:
            self._see(action)
        return self.actions

    def _see(self, action: RouterAction) -> None:
        match action:
            case Deliver(seq_id, first_index, tokens):
                so_far = self.delivered.setdefault(seq_id, [])
                assert first_index == len(so_far)
                so_far.extend(tokens)
            case Finished(seq_id) | Failed(seq_id):
                assert seq_id not in self.ends
                self.ends[seq_id] = action
            case ToWorker(worker_id, StartSequence() as start):
                self.starts.setdefault(start.seq_id, {})[worker_id] = start
            case _:
                pass

    def at(self, now_s: float) -> list[RouterAction]:
        self.now_s = now_s
        return self.do(Tick())

    def join(
        self,
        worker: str,
        role: Role,
        *,
        blocks: int = 100,
        fingerprint: str = "f",
        report: bool = True,
        context: int = 10_000,
    ) -> None:
        hello = WorkerHello(
            worker_id=WorkerId(worker),
            role=role,
            fingerprint=fingerprint,
            model="m",
            block_tokens=BLOCK_TOKENS,
            block_count=blocks,
            max_model_tokens=context,
        )
        actions = list(self.do(WorkerJoined(hello, f"{worker}:1")))
        self.blocks(worker, 0, is_snapshot=True)
        actions += self.actions
        if report:
            self.report(worker, role, free=blocks)
            actions += self.actions
        self.actions = actions

    def pair(self) -> None:
        self.join("p", Role.PREFILL)
        self.join("d", Role.DECODE)

    def report(
        self,
        worker: str,
        role: Role,
        *,
        free: int = 100,
        running: int = 0,
        waiting_tokens: int = 0,
        draining: bool = False,
        is_parked: bool = False,
    ) -> None:
        said = LoadReport(role, draining, free, running, 0, waiting_tokens, 0.01, is_parked=is_parked)
        self.says(worker, said)

    def blocks(self, worker: str, number: int, *hashes: Any, is_snapshot: bool = False) -> None:
        self.says(worker, BlockEvents(number, stored=tuple(hashes), is_snapshot=is_snapshot))

    def says(self, worker: str, message: Any) -> list[RouterAction]:
        return self.do(FromWorker(WorkerId(worker), message))

    def submit(
        self,
        seq: str = "s",
        prompt: tuple[int, ...] = (1, 2, 3, 4, 5),
        *,
        max_tokens: int = 4,
        deadline_s: float = 1000.0,
        stop: tuple[int, ...] = (),
        salt: bytes = b"",
    ) -> list[RouterAction]:
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop)
        submit = Submit(SequenceId(seq), RequestId(seq), prompt, sampling, salt=salt, deadline_s=deadline_s)
        return self.do(submit)

    def output(
        self,
        worker: str,
        first_index: int,
        *tokens: int,
        seq: str = "s",
        epoch: int | None = None,
        finish: FinishReason | None = None,
        cached: int | None = None,
    ) -> list[RouterAction]:
        at = self.epoch(seq) if epoch is None else epoch
        out = SequenceOutput(SequenceId(seq), at, first_index, tokens, finish, cached)
        return self.says(worker, StepOutput((out,)))

    def joined(self, worker: str = "d", *, seq: str = "s") -> list[RouterAction]:
        return self.says(worker, SequenceJoined(SequenceId(seq), self.epoch(seq), 4096, 0.02, 0.03))

    def refused(
        self, worker: str, reason: RefusalReason, *, seq: str = "s", message: str = "no"
    ) -> list[RouterAction]:
        return self.says(worker, SequenceRefused(SequenceId(seq), self.epoch(seq), reason, message))

    def failed(
        self, worker: str, reason: FailureReason = FailureReason.INTERNAL, *, seq: str = "s"
    ) -> list[RouterAction]:
        return self.says(worker, SequenceFailed(SequenceId(seq), self.epoch(seq), reason, "broken"))

    def leave(self, seq: str = "s") -> list[RouterAction]:
        return self.do(ClientGone(SequenceId(seq)))

    def lose(self, worker: str) -> list[RouterAction]:
        return self.do(WorkerLost(WorkerId(worker), "silent"))

    def ended(self, seq: str = "s") -> tuple[FinishReason, int, int]:
        """Return (reason, generated, cached) of a sequence that finished."""
        end = self.ends[seq]
        assert isinstance(end, Finished)
        return end.reason, end.generated_count, end.cached_token_count

    def epoch(self, seq: str = "s") -> int:
        return max(start.epoch for start in self.starts[seq].values())

    def started(self) -> dict[str, StartSequence]:
        """Return the starts of the last event by worker."""
        return {
            a.worker_id: a.message
            for a in self.actions
            if isinstance(a, ToWorker) and isinstance(a.message, StartSequence)
        }

    def phases(self) -> dict[str, Phase]:
        return {worker: start.phase for worker, start in self.started().items()}

    def cancelled(self) -> dict[str, int]:
        """Return the epochs that the last event cancelled, by worker."""
        return {
            a.worker_id: a.message.epoch
            for a in self.actions
            if isinstance(a, ToWorker) and isinstance(a.message, CancelSequence)
        }

    def notes(self) -> list[str]:
        return [a.what for a in self.actions if isinstance(a, Note)]

    def retry_causes(self) -> list[RetryCause | None]:
        return [a.cause for a in self.actions if isinstance(a, Note) and a.what == "retried"]

    def in_flight(self) -> dict[str, int]:
        return {w.worker_id: w.in_flight_count for w in self.core.status().workers}
