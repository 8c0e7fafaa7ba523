"""What a worker counts."""

from collections.abc import Mapping

from baton.core.ids import WorkerId, replica_name
from baton.core.messages import StepOutput
from baton.core.steps import StepPlan, StepResult
from baton.telemetry import catalogue
from baton.telemetry.metric import Metric
from baton.telemetry.metrics import Meter
from kv_transfer.manager import TransferCounters
from kv_transfer.read import ReadDone
from worker.events import CopyDone, CopyFromStore, CopyToStore, ToRouter, WorkerAction, WorkerEvent
from worker.expert_load import ExpertLoad

GAUGES: dict[str, Metric] = {
    "rank_count": catalogue.RANKS,
    "free_blocks": catalogue.FREE_BLOCKS,
    "held_blocks": catalogue.HELD_BLOCKS,
    "block_bytes": catalogue.BLOCK_BYTES,
    "quarantined_blocks": catalogue.QUARANTINED_BLOCKS,
    "lease_count": catalogue.LEASED,
    "running_count": catalogue.RUNNING,
    "waiting_count": catalogue.WAITING,
    "is_parked": catalogue.PARKED,
}
"""Gauges by the account of the core's status that they show."""

COUNTERS: dict[str, Metric] = {
    "preemption_count": catalogue.PREEMPTIONS,
    "swap_count": catalogue.SWAPS,
    "drafted_count": catalogue.DRAFTED_TOKENS,
    "accepted_count": catalogue.ACCEPTED_TOKENS,
    "expired_lease_count": catalogue.LEASES_EXPIRED,
}
"""Counters by the account that they show, which only rises."""

STREAM_COUNTERS: dict[str, Metric] = {
    "streamed_bytes": catalogue.STREAMED_BYTES,
    "streamed_wait_s": catalogue.STREAMED_WAIT,
}
"""Counters of streamed layers by their accounts, which workers without any do not have."""

EXPERT_COUNTERS: dict[str, Metric] = {
    "experts.dispatched_rows": catalogue.EXPERT_DISPATCHED_ROWS,
    "experts.dispatched_pairs": catalogue.EXPERT_DISPATCHED_PAIRS,
    "experts.dispatched_bytes": catalogue.EXPERT_DISPATCHED_BYTES,
    "experts.combined_bytes": catalogue.EXPERT_COMBINED_BYTES,
    "experts.rerouted_pairs": catalogue.EXPERT_REROUTED_PAIRS,
    "experts.suspected_ranks": catalogue.EXPERT_SUSPECTED_RANKS,
}
"""Counters of rows for expert ranks by their accounts, which workers that hold all experts do not have."""

STORE_COUNTERS: dict[str, Metric] = {
    "store.offered_blocks": catalogue.OFFERED_BLOCKS,
    "store.written_blocks": catalogue.WRITTEN_BLOCKS,
    "store.skipped_blocks": catalogue.SKIPPED_BLOCKS,
    "store.loads_started": catalogue.LOADS_STARTED,
}
BY_LABEL: dict[str, tuple[Metric, str]] = {
    "store.loaded_blocks.": (catalogue.LOADED_BLOCKS, "tier"),
    "store.recomputed_blocks.": (catalogue.RECOMPUTED_BLOCKS, "reason"),
}
"""Metrics by the prefix of their accounts. The rest of an account's name is the label's value."""


