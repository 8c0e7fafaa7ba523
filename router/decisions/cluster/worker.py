"""One worker as one router knows it: its facts, its load account, and the inputs of predictions."""

from collections.abc import Callable, Iterable

from baton.core.costs import StepCosts
from baton.core.ids import SequenceId, WorkerId
from baton.core.messages import LoadReport, PeerRef, Phase, Role, WorkerHello
from baton.core.sharing import UnreportedLoad
from router.decisions.cluster.load_account import NO_PROFILE, LoadAccount, SequenceProfile
from router.decisions.cluster.prediction_inputs import PredictionAccount
from router.decisions.cluster.snapshot import WorkerFacts, WorkerSnapshot


class WorkerView:
    """What the router knows of one worker during one session.

    Every change of a worker goes through this class, so that its parts agree and its snapshot is renewed
    exactly when something changed.
    """

    def __init__(
        self,
        hello: WorkerHello,
        address: str,
        fleet_costs: Iterable[StepCosts],
        on_change: Callable[[WorkerId, bool], None],
    ) -> None:
        """`fleet_costs`: what other workers of the fingerprint measured. `on_change` is called with the id,
        and whether the facts are different, when the snapshot is no longer true."""
        self.hello, self.address = hello, address
        self.worker_id = hello.worker_id
        self.load = LoadAccount(hello.worker_id, hello.block_count)
        self.prediction = PredictionAccount(hello, fleet_costs)
        self._role = hello.role
        self._is_drained_by_directory = self._says_draining = self._is_suspect = False
        self.is_parked = False
        """It waits for expert ranks, and takes nothing new until they are back."""
        self.facts = WorkerFacts.of(hello, hello.role, is_draining=False)
        self._on_change = on_change
        self._snapshot: WorkerSnapshot | None = None

    @property
    def peer(self) -> PeerRef:
        return PeerRef(self.worker_id, self.address)

    @property
    def is_leaving(self) -> bool:
        """Whether the cluster drains the worker. Neither a suspect nor a parked worker gets anything new
        either, but these are not leaving."""
        return self._is_drained_by_directory or self._says_draining

    @property
    def snapshot(self) -> WorkerSnapshot:
        """The worker as it is now: the same object until something changes."""
        if self._snapshot is None:
            inputs = self.prediction.inputs(self.facts.role, self.load.elsewhere)
            self._snapshot = WorkerSnapshot(self.worker_id, self.facts, self.load.figures(), inputs)
        return self._snapshot

    @property
    def is_blameless(self) -> bool:
        """Whether what fails there is no sign of a fault of the worker's own."""
        return self.is_leaving or self.is_parked

    def _changed(self) -> None:
        self._snapshot = None
        self._on_change(self.worker_id, False)

    def _change_facts(self) -> None:
        is_closed = self.is_leaving or self._is_suspect or self.is_parked
        self.facts = WorkerFacts.of(self.hello, self._role, is_draining=is_closed)
        self.prediction.changed()
        self._snapshot = None
        self._on_change(self.worker_id, True)

    # --- reports -------------------------------------------------------------------------

    def on_report(self, report: LoadReport, *, now_s: float) -> None:
        since_s = now_s - self.load.report_at_s
        self.load.on_report(report, now_s=now_s)
        self.prediction.on_report(report, since_s=since_s)
        said = report.role, report.is_draining, report.is_parked
        if (self._role, self._says_draining, self.is_parked) != said:
            self._role, self._says_draining, self.is_parked = said
            self._change_facts()
        else:
            self._changed()

    def update(self, role: Role, *, is_draining: bool, is_suspect: bool = False) -> None:
        """Take over the role and the state that the directory reports."""
        self._role, self._is_drained_by_directory, self._is_suspect = role, is_draining, is_suspect
        self._change_facts()

    def refused(self, *, is_draining: bool) -> None:
        """Note that the worker refused a sequence. It gets no further one before its next load report."""
        self.load.is_refusing = True
        self._says_draining = self._says_draining or is_draining
        self._change_facts()

    def set_elsewhere(self, load: UnreportedLoad) -> None:
        """Take over the load that other routers report for this worker."""
        self.load.elsewhere = load
        self.prediction.changed()
        self._changed()

    # --- reservations -------------------------------------------------------------------------------

    def reserve(
        self,
        seq_id: SequenceId,
        *,
        phase: Phase,
        tokens: int,
        blocks: int,
        profile: SequenceProfile = NO_PROFILE,
        now_s: float = 0.0,
    ) -> None:
        """`tokens`: of the prompt, to compute here."""
        made = self.load.reserve(seq_id, phase=phase, tokens=tokens, blocks=blocks, profile=profile)
        self.prediction.reserved(made, now_s=now_s)
        self._changed()

    def begin(self, seq_id: SequenceId, now_s: float = 0.0) -> None:
        """The prompt is computed, or its KV is there; the sequence goes on. A second time changes nothing."""
        reservation = self.load.reservations[seq_id]
        if not reservation.has_begun:
            self.prediction.begun(reservation, now_s=now_s)
            self.load.begin(reservation)
            self._changed()

    def release(self, seq_id: SequenceId) -> None:
        self.prediction.released(self.load.release(seq_id))
        self._changed()

    def placed(self, prompt_s: float, now_s: float) -> None:
        """A sequence was placed here, whose prompt takes so long to compute; 0: it computes none, or nobody
        predicts."""
        self.load.last_placed_s = now_s
        self.prediction.prompt_sent(prompt_s, now_s)
        self._changed()

    def check(self) -> None:
        """Raises AssertionError if the accounts disagree, or a kept snapshot is not true."""
        self.load.check()
        self.prediction.check(self.load.reservations.values())
        inputs = self.prediction.freeze(self.facts.role, self.load.elsewhere)
        now = WorkerSnapshot(self.worker_id, self.facts, self.load.figures(), inputs)
        assert self.snapshot == now, f"{self.worker_id} changed unnoticed"
