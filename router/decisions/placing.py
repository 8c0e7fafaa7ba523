"""Placement: the view of workers and prefixes, the policy that chooses, and the accounts of what runs where.

`router.decisions.core` calls it for each sequence and reports what happens. Pure."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from baton.config.router import RouterConfig
from baton.core.costs import PhaseTimings
from baton.core.ids import BlockHash, SequenceId, WorkerId
from baton.core.messages import Phase, SequenceJoined, SequenceOutput, WorkerHello
from baton.core.policies import PLACEMENT_POLICIES
from router.decisions.affinity import Affinity
from router.decisions.cluster.load_account import SequenceProfile
from router.decisions.cluster.view import ClusterView
from router.decisions.cluster.worker import WorkerView
from router.decisions.flow import Flow
from router.decisions.peer_loads import PeerBook
from router.decisions.placement.interface import (
    NO_BLOCKS,
    NOBODY,
    CachedTokens,
    NoPlace,
    Placement,
    PlacementRequest,
    PolicyTools,
)
from router.decisions.placement.room import kept_for_others
from router.decisions.placement.table import make_placement_policy
from router.decisions.prediction.forecast import Prediction, SequenceNeeds
from router.decisions.prediction.predictor import Predictor
from router.decisions.prediction.status import PredictorStatus
from router.decisions.prefix_index import PrefixIndex
from router.decisions.prompt_hashes import HashSource, PromptHashes
from router.decisions.request_state import RequestState

UNTRUSTED = "cached_prefix"
"""The policy that places while predictions are not trusted."""
CachedBlocks = dict[tuple[str, int], tuple[Mapping[WorkerId, int], dict[WorkerId, int]]]
"""(fingerprint, block_tokens) -> leading blocks, and tokens, of one sequence that each worker holds."""


@dataclass(slots=True)
class OpenPrediction:
    """A prediction on its way to be compared with what happens."""

    predicted: Prediction
    prefill_id: WorkerId
    decode_id: WorkerId
    placed_s: float
    generated_before: int
    said_meets: float | None = None
    """Probability that the objectives hold, before it was calibrated; None if there is no forecast."""
    first_s: float | None = None
    first_count: int = 0
    timings: PhaseTimings | None = None


def _needs(flow: Flow, now_s: float) -> SequenceNeeds:
    submit = flow.submit
    # What the client has already is not waited for again.
    has_first = bool(flow.generated)
    return SequenceNeeds(
        flow.token_count,
        submit.priority,
        max(1, submit.sampling.max_tokens - len(flow.generated)),
        0.0 if has_first else submit.ttft_slo_s,
        submit.tpot_slo_s,
        now_s - flow.arrived_s,
        submit.adapter.digest if submit.adapter is not None else "",
        submit.stored,
        submit.slo_class,
    )


class Placing:
    def __init__(self, *, config: RouterConfig, rng: Random) -> None:
        self.predictor = Predictor(error_max=config.predictor_error_max)
        tools = PolicyTools(config, self.predictor, rng)
        self._predicts = PLACEMENT_POLICIES[config.policy].predicts
        self._policy = make_placement_policy(config.policy, tools)
        self._untrusted = make_placement_policy(UNTRUSTED, tools)
        self.suspended: Callable[[float], frozenset[WorkerId]] = lambda now_s: NOBODY
        """Workers that get nothing now while others can, see `router.decisions.breaker`; set by the core."""
        self._open: dict[SequenceId, OpenPrediction] = {}
        self._affinity = Affinity()
        self._hashes: dict[SequenceId, HashSource] = {}
        self.cluster = ClusterView(silence_s=config.worker_silence_s)
        self.index = PrefixIndex()
        self.peers = PeerBook(self.cluster, self.index)

    # --- workers ----------------------------------------------------------------------------------

    def join(self, hello: WorkerHello, address: str) -> None:
        """Add a worker that is not known yet."""
        self.cluster.join(hello, address)
        self.index.add_worker(hello.worker_id)
        self.peers.worker_joined(hello.worker_id)

    def lose(self, worker_id: WorkerId) -> None:
        """Remove a worker whose reservations were released."""
        self.cluster.lose(worker_id)
        self.predictor.forget(worker_id)
        self.index.remove_worker(worker_id)
        self._affinity.lost(worker_id)

    @property
    def longest_tokens(self) -> int:
        """The longest sequence that some worker can hold, in tokens."""
        return max((w.hello.max_model_tokens for w in self.cluster), default=0)

    def takes_new_beside(self, workers: Container[WorkerId]) -> bool:
        """Whether some worker but these takes new sequences, in whichever phase."""
        return any(w.worker_id not in workers for w in self.cluster if not w.facts.is_draining)

    @property
    def keeps_room(self) -> bool:
        """Whether `leaves_room` changes anything: policies that only rank keep nothing for anybody."""
        return self._predicts and self.predictor.is_trusted

    @property
    def distrusts_predictions(self) -> bool:
        """Whether the policy predicts, but its predictions are not trusted at present."""
        return self._predicts and not self.predictor.is_trusted

    # --- sequences --------------------------------------------------------------------------------

    def find(self, flow: Flow, *, now_s: float, leaves_room: bool = False) -> Placement | NoPlace:
        """Return where the sequence would run now. Only the policy's own memory may change.

        `leaves_room`: keep room for other tenants, see `router.decisions.placement.room`.
        """
        found: CachedBlocks = {}
        snapshot = self.cluster.snapshot(now_s, self.suspended(now_s))
        request = PlacementRequest(
            _needs(flow, now_s),
            flow.is_last_token,
            self._matcher(flow, found),
            flow.avoid,
            flow.fingerprint,
            self._affinity.siblings_at(flow.submit),
            self._affinity.adapter_at(flow.submit),
            kept_for_others(snapshot.pools.decode, flow.token_count) if leaves_room else NOBODY,
        )
        policy = self._untrusted if self.distrusts_predictions else self._policy
        placement = policy.place(request, snapshot)
        if isinstance(placement, NoPlace):
            return placement
        facts = placement.prefill.facts
        blocks, held = found.get((facts.fingerprint, facts.block_tokens), (NO_BLOCKS, NO_BLOCKS))
        if self.distrusts_predictions:
            # Predictions are still compared with what happens, so that it shows when they are good again.
            source, target = placement.prefill, placement.decode
            placement = placement._replace(
                predicted=self.predictor.predict(source, target, request.needs, held, now_s=now_s),
                reason=f"by cached prefix, since predictions are not trusted: {placement.reason}",
            )
        return placement._replace(cached_blocks=blocks)

    def _matcher(self, flow: Flow, found: CachedBlocks) -> Callable[[str, int], CachedTokens]:
        def matched(fingerprint: str, block_tokens: int) -> CachedTokens:
            kind = (fingerprint, block_tokens)
            known = found.get(kind)
            if known is None:
                blocks = self.index.match(self._hashes_of(flow, fingerprint, block_tokens))
                # The last token is computed even when all are cached: sampling needs its logits.
                most = flow.token_count - 1
                tokens = {w: min(most, count * block_tokens) for w, count in blocks.items()}
                known = found[kind] = blocks, tokens
            return known[1]

        return matched

    def take(self, flow: Flow, placement: Placement, *, now_s: float) -> None:
        """Reserve what the sequence needs at its workers before it starts there."""
        seq_id, prefill, cached_blocks = flow.name, placement.prefill, placement.cached_blocks
        facts = prefill.facts
        profile = SequenceProfile(flow.token_count, flow.submit.priority, flow.submit.tpot_slo_s)
        for worker_id, phase in placement.phases.items():
            cached_tokens = cached_blocks.get(worker_id, 0) * facts.block_tokens
            self.cluster.reserve(
                worker_id,
                seq_id,
                phase=phase,
                tokens=0 if phase is Phase.DECODE else max(1, flow.token_count - cached_tokens),
                blocks=prefill.blocks_for(flow.token_count),
                profile=profile,
                now_s=now_s,
            )
            seconds = 0.0
            if phase is not Phase.DECODE and placement.predicted is not None:
                seconds = placement.predicted.prefill.compute_s
            self.cluster[worker_id].placed(seconds, now_s)
            if self._policy.uses_prefix:
                hashes = self._hashes_of(flow, facts.fingerprint, facts.block_tokens)
                new_hashes = hashes[cached_blocks.get(worker_id, 0) :]
                self.index.placed(worker_id, new_hashes, now_s=now_s)
        self._affinity.placed(flow.submit, placement.phases, is_first_time=not flow.was_placed)
        if placement.predicted is not None:
            decode_id = (placement.decode or prefill).worker_id
            self._open[seq_id] = OpenPrediction(
                placement.predicted,
                prefill.worker_id,
                decode_id,
                now_s,
                len(flow.generated),
                None if placement.forecast is None else placement.forecast.said_meets,
            )

    def on_output(self, worker_id: WorkerId, output: SequenceOutput) -> None:
        """Note the timings of an output before the flow handles it."""
        if output.timings is not None and (known := self._open.get(output.seq_id)) is not None:
            known.timings = output.timings

    def on_joined(self, worker: WorkerView, joined: SequenceJoined) -> None:
        if (known := self._open.get(joined.seq_id)) is not None:
            source = self.cluster.get(known.prefill_id)
            if source is not None:
                self.predictor.observe_joined(source.hello.host, worker.hello.host, joined)

    def forget(self, flow: Flow) -> None:
        """Forget a sequence that is not placed after all."""
        self._hashes.pop(flow.name, None)

    def settle(self, flow: Flow, *, now_s: float) -> bool:
        """Make the accounts follow what the flow became; returns whether room came free."""
        seq_id = flow.name
        if (known := self._open.get(seq_id)) is not None:
            self._compare(flow, known, now_s)
        is_freed = self.cluster.release_except(seq_id, flow.phases)
        if flow.is_prefilled:
            for worker_id in flow.phases:
                self.cluster[worker_id].begin(seq_id, now_s)
        if flow.is_over:
            self._hashes.pop(seq_id, None)
            if flow.was_placed:
                self._affinity.over(flow.submit)
        return is_freed

    def _compare(self, flow: Flow, known: OpenPrediction, now_s: float) -> None:
        """Compare what was predicted of this attempt with what happened."""
        count = len(flow.generated) - known.generated_before
        if known.first_s is None and count > 0:
            known.first_s, known.first_count = now_s, count
            if (worker := self.cluster.get(known.prefill_id)) is not None:
                elapsed_s = now_s - known.placed_s
                self.predictor.observe_first_token(worker.snapshot, known.predicted, elapsed_s, known.timings)
        if not flow.is_over and flow.state is not RequestState.QUEUED:
            return
        del self._open[flow.name]
        if flow.state is not RequestState.DONE or known.first_s is None:
            return
        is_first_attempt = known.generated_before == 0
        if is_first_attempt and known.said_meets is not None:
            self._note_attainment(flow, known.said_meets, known.first_s, now_s)
        if (worker := self.cluster.get(known.decode_id)) is not None:
            tokens = count - known.first_count + 1
            self.predictor.observe_end(
                worker.snapshot, known.predicted, tokens, now_s - known.first_s, is_whole=is_first_attempt
            )

    def _note_attainment(self, flow: Flow, said: float, first_s: float, now_s: float) -> None:
        """Note whether the objectives held of a sequence that has ended, and how likely that was said to
        be."""
        submit = flow.submit
        if not submit.ttft_slo_s and not submit.tpot_slo_s:
            return
        steps = max(1, len(flow.generated) - 1)
        has_held = (not submit.ttft_slo_s or first_s - flow.arrived_s <= submit.ttft_slo_s) and (
            not submit.tpot_slo_s or now_s - first_s <= submit.tpot_slo_s * steps
        )
        self.predictor.attainments.observe(submit.slo_class, said, has_held=has_held)

    def predictor_status(self) -> PredictorStatus:
        predictor = self.predictor
        return PredictorStatus(
            is_in_use=self._predicts,
            is_trusted=predictor.is_trusted,
            error=predictor.excess,
            fallback_count=predictor.fallback_count,
            calibration=predictor.calibration(),
        )

    def check(self) -> None:
        """Raises AssertionError if the accounts disagree. Costs as much as everything is large."""
        self.cluster.check()
        self.index.check()
        self.peers.check()

    def check_against(self, flows: dict[SequenceId, Flow]) -> None:
        """The accounts hold exactly what these flows hold."""
        assert self._hashes.keys() <= flows.keys()
        assert self._open.keys() <= {s for s, f in flows.items() if f.phases}
        held = {(s, w.worker_id): r.phase for w in self.cluster for s, r in w.load.reservations.items()}
        assert held == {(s, w): phase for s, f in flows.items() for w, phase in f.phases.items()}
        if not flows:
            assert all(w.load.in_flight.values == (0, 0, 0) for w in self.cluster)
            assert self._affinity.is_idle

    def _hashes_of(self, flow: Flow, fingerprint: str, block_tokens: int) -> Sequence[BlockHash]:
        submit = flow.submit
        hashes = self._hashes.get(flow.name)
        if hashes is None:
            hashes = self._hashes[flow.name] = submit.hashes or PromptHashes(submit.salt)
        return hashes.of(flow.tokens, fingerprint, block_tokens)
