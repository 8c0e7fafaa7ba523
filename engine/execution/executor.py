"""Computes steps: the torch side of a worker, driven by plain values."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.core.geometry import KVGeometry
from baton.core.ids import SeqKey
from baton.core.messages import AdapterRef
from baton.core.shape import Shape
from baton.core.steps import ItemResult, StepItem, StepPlan, StepResult
from engine.compiling import CompilerProcess
from engine.execution.ahead import StepsAhead
from engine.execution.draft import DraftModel, with_drafts
from engine.execution.graphs import DecodeGraphs
from engine.execution.load_ranks import (
    adapter_slots,
    check_ranks,
    divisions_of,
    load_draft,
    load_rank,
    mapped_parts,
    on_device,
    own_part,
    set_threads,
)
from engine.execution.mixed_replay import make_mixed_replay
from engine.execution.ranks import Ranks, SharedTokens, StagedModel, UnfinishedSteps, other_token_count
from engine.execution.replay import DecodeReplay, make_recorder
from engine.execution.results import ahead_results, follow, item_results
from engine.execution.self_timing import warm_up_plans
from engine.execution.spread import Spread
from engine.execution.step_batch import BegunStep, StepBatch
from engine.execution.team import Launch, RankTeam, generations_of
from engine.execution.text_logits import text_logits
from engine.experts.access import ExpertAccess
from engine.experts.connecting import connection_to
from engine.experts.following import ExpertConnection
from engine.grammar import GrammarStore
from engine.kernels.interface import Span
from engine.kv.parts import PoolPart
from engine.kv.swap import SwapSpace
from engine.loading.adapters import AdapterWeights
from engine.loading.load import LoadedModel, load_model, with_kv_bytes
from engine.models.decoder import Progress
from engine.models.model import LanguageModel
from engine.parallel.orders import DropAdapter, InstallAdapter
from engine.sampling.choose import Draw, choose_tokens
from engine.sampling.sampler import Sampler


class Executor:
    """A loaded model and its KV pool. `execute` runs on one thread only; between steps the pool's
    blocks belong to whoever holds them (scheduler, leases, transfers).

    In a worker of several ranks, each has one: the leader's drives those of the followers.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        engine: EngineConfig,
        *,
        draft: DraftModel | None = None,
        ranks: Ranks | None = None,
        team: RankTeam | None = None,
        parts: tuple[PoolPart, ...] = (),
        experts: ExpertConnection | None = None,
    ) -> None:
        """ranks: None where there is one. team: the leader's followers. parts: the pools of all ranks, if
        this one leads; empty: this one's is the whole. experts: where they are on ranks of their own."""
        self.experts = experts
        self._ranks, self._team = ranks, team
        self._leads = ranks is None or ranks.is_leader
        self._unfinished = UnfinishedSteps() if ranks is not None and ranks.leads_stages else None
        self._owns_pool = ranks is None or ranks.has_pool
        """Blocks are moved and cleared once, by the rank whose pool they are in."""
        self._finished_s = 0.0  # when the step before was done
        self._shared_tokens = SharedTokens(ranks)
        self.whole_geometry: KVGeometry = loaded.whole_geometry
        self.parts = parts or (own_part(loaded),)
        """The KV pools of this host's ranks, by rank, mapped in this process. Context ranks share one."""
        self.spec = loaded.spec
        self.model_name, self.fingerprint = loaded.name, loaded.fingerprint
        self.notes = (*loaded.notes, *(draft.notes if draft is not None else ()))
        """Lines for `Member.notes`."""
        self.kernels, self.kv = loaded.kernels, loaded.kv
        self.weights_bytes = loaded.weights_bytes
        self.generations = generations_of(loaded.kv, team)
        """The table of whoever gives blocks out."""
        self.geometry: KVGeometry = loaded.kv.geometry
        self.max_model_tokens = loaded.context_tokens
        self.vocab_size: int = loaded.spec.vocab_size
        self.eos_token_ids: tuple[int, ...] = loaded.spec.eos_token_ids
        self._model: LanguageModel | None = loaded.model
        self.expert_counts = loaded.model.expert_counts
        self.swap = SwapSpace(self.kv, engine.swap_bytes if self._owns_pool else 0)
        self.grammars = GrammarStore(
            loaded.folder,
            self.vocab_size,
            self.eos_token_ids,
            process=CompilerProcess(compile_s=engine.compile_s),
        )
        self._sampler = Sampler(
            vocab=self.vocab_size, grammars=self.grammars, eos_token_ids=self.eos_token_ids
        )
        self._draft = draft
        self._last_sampled: dict[SeqKey, int] = {}
        """Tokens that the previous step sampled, by sequence. They take the place of `PENDING_TOKEN`."""
        self.adapters = adapter_slots(loaded, engine)
        self.offloading, self.floor_s = loaded.offloading, loaded.floor_s
        self.recorder = make_recorder(loaded, engine, ranks)
        self.mixed_replay = make_mixed_replay(loaded, engine, self.recorder)
        self._ahead = (
            StepsAhead(loaded.kv.device) if self.is_alone and loaded.kv.device.type == "cuda" else None
        )
        """Steps are begun before the one before is finished, as far as their tokens allow."""
        self.config = engine

    load_count: ClassVar[int] = 0
    """Number of times that this process has read weights."""

    @classmethod
    def load(
        cls,
        model: ModelConfig,
        engine: EngineConfig,
        *,
        progress: Progress | None = None,
        spread: Spread | None = None,
        launch: Launch | None = None,
        access: ExpertAccess | None = None,
    ) -> "Executor":
        """Load a model, with followers if `engine.shape` asks for several ranks: on this host, or where
        `spread` says. `launch`: see `RankTeam.start`. `access`: to expert ranks; None: experts are loaded.
        Raises SetupError, see `load_model`, `RankTeam` and `DraftModel.load`, and GroupBroken for a rank that
        is lost."""
        set_threads(engine)
        Executor.load_count += 1
        engine = with_kv_bytes(model, engine)  # once for all ranks
        shape = Shape.parse(engine.shape)
        with connection_to(access) as experts:
            if not shape.is_single:
                return cls._load_leader(model, engine, shape, progress, spread, launch, experts)
            loaded = load_model(model, engine, routed=experts and experts.routed, progress=progress)
            return cls(loaded, engine, draft=load_draft(model, engine, loaded), experts=experts)

    @classmethod
    def _load_leader(
        cls,
        model: ModelConfig,
        engine: EngineConfig,
        shape: Shape,
        progress: Progress | None,
        spread: Spread | None,
        launch: Launch | None,
        experts: ExpertConnection | None,
    ) -> "Executor":
        check_ranks(model, engine, shape)
        divisions = divisions_of(model, shape)  # a shape that does not fit is said before anything starts
        team = RankTeam.start(shape, model, engine, spread, launch, experts and experts.access)
        model = on_device(model, 0)
        try:
            division = divisions[team.ranks.rank]
            loaded = load_rank(model, engine, team.ranks, division, progress, experts)
            draft = load_draft(model, engine, loaded)
            ready = team.wait_ready()
            addresses = {rank: ready[rank].pool_address for rank in team.local_ranks[1:]}
            parts = mapped_parts(model, engine, divisions, loaded.kv, addresses)
            executor = cls(
                loaded, engine, draft=draft, ranks=team.ranks, team=team, parts=parts, experts=experts
            )
            floors = {rank: report.floor_s for rank, report in ready.items()}
            executor.floor_s = team.ranks.floor_s({**floors, team.ranks.rank: executor.floor_s})
            return executor
        except BaseException:
            team.close()
            raise

    @classmethod
    def load_part(
        cls, model: ModelConfig, engine: EngineConfig, ranks: Ranks, access: ExpertAccess | None = None
    ) -> "Executor":
        """Load a follower's part. Raises SetupError, see `load_model`."""
        set_threads(engine)
        Executor.load_count += 1
        division = divisions_of(model, ranks.shape)[ranks.rank]
        with connection_to(access) as experts:
            loaded = load_rank(model, engine, ranks, division, experts=experts)
            return cls(loaded, engine, ranks=ranks, experts=experts)

    @property
    def has_remote_parts(self) -> bool:
        """Whether some KV is in memory of other ranks that this process does not map."""
        return self._team is not None and self._team.has_remote_parts

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Processes of the followers of this host."""
        return self._team.pids if self._team is not None else ()

    @property
    def on_cpu(self) -> bool:
        return self.kv.device.type == "cpu"

    @property
    def is_alone(self) -> bool:
        """Whether a step takes the time of this device and model, and of nothing else."""
        return self._ranks is None and self._draft is None and self.experts is None and not self.floor_s

    @property
    def stage_count(self) -> int:
        return 1 if self._ranks is None else self._ranks.shape.pipeline

    @property
    def rank_count(self) -> int:
        return 1 if self._ranks is None else self._ranks.shape.rank_count

    def pin(self) -> None:
        """Keep the calling thread on this rank's share of the process's cores, where there are several ranks.
        The threads that it starts stay there too."""
        if self._team is not None:
            self._team.pin()

    def watch_ranks(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` with a reason, from another thread, if the followers end before `close`."""
        if self._team is not None:
            self._team.watch(on_lost)

    def execute(self, plan: StepPlan) -> StepResult:
        """Any mixture of prompt chunks, decodes and decodes with draft tokens, each sequence at most once.
        Returns when the KV is written and the tokens are sampled."""
        step = self.begin(plan)
        return step if isinstance(step, StepResult) else self.finish(step)

    def begin(self, plan: StepPlan) -> StepResult | BegunStep:
        """Execute a plan, or this stage's part of it where there are others. Then `finish` waits for the
        rest, and the next plan may begin on this thread meanwhile. Plans begin in order."""
        assert self._model is not None, "execute after close"
        started_s = time.perf_counter()
        if self._team is not None:
            self._team.send(plan)
        self._move_blocks(plan)
        if self._ahead is not None:
            if self._ahead.takes(plan):
                return self._begin_ahead(self._ahead, plan, started_s)
            self._ahead.catch_up()
        replays = self._replayed_count
        if isinstance(self.recorder, DecodeReplay) and plan.items:
            before, clear = self._sampled_before, self._clear_partial_block
            sampled = self.recorder.sample(plan.items, before, clear, chooses=self._leads)
            if sampled is not None:
                return self.finish(BegunStep(plan, None, None, started_s, 0, tuple(sampled), True))
        others_before = other_token_count(self._model)
        with torch.inference_mode():
            batch, hidden = self._compute(self._model, plan.items) if plan.items else (None, None)
        others = other_token_count(self._model) - others_before
        is_replayed = self._replayed_count > replays
        step = BegunStep(plan, batch, hidden, started_s, others, is_replayed=is_replayed)
        if self._unfinished is not None:
            self._settle()
            self._unfinished.begun()
            return step
        return self.finish(step)

    @property
    def _replayed_count(self) -> int:
        return sum(one.replayed_count for one in (self.recorder, self.mixed_replay) if one is not None)

    def _begin_ahead(self, ahead: StepsAhead, plan: StepPlan, started_s: float) -> BegunStep:
        """Launch a step that needs nothing that the host does not know yet."""
        assert self._model is not None
        self._sampler.end(plan.ended)
        replays = self._replayed_count
        with torch.inference_mode():
            batch, hidden = self._compute(self._model, plan.items, ahead)
            keys = [plan.items[index].key for index, _ in batch.sampling]
            draws = [Draw(request.params, request.index) for _, request in batch.sampling]
            chosen = choose_tokens(self._model.logits(hidden), draws) if draws else None
            begun = ahead.begun(keys, chosen)
        is_replayed = self._replayed_count > replays
        return BegunStep(plan, batch, None, started_s, 0, is_replayed=is_replayed, ahead=begun)

    def finish(self, step: BegunStep) -> StepResult:
        """Wait for device or other stages, and sample what is not sampled yet. One thread finishes all
        steps, in the order of `begin`."""
        assert self._model is not None, "finish after close"
        try:
            with torch.inference_mode():
                results = self._finish(self._model, step)
            if self._unfinished is None:  # else other threads compute the next step by now
                self._settle()
            if self._draft is not None:
                results = with_drafts(self._draft, step.plan, results)
            now_s = time.perf_counter()
            overlap_s = max(0.0, self._finished_s - step.started_s)
            elapsed_s, self._finished_s = now_s - step.started_s, now_s
        finally:
            if self._unfinished is not None:
                self._unfinished.finished()
            if self._ahead is not None and step.ahead is not None:
                self._ahead.finished()
        if step.ahead is not None:  # one device computes one step at a time: before, it computed another
            elapsed_s, overlap_s = elapsed_s - overlap_s, 0.0
        others = step.context_rank_tokens
        return StepResult(step.plan.step_number, results, elapsed_s, overlap_s, others, step.is_replayed)

    def _finish(self, model: LanguageModel, step: BegunStep) -> tuple[ItemResult, ...]:
        """Results of the step's items. A follower returns nothing: the leader has the results."""
        batch, items, ranks = step.batch, step.plan.items, self._ranks
        if step.ahead is not None and batch is not None:
            results, self._last_sampled = ahead_results(items, batch, step.ahead)
            return results
        if step.sampled is not None:
            if not self._leads:
                self._shared_tokens.expect([item.key for item in items])
                return ()
            self._sampler.end(step.plan.ended)
            if ranks is not None:
                ranks.share(step.sampled)
            self._last_sampled = {item.key: one for item, one in zip(items, step.sampled, strict=True)}
            return tuple([ItemResult((token,)) for token in step.sampled])
        if batch is None:
            if ranks is not None:
                if self.kv.device.type == "cuda":
                    torch.cuda.synchronize(self.kv.device)
                ranks.wait_for_all()  # the blocks that were moved are in their places on every rank
            self._sampler.end(step.plan.ended)
            self._last_sampled = {}
            return ()
        assert step.hidden is not None
        if not self._leads:
            follow(model.logits, batch, step.hidden, self.vocab_size)
            self._shared_tokens.expect([items[index].key for index, _ in batch.sampling])
            return ()
        self._sampler.end(step.plan.ended)
        hidden = step.hidden
        if self._unfinished is not None:
            assert isinstance(model, StagedModel)
            hidden = model.rows(len(batch.rows))
        results = item_results(self._sampler, model.logits, len(items), batch, hidden, self.vocab_size)
        last = {index: results[index].tokens[-1] for index, _ in batch.sampling if results[index].tokens}
        if ranks is not None:
            ranks.share([last.get(index) for index, _ in batch.sampling])
        self._last_sampled = {items[index].key: token for index, token in last.items()}
        return results

    def _settle(self) -> None:
        """Return when this rank's part of a step has ended on its device. Its results count only then."""
        if self._ranks is not None:
            self._ranks.settle()

    def _move_blocks(self, plan: StepPlan) -> None:
        if not self._owns_pool:
            return
        if plan.swap_out:
            self.swap.out(plan.swap_out)
        if plan.swap_in:
            self.swap.back(plan.swap_in)
        if plan.copies:
            self.kernels.copy_blocks(plan.copies)

    def _compute(
        self, model: LanguageModel, items: tuple[StepItem, ...], ahead: StepsAhead | None = None
    ) -> tuple[StepBatch, Tensor]:
        """The items as a batch, and the hidden states of its rows. They are of no use where another stage has
        them."""
        if self._owns_pool:
            for item in items:
                self._clear_partial_block(item)
        batch = StepBatch.of(items, [self._span(item) for item in items], self._sampled_before)
        device = self.kv.device
        if ahead is not None:
            tokens, rows = ahead.inputs(batch, items)
        else:
            tokens = torch.tensor(batch.tokens, dtype=torch.int64)
            rows = torch.tensor(batch.rows, dtype=torch.int64, device=device)
        # The last layer of a recording computes, and counts, the rows of all sequences.
        wants_all = self.recorder is not None and len(set(batch.rows)) == len(batch.layout.spans)
        replayed = self.recorder.run(tokens, batch.layout) if self.recorder and wants_all else None
        hidden = None if replayed is None else replayed[rows]
        if hidden is None and self.mixed_replay is not None:
            hidden = self.mixed_replay.run(batch.tokens, batch.layout, batch.rows)
        if hidden is None:
            hidden = model.forward(tokens.to(device), batch.layout, rows)
        if ahead is None and not batch.rows and device.type == "cuda":
            torch.cuda.synchronize(device)
        return batch, hidden

    def _sampled_before(self, key: SeqKey) -> int:
        """The token that stands behind `PENDING_TOKEN`, or any where only the device knows it."""
        if self._ahead is not None and self._ahead.has(key):
            return 0
        if not self._leads:
            return self._shared_tokens.last(key)
        if self._unfinished is not None:
            self._unfinished.wait()
        return self._last_sampled[key]

    def _span(self, item: StepItem) -> Span:
        end = item.first_position + len(item.tokens)
        needed = self.geometry.blocks_for(end)
        assert item.tokens, item.key
        assert len(item.block_ids) >= needed, item.key
        slot = self.adapters.slot(item.adapter)
        return Span(item.first_position, len(item.tokens), item.block_ids[:needed], slot)

    def _clear_partial_block(self, item: StepItem) -> None:
        """See `KVPool.clear`. Only when this step is the first to write to it."""
        end = item.first_position + len(item.tokens)
        last, filled = divmod(end, self.geometry.block_tokens)
        if filled and last * self.geometry.block_tokens >= item.first_position:
            self.kv.clear(item.block_ids[last])

    def logits_of(self, tokens: Sequence[int], *, chunk_tokens: int) -> Iterator[Tensor]:
        """See `text_logits`. Nothing else may be using the KV pool."""
        assert self._model is not None, "logits_of after close"
        return text_logits(self._model, self.kv, tokens, chunk_tokens=chunk_tokens)

    def warm_up(self) -> None:
        """Compute a prompt chunk and a batch of decodes, so that the first request does not pay for reading
        weights and first-time set-up. Call before any block holds anything."""
        # Steps are recorded while nothing else uses the device, the largest first: it sizes their memory.
        sizes = self.recorder.sizes[::-1] if isinstance(self.recorder, DecodeGraphs) else ()
        for plan in warm_up_plans(
            self.config, self.max_model_tokens, self.kv.block_count, on_cpu=self.on_cpu, sizes=sizes
        ):
            self.execute(plan)
        self.forget_expert_counts()

    def forget_expert_counts(self) -> None:
        """Leave the steps before the first request out of the counts of experts."""
        if self.expert_counts is not None:
            self.expert_counts.reset()

    # --- adapters -----------------------------------------------------------------------------------

    def read_adapter(self, ref: AdapterRef) -> AdapterWeights:
        """Read an adapter on every rank, into what `install_adapter` takes. It takes a while; one at a time,
        in any thread. Raises SetupError, see `AdapterSlots.read`, and GroupBroken."""
        if self._team is None:
            return self.adapters.read(ref)
        read: list[AdapterWeights] = []
        try:
            failed = self._team.read_adapter(ref, lambda: read.append(self.adapters.read(ref)))
            if failed is not None:
                raise SetupError(f"adapter {ref.name} cannot be read by rank {failed.rank}: {failed.reason}")
        except SetupError:
            self._team.send(DropAdapter(ref.key))
            raise
        return read[0]

    def install_adapter(self, adapter: AdapterWeights) -> None:
        """See `AdapterSlots.install`."""
        if self._team is not None:
            self._team.send(InstallAdapter(adapter.key))
        self.adapters.install(adapter)

    def drop_adapter(self, key: str) -> None:
        """See `AdapterSlots.drop`."""
        if self._team is not None:
            self._team.send(DropAdapter(key))
        self.adapters.drop(key)

    def close(self) -> None:
        """Drop weights and end the followers. The pools' memory lives as long as somebody refers to it.
        Idempotent."""
        self._model = self._draft = None
        if self._ahead is not None:
            self._ahead.close()
        if self._unfinished is not None:
            self._unfinished.close()
        if self._team is not None:
            self._team.close()
        if self.offloading is not None:
            self.offloading.close()
        if self.experts is not None:
            self.experts.close()
