"""Published throughput of DeepSeek-V3 on H100 nodes, and what data sheets predict for the same layouts.

The figures are those of "Deploying DeepSeek with PD Disaggregation and Large-scale Expert Parallelism on 96
H100 GPUs" (the SGLang team, May 2025) and, as cited there, of DeepSeek's published profile.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec

from baton.config import EngineConfig
from baton.config.router import RouterConfig
from baton.core.costs import StepCosts
from baton.core.messages import Role
from simulator.experts.layout import NODE_GPUS, ExpertLayout
from simulator.experts.pool import ExpertPool
from simulator.experts.popularity import ExpertPopularity
from simulator.experts.stages import ExpertStepWork
from simulator.fleet.fleet import Fleet
from simulator.fleet.setup import PoolSizes, expert_machine, fleet_spec
from simulator.fleet.workload import FleetRequest
from simulator.hardware import find_gpu
from simulator.models import find_model

SLOTS_PREFILL, SLOTS_DECODE = 9, 4
"""288 slots over 32 and over 72 ranks."""
DRAFTS_KEPT = 0.6
"""Part of the drafts that are accepted where every step computes one beside each token."""
PREFILL_TOKENS, STEPS_EACH = 16_384, 20
ANSWER_TOKENS = 100
BLOCK_TOKENS = 64
MANY = 100_000
NO_TIME = StepCosts(1e-6, 1e-12, 1e-12, 0.0)


@dataclass(frozen=True, slots=True)
class PublishedCase:
    name: str
    role: Role
    nodes: int
    slots: int
    length: int
    """Tokens of a prompt; of a decoding sequence's context."""
    sequences: int
    """Prompts, or decoding sequences, of one GPU in a step."""
    per_node: float
    """Published tokens per second and node."""
    is_even: bool = False
    """Tokens use all experts alike."""
    overlaps: bool = True
    drafts: int = 0
    """Draft tokens that every decode step computes for each sequence."""
    is_main: bool = False

    @property
    def gpus(self) -> int:
        return self.nodes * NODE_GPUS


def _prefill(length: int, per_node: float, name: str, **more: bool) -> PublishedCase:
    sequences = PREFILL_TOKENS // length
    return PublishedCase(name, Role.PREFILL, 4, SLOTS_PREFILL, length, sequences, per_node, **more)


CASES = (
    _prefill(2000, 52_300, "prefill, 2,000 tokens", is_main=True),
    PublishedCase(
        "decode, batch 256", Role.DECODE, 9, SLOTS_DECODE, 2000, 256, 22_282, is_main=True
    ),
    _prefill(1024, 57_674, "prefill, 1K tokens"),
    _prefill(2048, 54_543, "prefill, 2K tokens"),
    _prefill(4096, 50_302, "prefill, 4K tokens"),
    _prefill(4096, 59_337, "prefill, 4K tokens, even use", is_even=True),
    _prefill(4096, 62_713, "prefill, 4K tokens, DeepSeek's profile", is_even=True),
    PublishedCase(
        "decode, batch 256, no overlap",
        *(Role.DECODE, 9, SLOTS_DECODE, 2000, 256, 22_310 / 1.255),
        overlaps=False,
    ),
    PublishedCase("decode, batch 128, drafts", Role.DECODE, 9, SLOTS_DECODE, 4000, 128, 17_373, drafts=1),
    PublishedCase(
        "decode, batch 128, drafts, DeepSeek's profile",
        *(Role.DECODE, 16, 3, 4096, 128, 18_598),
        is_even=True,
        drafts=1,
    ),
)  # fmt: skip


class PublishedRow(msgspec.Struct, frozen=True):
    """One case. Rates are in tokens per second and node."""

    name: str
    gpus: int
    published: float
    predicted: float
    """Rate of one step after the other, by data sheets."""
    simulated: float | None
    """Rate of the whole cluster in the fleet simulator; None where it was not run."""
    step_ms: float
    attention_ms: float
    """Parts of a layer, for the half of a batch that is computed at once."""
    experts_ms: float
    dispatch_ms: float
    combine_ms: float
    uneven: float
    """The busiest rank's load over the mean."""

    @property
    def difference(self) -> float:
        found = self.predicted if self.simulated is None else self.simulated
        return found / self.published - 1