class WorkerMetrics:
    """Metrics are labelled with the replica's stable name, so that a restart continues its series."""

    def __init__(self, worker_id: WorkerId) -> None:
        self.meter = Meter()
        self._worker = replica_name(worker_id)
        self._totals_seen: dict[str, float] = {}
        self._copies: dict[int, tuple[str, int]] = {}
        """Direction and number of blocks of each copy to or from the store that is under way."""

    def totals(self) -> dict[str, float]:
        """What the worker has computed, by kind of work, for its accounts."""
        value = self.meter.value
        totals = {
            f"step_tokens.{kind}": value(catalogue.STEP_TOKENS, worker=self._worker, kind=kind)
            for kind in ("prefill", "decode")
        }
        totals["prefix_hit_tokens"] = value(catalogue.PREFIX_HIT_TOKENS, worker=self._worker)
        totals["context_rank_tokens"] = value(catalogue.CONTEXT_RANK_TOKENS, worker=self._worker)
        return totals

    def on_event(self, event: WorkerEvent) -> None:
        if isinstance(event, CopyDone) and (copy := self._copies.pop(event.copy_id, None)):
            direction, block_count = copy
            labels = {"worker": self._worker, "direction": direction}
            self.meter.observe(catalogue.STORE_COPY, event.seconds, **labels)
            self.meter.inc(catalogue.STORE_COPIED_BLOCKS, 0 if event.error else block_count, **labels)

    def on_action(self, action: WorkerAction) -> None:
        match action:
            case CopyToStore(copy_id, blocks):
                self._copies[copy_id] = ("in", len(blocks))
            case CopyFromStore(copy_id, slots):
                self._copies[copy_id] = ("out", len(slots))
            case ToRouter(_, StepOutput(outputs)):
                # A decode worker repeats the count of the worker that prefilled, without timings.
                own = [output.cached_token_count for output in outputs if output.timings is not None]
                cached = sum(filter(None, own))
                if cached:
                    self.meter.inc(catalogue.PREFIX_HIT_TOKENS, cached, worker=self._worker)
            case _:
                pass

    def step(self, plan: StepPlan, result: StepResult) -> None:
        self.meter.observe(catalogue.STEP, result.elapsed_s, worker=self._worker)
        draft_count = sum(item.draft_count for item in plan.items)
        decode_count = sum(
            len(item.tokens) - item.draft_count == 1 and item.sample_index is not None for item in plan.items
        )
        prefill_count = plan.token_count - decode_count - draft_count
        self.meter.inc(catalogue.STEP_TOKENS, draft_count, worker=self._worker, kind="draft")
        self.meter.inc(catalogue.STEP_TOKENS, prefill_count, worker=self._worker, kind="prefill")
        self.meter.inc(catalogue.STEP_TOKENS, decode_count, worker=self._worker, kind="decode")
        self.meter.inc(catalogue.REPLAYED_STEPS, int(result.is_replayed), worker=self._worker)
        self.meter.inc(catalogue.CONTEXT_RANK_TOKENS, result.context_rank_tokens, worker=self._worker)

    def read(self, done: ReadDone) -> None:
        self.meter.inc(catalogue.TRANSFER_READS, worker=self._worker, outcome=_how(done))
        self.meter.observe(catalogue.TRANSFER, done.seconds, worker=self._worker)

    def accounts(self, accounts: Mapping[str, float], transfer: Mapping[str, TransferCounters]) -> None:
        """Set gauges to what they are now, and raise counters to what they have become."""
        for name, metric in GAUGES.items():
            self.meter.set(metric, accounts.get(name, 0.0), worker=self._worker)
        for name, metric in COUNTERS.items():
            self.meter.inc(metric, self._risen(name, accounts[name]), worker=self._worker)
        for name, metric in STREAM_COUNTERS.items():
            self.meter.inc(metric, self._risen(name, accounts.get(name, 0.0)), worker=self._worker)
        for name in EXPERT_COUNTERS.keys() & accounts.keys():
            risen = self._risen(name, accounts[name])
            self.meter.inc(EXPERT_COUNTERS[name], risen, worker=self._worker)
        self._store_accounts(accounts)
        for backend, counters in transfer.items():
            new_bytes = self._risen(backend, counters.bytes_read)
            self.meter.inc(catalogue.TRANSFER_BYTES, new_bytes, worker=self._worker, backend=backend)

    def experts(self, load: ExpertLoad) -> None:
        """As `accounts`, for a model with experts. Experts that got no token are shown too."""
        for expert, total in enumerate(load.totals.tolist()):
            risen = self._risen(f"expert {expert}", total)
            self.meter.inc(catalogue.EXPERT_TOKENS, risen, worker=self._worker, expert=str(expert))
        for layers, balance in (("mean", load.balance), ("worst", load.worst)):
            labels = {"worker": self._worker, "layers": layers}
            if balance is None:
                self.meter.forget(catalogue.EXPERT_BALANCE, **labels)
            else:
                self.meter.set(catalogue.EXPERT_BALANCE, balance, **labels)

    def expert_wait(self, seconds: float) -> None:
        """Count how long a step waited for expert ranks."""
        self.meter.observe(catalogue.EXPERT_WAIT, seconds, worker=self._worker)

    def _store_accounts(self, accounts: Mapping[str, float]) -> None:
        self.meter.set(catalogue.STORE_JOINED, accounts.get("store.joined", 0.0), worker=self._worker)
        for name, metric in STORE_COUNTERS.items():
            self.meter.inc(metric, self._risen(name, accounts.get(name, 0.0)), worker=self._worker)
        for name, total in accounts.items():
            prefix = name[: name.rfind(".") + 1]
            if prefix in BY_LABEL:
                metric, label = BY_LABEL[prefix]
                labels = {"worker": self._worker, label: name.removeprefix(prefix)}
                self.meter.inc(metric, self._risen(name, total), **labels)

    def _risen(self, name: str, total: float) -> float:
        """How much an account rose since the last call."""
        risen = total - self._totals_seen.get(name, 0)
        self._totals_seen[name] = total
        return risen


def _how(read: ReadDone) -> str:
    if read.is_stale:
        return "stale"
    if read.corrupt:
        return "corrupt"
    return "failed" if read.error else "ok"
