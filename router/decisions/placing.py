"""Placing sequences: what is known about workers and prefixes, the policy that chooses, and the accounts
of what was sent where. Pure: `router.decisions.core` asks it for each sequence and tells it what happens."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from baton.config.router import RouterConfig
from baton.core.costs import PhaseTimings
from baton.core.geometry import blocks_for
from baton.core.ids import BlockHash, SequenceId, WorkerId
from baton.core.messages import Phase, SequenceJoined, SequenceOutput, WorkerHello
from router.decisions.affinity import Affinity
from router.decisions.cluster_view import ClusterView, Load, Worker
from router.decisions.flow import Flow, RequestState
from router.decisions.peer_loads import PeerBook
from router.decisions.placement import make_policy
from router.decisions.placement.place import place
from router.decisions.placement.room import kept_for_others
from router.decisions.placement.slo import Request, SloPlacer
from router.decisions.placement.views import NO_BLOCKS, Matched, NoPlace, Placement, RequestView
from router.decisions.prediction.forecast import Predicted, Want
from router.decisions.prediction.predictor import Predictor
from router.decisions.prediction.status import PredictorStatus
from router.decisions.prefix_index import PrefixIndex
from router.decisions.prompt_hashes import HashSource, PromptHashes

CachedBlocks = dict[tuple[str, int], tuple[Mapping[WorkerId, int], dict[WorkerId, int]]]
"""(fingerprint, block_tokens) -> leading blocks, and tokens, of one sequence that each worker holds."""


@dataclass(slots=True)
class Watch:
    """A prediction on its way to be compared."""

    predicted: Predicted
    prefill_id: WorkerId
    decode_id: WorkerId
    placed_s: float
    generated_before: int
    first_s: float | None = None
    first_count: int = 0
    timings: PhaseTimings | None = None


def _want(flow: Flow, now_s: float) -> Want:
    submit = flow.submit
    # What the client has already is not waited for again.
    has_first = bool(flow.generated)
    return Want(
        flow.token_count,
        submit.priority,
        max(1, submit.sampling.max_tokens - len(flow.generated)),
        0.0 if has_first else submit.ttft_slo_s,
        submit.tpot_slo_s,
        now_s - flow.arrived_s,
        submit.adapter.digest if submit.adapter is not None else "",
        submit.stored,
    )


class Placing:
    def __init__(self, *, config: RouterConfig, rng: Random) -> None:
        self._config = config
        self._rng = rng
        self._policy = make_policy(config)
        self.predictor = Predictor(error_max=config.predictor_error_max)
        self._placer = (
            SloPlacer(
                self.predictor,
                disaggregate=config.disaggregate,
                fallback=config.fallback_to_other_pool,
                any_role=config.any_role,
                rng=rng,
            )
            if config.policy == "slo"
            else None
        )
        self.suspended: Callable[[float], frozenset[WorkerId]] = lambda now_s: frozenset()
        """Workers that get nothing now while others can, see `router.decisions.breaker`; set by the core."""
        self._watches: dict[SequenceId, Watch] = {}
        self._affinity = Affinity()
        self._hashes: dict[SequenceId, HashSource] = {}
        self.cluster = ClusterView(silence_s=config.worker_silence_s)
        self.index = PrefixIndex()
        self.peers = PeerBook(self.cluster, self.index)

    # --- workers ----------------------------------------------------------------------------------

    def join(self, hello: WorkerHello, address: str) -> None:
        """The worker must not be known."""
        self.cluster.join(hello, address)
        self.index.add_worker(hello.worker_id)
        self.peers.worker_joined(hello.worker_id)

    def lose(self, worker_id: WorkerId) -> None:
        """Its tickets were taken back before."""
        self.cluster.lose(worker_id)
        self.index.remove_worker(worker_id)
        self._affinity.lost(worker_id)

    @property
    def longest_tokens(self) -> int:
        """What the most capable worker can hold of one sequence."""
        return max((w.hello.max_model_tokens for w in self.cluster), default=0)

    @property
    def keeps_room(self) -> bool:
        """Whether `leaves_room` changes anything: policies that only rank keep nothing for anybody."""
        return self._placer is not None and self.predictor.is_trusted

    @property
    def is_blind(self) -> bool:
        """Whether the policy would predict, if its predictions were trusted."""
        return self._placer is not None and not self.predictor.is_trusted

    # --- sequences --------------------------------------------------------------------------------

    def find(self, flow: Flow, *, now_s: float, leaves_room: bool = False) -> Placement | NoPlace:
        """Where the sequence would run now. Changes nothing but the policy's own memory. `leaves_room`: to
        others, see `router.decisions.placement.room`."""
        suspended = self.suspended(now_s)
        kept: frozenset[WorkerId] = frozenset()
        if leaves_room:
            kept = kept_for_others(self.cluster.decode_pool, flow.token_count)
        found: CachedBlocks = {}

        def matched(fingerprint: str, block_tokens: int) -> dict[WorkerId, int]:
            kind = (fingerprint, block_tokens)
            if kind not in found:
                blocks = self.index.match(self._hashes_of(flow, fingerprint, block_tokens))
                # The last token is computed even when all are cached: sampling needs its logits.
                most = flow.token_count - 1
                found[kind] = blocks, {w: min(most, count * block_tokens) for w, count in blocks.items()}
            return found[kind][1]

        if self._placer is not None and self.keeps_room:
            adapter = flow.submit.adapter
            request = Request(
                _want(flow, now_s),
                flow.is_last_token,
                flow.avoid,
                flow.fingerprint,
                matched,
                None if adapter is None else self._affinity.loaded(adapter.digest) or frozenset(),
                suspended,
                kept,
            )
            placement = self._placer.place(request, self.cluster, now_s=now_s)
        else:
            placement = self._by_rank(flow, matched, suspended, now_s)
        if isinstance(placement, NoPlace):
            return placement
        view = placement.prefill
        blocks, _ = found.get((view.fingerprint, view.block_tokens), (NO_BLOCKS, NO_BLOCKS))
        return placement._replace(cached_blocks=blocks)

    def _by_rank(
        self, flow: Flow, matched: Callable[[str, int], Matched], suspended: Container[WorkerId], now_s: float
    ) -> Placement | NoPlace:
        """By a policy that predicts nothing."""
        views = self.cluster.views(
            flow.token_count, avoid=flow.avoid, fingerprint=flow.fingerprint, now_s=now_s
        )
        if suspended:
            views = [v._replace(is_suspended=v.worker_id in suspended) for v in views]
        placement = place(
            RequestView(flow.is_last_token, matched),
            self._affinity.mark(flow.submit, views),
            policy=self._policy,
            disaggregate=self._config.disaggregate,
            fallback=self._config.fallback_to_other_pool,
            rng=self._rng,
        )
        if self._placer is None or isinstance(placement, NoPlace):
            return placement
        # Watched all the same, so that it shows when predictions are good again.
        source = self.cluster[placement.prefill.worker_id]
        target = None if placement.decode is None else self.cluster[placement.decode.worker_id]
        held = matched(placement.prefill.fingerprint, placement.prefill.block_tokens)
        predicted = self.predictor.of_pair(source, target, _want(flow, now_s), held, now_s=now_s)
        reason = f"predictions are off, so by cached prefix: {placement.reason}"
        return placement._replace(predicted=predicted, reason=reason)

    def take(self, flow: Flow, placement: Placement, *, now_s: float) -> None:
        """Count the sequence where it was placed, before it starts there."""
        seq_id, view, cached_blocks = flow.name, placement.prefill, placement.cached_blocks
        load = Load(flow.token_count, flow.submit.priority, flow.submit.tpot_slo_s)
        for worker_id, phase in placement.phases.items():
            cached_tokens = cached_blocks.get(worker_id, 0) * view.block_tokens
            self.cluster.issue(
                worker_id,
                seq_id,
                phase=phase,
                tokens=0 if phase is Phase.DECODE else max(1, flow.token_count - cached_tokens),
                blocks=blocks_for(flow.token_count + 1, view.block_tokens),
                load=load,
                now_s=now_s,
            )
            seconds = 0.0
            if phase is not Phase.DECODE and placement.predicted is not None:
                seconds = placement.predicted.prefill.compute_s
            self.cluster[worker_id].placed(seconds, now_s)
            if self._policy.uses_prefix:
                hashes = self._hashes_of(flow, view.fingerprint, view.block_tokens)
                news = hashes[cached_blocks.get(worker_id, 0) :]
                self.index.placed(worker_id, news, now_s=now_s)
        self._affinity.placed(flow.submit, placement.phases, is_first_time=not flow.was_placed)
        if placement.predicted is not None:
            decode_id = (placement.decode or view).worker_id
            self._watches[seq_id] = Watch(
                placement.predicted, view.worker_id, decode_id, now_s, len(flow.generated)
            )

    def on_output(self, worker_id: WorkerId, output: SequenceOutput) -> None:
        """Before the flow hears of it."""
        if output.timings is not None and (watch := self._watches.get(output.seq_id)) is not None:
            watch.timings = output.timings

    def on_joined(self, worker: Worker, joined: SequenceJoined) -> None:
        if (watch := self._watches.get(joined.seq_id)) is not None:
            self.predictor.saw_joined(self.cluster.get(watch.prefill_id), worker, joined)

    def forget(self, flow: Flow) -> None:
        """It was not placed after all, and never will be."""
        self._hashes.pop(flow.name, None)

    def settle(self, flow: Flow, *, now_s: float) -> bool:
        """Make the accounts follow what the flow became; returns whether room came free."""
        seq_id = flow.name
        if (watch := self._watches.get(seq_id)) is not None:
            self._observe(flow, watch, now_s)
        is_freed = self.cluster.take_back_except(seq_id, flow.phases)
        if flow.is_prefilled:
            for worker_id in flow.phases:
                self.cluster[worker_id].prefilled(seq_id, now_s)
        if flow.is_over:
            self._hashes.pop(seq_id, None)
            if flow.was_placed:
                self._affinity.over(flow.submit)
        return is_freed

    def _observe(self, flow: Flow, watch: Watch, now_s: float) -> None:
        """Compare what was predicted of this attempt with what happened."""
        count = len(flow.generated) - watch.generated_before
        if watch.first_s is None and count > 0:
            watch.first_s, watch.first_count = now_s, count
            if (worker := self.cluster.get(watch.prefill_id)) is not None:
                elapsed_s = now_s - watch.placed_s
                self.predictor.saw_first_token(worker, watch.predicted, elapsed_s, watch.timings)
        if not flow.is_over and flow.state is not RequestState.QUEUED:
            return
        del self._watches[flow.name]
        if flow.state is not RequestState.DONE or watch.first_s is None:
            return
        if (worker := self.cluster.get(watch.decode_id)) is not None:
            is_first_attempt = watch.generated_before == 0
            tokens = count - watch.first_count + 1
            self.predictor.saw_end(
                worker, watch.predicted, tokens, now_s - watch.first_s, is_whole=is_first_attempt
            )

    def predictor_status(self) -> PredictorStatus:
        predictor = self.predictor
        return PredictorStatus(
            is_in_use=self._placer is not None,
            is_trusted=predictor.is_trusted,
            error=predictor.excess,
            fallback_count=predictor.fallback_count,
        )

    def check(self) -> None:
        """Raises AssertionError if the accounts disagree. Costs as much as everything is large."""
        self.cluster.check()
        self.index.check()
        self.peers.check()

    def check_against(self, flows: dict[SequenceId, Flow]) -> None:
        """The accounts hold exactly what these flows hold."""
        assert self._hashes.keys() <= flows.keys()
        assert self._watches.keys() <= {s for s, f in flows.items() if f.phases}
        held = {(s, w.worker_id): t.phase for w in self.cluster for s, t in w.tickets.items()}
        assert held == {(s, w): phase for s, f in flows.items() for w, phase in f.phases.items()}
        if not flows:
            assert all(w.in_flight.values == (0, 0, 0) for w in self.cluster)
            assert self._affinity.is_idle

    def _hashes_of(self, flow: Flow, fingerprint: str, block_tokens: int) -> Sequence[BlockHash]:
        submit = flow.submit
        hashes = self._hashes.get(flow.name)
        if hashes is None:
            hashes = self._hashes[flow.name] = submit.hashes or PromptHashes(submit.salt)
        return hashes.of(flow.tokens, fingerprint, block_tokens)