def pool_of(case: PublishedCase, load: str) -> ExpertPool:
    model = find_model("deepseek-v3")
    layout = ExpertLayout(
        case.gpus,
        case.gpus,
        case.slots,
        once_per_node=case.role is Role.PREFILL,
        overlaps=case.overlaps,
    )
    popularity = ExpertPopularity.parse("uniform" if case.is_even else load, model)
    return ExpertPool(model, find_gpu("h100"), layout, popularity)


def work_of(case: PublishedCase) -> ExpertStepWork:
    if case.role is Role.PREFILL:
        tokens = case.sequences * case.length
        return ExpertStepWork(prompt_tokens=tokens, pairs=tokens * case.length / 2)
    each = 1 + case.drafts
    context = case.length + ANSWER_TOKENS / 2
    return ExpertStepWork(decodes=case.sequences * each, context_tokens=case.sequences * each * context)


def predict(case: PublishedCase, load: str, *, with_fleet: bool) -> PublishedRow:
    pool, work = pool_of(case, load), work_of(case)
    step_s = pool.step_s(work)
    made = work.prompt_tokens or case.sequences * (1 + DRAFTS_KEPT * case.drafts)
    halves = 2 if case.overlaps else 1
    parts = pool.parts(work, halves=halves)
    return PublishedRow(
        case.name,
        case.gpus,
        case.per_node,
        NODE_GPUS * made / step_s,
        simulate_rate(case, pool) if with_fleet and not case.drafts else None,
        1e3 * step_s,
        1e3 * (parts.attention_s + parts.shared_s),
        1e3 * parts.experts_s,
        1e3 * parts.dispatch_s,
        1e3 * parts.combine_s,
        pool.unevenness(work.tokens / halves).rank,
    )


def simulate_rate(case: PublishedCase, pool: ExpertPool) -> float:
    """Run a whole cluster with the production router, as full as the case says, and return its rate. The
    pool of the other role takes no time, as in the published measurement."""
    engine = EngineConfig(
        block_tokens=BLOCK_TOKENS,
        step_tokens_max=PREFILL_TOKENS,
        batch_sequences_max=256,
        waiting_sequences_max=8192,
    )
    machine = expert_machine(pool, engine=engine, kv_bytes=None)
    is_prefill = case.role is Role.PREFILL
    sizes = PoolSizes(case.gpus, NODE_GPUS) if is_prefill else PoolSizes(case.gpus, case.gpus)
    spec = fleet_spec(
        machine.with_link(1e15),
        sizes,
        block_tokens=BLOCK_TOKENS,
        router=RouterConfig(
            any_role=False, request_timeout_s=3600, queue_requests_max=MANY, queue_wait_s=3600
        ),
        engine=engine,
        slo_classes={},
        heartbeat_s=1.0,
    )
    kinds = tuple(
        (kind if kind.role is case.role else replace(kind, costs=NO_TIME), count)
        for kind, count in spec.workers
    )
    fleet = Fleet(replace(spec, workers=kinds))
    count = case.gpus * case.sequences * (STEPS_EACH if is_prefill else 1)
    fleet.run(_at_once(case, count, 1 if is_prefill else ANSWER_TOKENS))
    assert fleet.met == count
    made = count * (case.length if is_prefill else ANSWER_TOKENS - 1)
    return made / fleet.clock.now_s / case.nodes


def _at_once(case: PublishedCase, count: int, answer: int) -> Iterator[FleetRequest]:
    for number in range(count):
        yield FleetRequest(number, 0.0, case.length, answer, ())


def compare(load: str, *, with_fleet: bool, progress: Callable[[str], None]) -> list[PublishedRow]:
    rows: list[PublishedRow] = []
    for case in CASES:
        progress(case.name)
        rows.append(predict(case, load, with_fleet=with_fleet and case.is_main))
    return rows
