"""The cluster, the load and the faults of one seed, all drawn from the seed."""

import random
from dataclasses import dataclass, replace

from baton.config import EngineConfig, StoreConfig, TransferConfig
from baton.config.router import RouterConfig, SloConfig
from baton.core.geometry import KVGeometry
from baton.core.messages import Role
from baton.core.policies import (
    DEFAULT_EVICTION,
    DEFAULT_PLACEMENT,
    EVICTION_POLICIES,
    PLACEMENT_POLICIES,
)
from router.tenants.keys import Tenant
from simulator.faults.tenancy import draw_slo, draw_tenants

POLICIES = (DEFAULT_PLACEMENT, DEFAULT_PLACEMENT, *PLACEMENT_POLICIES)
"""The default policy comes three times as often as each other."""
EVICTIONS = (DEFAULT_EVICTION, *EVICTION_POLICIES)

MODEL_NAME = "sim"
PAGE_BYTES = 4096
"""Bytes of a slot of the store; a simulated block is smaller."""
GEOMETRY = KVGeometry(layer_count=1, kv_head_count=1, head_dim=8, block_tokens=4, dtype="float32")

FAULTS = (
    "worker_crash",
    "worker_freeze",
    "worker_suspend",
    "host_crash",
    "session_break",
    "partition",
    "peer_stall",
    "repeats",
    "slow_network",
    "slow_worker",
    "sick_worker",
    "straggler",
    "read_fail",
    "read_hang",
    "read_late",
    "small_pool",
    "router_crash",
    "router_freeze",
    "reports_lost",
    "drain",
    "role_switch",
    "control_outage",
    "upgrade",
    "store_crash",
    "store_freeze",
    "store_hang_up",
    "store_clear",
    "disk_full",
    "disk_slow",
    "disk_error",
    "disk_flip",
    "memory_flip",
    "directory_outage",
    "directory_flush",
)
"""Every fault class. A seed enables each with `Scenario.fault_chance`."""

STORE_FAULTS = ("store_", "disk_", "memory_", "directory_")
"""Beginnings of the names of the store's own faults."""

ARRIVALS_S = 4.0
"""Requests arrive, and faults strike, in this span."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One small cluster, its load and its faults. Seconds are virtual."""

    roles: tuple[Role, ...]
    router_count: int
    request_count: int
    tenants: dict[str, Tenant]
    slo: SloConfig
    adapter_count: int
    hasty_s: float
    """Deadline of the service that hasty clients use."""
    prefix_count: int
    faults: frozenset[str]
    block_tokens: int
    block_count: int
    max_model_tokens: int
    engine: EngineConfig
    transfer: TransferConfig
    router: RouterConfig
    """Requests of patient clients have its deadline."""
    store: StoreConfig
    host_count: int
    """Count of machines; workers are spread over them."""
    presses_store: bool
    """The seed is shaped so that the store is used, and fails, much."""
    step_base_s: float
    step_token_s: float
    network_latency_s: float
    read_latency_s: float
    read_block_s: float
    shape: str = ""
    """What the seed presses on, where checkers need to know it."""
    swap_block_s: float = 0.0001
    copy_block_s: float = 0.0002
    """Time of one copy between a pool and the store's arena."""
    store_lease_s: float = 0.9
    """Lease of a store node's entries in the directory."""
    router_grace_s: float = 0.6
    heartbeat_s: float = 0.15
    member_lease_s: float = 1.2
    connect_timeout_s: float = 0.8
    restart_s: float = 0.4
    prefix_chance: float = 0.7
    """Chance that a prompt begins as others do."""
    choices_chance: float = 0.1
    """Chance that a request wants several choices."""
    beam_chance: float = 0.02
    class_chance: float = 0.5
    """Chance that a request names a service class, if one is drawn for it."""
    leave_chance: float = 0.15
    """Chance that a client leaves early."""
    strikes_max: int = 4
    """Most times that one fault class strikes."""
    read_fault_chance: float = 0.0
    """Chance per read and enabled kind of read fault; 0 means that it is drawn."""
    drain_timeout_s: float = 2.0
    arrivals_s: float = ARRIVALS_S
    ends_within_s: float = 12.0
    """Every request ends this long after faults stopped (invariant 6)."""
    lingers_s: float = 4.5
    """Time for which something may be held although nobody waits for it: two leases and a little."""
    settles_within_s: float = 7.0
    """Everything is idle this long after the last request ended (invariants 3 and 8)."""

    @property
    def store_slot_count(self) -> int:
        """Slots of one node's arena; 0 means no store."""
        return self.store.host_bytes // PAGE_BYTES

    @property
    def context_max(self) -> int:
        """Most tokens of one sequence: the model's limit, or all that fits a worker's pool."""
        return min(self.max_model_tokens, self.block_count * self.block_tokens)


def draw_scenario(rng: random.Random) -> Scenario:
    """Draw a scenario. Most seeds mix everything; the others press hard where mixed ones seldom do."""
    faults = _draw_faults(rng)
    block_tokens = 4
    max_model_tokens = 80
    roomy = max_model_tokens // block_tokens
    block_count = rng.randint(roomy - 4, roomy + 16) if "small_pool" in faults else rng.randint(120, 240)
    scenario = Scenario(
        roles=_draw_roles(rng),
        router_count=rng.choice((1, 1, 2)),
        request_count=rng.randint(10, 50),
        tenants=draw_tenants(rng),
        slo=draw_slo(rng),
        adapter_count=rng.choice((0, 0, 1, 3)),
        hasty_s=rng.choice((0.1, 0.5, 1.5)),
        prefix_count=rng.randint(1, 4),
        faults=faults,
        block_tokens=block_tokens,
        block_count=block_count,
        max_model_tokens=max_model_tokens,
        engine=_draw_engine(rng, block_tokens),
        transfer=_draw_transfer(rng),
        router=_draw_router(rng),
        store=_draw_store(rng),
        host_count=rng.choice((1, 1, 2, 2, 3)),
        presses_store=False,
        step_base_s=rng.choice((0.004, 0.012, 0.03)),
        step_token_s=rng.choice((0.00005, 0.0005)),
        network_latency_s=rng.choice((0.0005, 0.002, 0.01)),
        read_latency_s=rng.choice((0.0002, 0.002, 0.01)),
        read_block_s=rng.choice((0.0005, 0.004, 0.02)),
        router_grace_s=rng.choice((0.1, 0.6)),
    )
    if not faults:
        return _calm(scenario)
    shapes = (*STRESS_SHAPES, _forgetful, _forgetful, _forgetful, _distant, _distant)
    shape = rng.choice((*(None,) * 6, *shapes))
    return scenario if shape is None else shape(scenario)


def _draw_faults(rng: random.Random) -> frozenset[str]:
    chance = rng.choice((0.0, 0.15, 0.15, 0.35, 0.35, 0.6))
    chances = dict.fromkeys(FAULTS, chance)
    if chance:
        chances["small_pool"] = 0.5  # blocks that are soon reused make every other fault worse
    return frozenset(name for name in FAULTS if rng.random() < chances[name])


def _lease_storm(scenario: Scenario) -> Scenario:
    """Let reads fail, and be tried again for longer than a lease that cannot be renewed. There are many
    reads, since every request is split."""
    return replace(
        scenario,
        faults=frozenset({"peer_stall", "read_fail", "read_hang", "read_late", "small_pool"}),
        request_count=50,
        block_count=21,
        prefix_chance=0.2,
        leave_chance=0.3,
        read_block_s=0.01,
        read_fault_chance=0.3,
        strikes_max=8,
        transfer=scenario.transfer.model_copy(update={"lease_s": 0.6, "read_attempts_max": 10}),
        router=scenario.router.model_copy(update={"policy": "least_loaded", "any_role": False}),
    )


def _crowd(scenario: Scenario) -> Scenario:
    """Let everybody wait for blocks, and many lose patience."""
    return replace(
        scenario,
        roles=(Role.PREFILL,) * 3 + (Role.DECODE,),
        router_count=2,
        engine=scenario.engine.model_copy(update={"waiting_sequences_max": 2}),
        router=scenario.router.model_copy(update={"disaggregate": True, "queue_requests_max": 64}),
        faults=frozenset({"small_pool", "repeats"}),
        block_count=24,
        ends_within_s=30.0,
        request_count=60,
        leave_chance=0.5,
        step_base_s=0.03,
        read_block_s=0.02,
    )


def _rush(scenario: Scenario) -> Scenario:
    """Give few seats to a long queue of prompts, short and long, to see whose turn it is."""
    return replace(
        scenario,
        roles=(Role.AGGREGATED,),
        faults=frozenset({"repeats"}),
        request_count=70,
        block_count=60,
        prefix_chance=0.1,
        leave_chance=0.05,
        ends_within_s=30.0,
        step_base_s=0.02,
        engine=scenario.engine.model_copy(
            update={"batch_sequences_max": 3, "waiting_sequences_max": 64, "step_tokens_max": 16}
        ),
        router=scenario.router.model_copy(update={"queue_requests_max": 64}),
    )


def _burst(scenario: Scenario) -> Scenario:
    """Let many requests of two tenants come in one moment, all alike but for their priorities."""
    weights = (1.0, len(scenario.tenants) + 0.0)
    return replace(
        scenario,
        shape="burst",
        roles=(Role.AGGREGATED,),
        faults=frozenset({"repeats"}),
        tenants={f"t{i}": Tenant(weight=weight) for i, weight in enumerate(weights)},
        adapter_count=0,
        router_count=1,
        request_count=80,
        block_count=60,
        prefix_chance=0.0,
        choices_chance=0.0,
        beam_chance=0.0,
        class_chance=0.0,
        leave_chance=0.0,
        arrivals_s=0.6,
        ends_within_s=30.0,
        step_base_s=0.02,
        engine=scenario.engine.model_copy(update={"waiting_sequences_max": 64}),
        router=scenario.router.model_copy(
            update={"queue_requests_max": 256, "queue_tenant_max": 0, "queue_wait_s": 30.0}
        ),
    )


def _flood(scenario: Scenario) -> Scenario:
    """Let short prompts without end pass long ones that are less urgent."""
    return replace(
        scenario,
        shape="flood",
        roles=(Role.AGGREGATED,),
        faults=frozenset({"repeats"}),
        tenants={"t0": Tenant()},
        adapter_count=0,
        router_count=1,
        request_count=40,
        block_count=40,
        prefix_chance=0.0,
        choices_chance=0.0,
        beam_chance=0.0,
        class_chance=0.0,
        leave_chance=0.0,
        arrivals_s=1.2,
        ends_within_s=30.0,
        step_base_s=0.02,
        engine=scenario.engine.model_copy(update={"batch_sequences_max": 4, "waiting_sequences_max": 64}),
        router=scenario.router.model_copy(
            update={"queue_requests_max": 512, "queue_tenant_max": 0, "queue_wait_s": 30.0}
        ),
    )


def _forgetful(scenario: Scenario) -> Scenario:
    """Make pools too small for prompts that come again and again, and computing dear, and add the store's own
    faults."""
    faults = {fault for fault in scenario.faults if fault.startswith(STORE_FAULTS)}
    slot_count = scenario.store_slot_count or 60
    ssd = {"ssd_dir": "ssd", "ssd_bytes": 200 * 2 * PAGE_BYTES}
    return replace(
        scenario,
        faults=frozenset({*faults, "small_pool", "store_crash", "worker_crash", "memory_flip", "disk_flip"}),
        strikes_max=12,
        block_count=24,
        ends_within_s=30.0,
        request_count=60,
        prefix_chance=1.0,
        prefix_count=8,
        choices_chance=0.0,
        beam_chance=0.0,
        leave_chance=0.1,
        step_base_s=0.004,
        step_token_s=0.002,
        network_latency_s=0.0005,
        read_block_s=0.0005,
        host_count=max(2, scenario.host_count),
        presses_store=True,
        copy_block_s=0.003,
        store=scenario.store.model_copy(update={"host_bytes": slot_count * PAGE_BYTES, **ssd}),
    )


def _distant(scenario: Scenario) -> Scenario:
    """Let workers on two machines load each other's blocks, over a network that loses reads, into little host
    memory of which little may be pinned."""
    forgetful = _forgetful(scenario)
    return replace(
        forgetful,
        roles=(Role.AGGREGATED,) * 4,
        faults=frozenset({"small_pool", "read_fail", "read_hang", "read_late", "store_clear"}),
        read_fault_chance=0.3,
        leave_chance=0.02,
        host_count=2,
        store=forgetful.store.model_copy(
            update={
                "host_bytes": 24 * PAGE_BYTES,
                "pinned_share_max": 0.3,
                "ttl_s": 0.0,
                "lookup_timeout_s": 0.1,
                "ssd_dir": "",
                "ssd_bytes": 0,
            }
        ),
    )


def _sick(scenario: Scenario) -> Scenario:
    """Let workers fail all they get, or be very slow, for a while, beside others that are well."""
    return replace(
        scenario,
        roles=(Role.PREFILL,) * 3 + (Role.DECODE,) * 3,
        router_count=1,
        faults=frozenset({"sick_worker", "straggler", "drain"}),
        strikes_max=6,
        request_count=90,
        leave_chance=0.05,
        step_base_s=0.012,
        network_latency_s=0.0005,
        block_count=200,
        router=scenario.router.model_copy(
            update={
                "disaggregate": True,
                "queue_requests_max": 64,
                "attempts_max": 8,
                "breaker_failures": 3,
                "hedge_share": 0.5,
                "hedge_after_s": 0.08,
                "hedge_quantile": 0.75,
            }
        ),
        engine=scenario.engine.model_copy(update={"waiting_sequences_max": 64, "batch_sequences_max": 32}),
    )


def _overload(scenario: Scenario) -> Scenario:
    """Let more requests come than one worker can serve, for seconds, so that many are told when to come
    again."""
    return replace(
        scenario,
        shape="overload",
        roles=(Role.AGGREGATED,),
        faults=frozenset({"repeats"}),
        tenants={"t0": Tenant()},
        adapter_count=0,
        router_count=1,
        request_count=110,
        block_count=60,
        prefix_chance=0.0,
        choices_chance=0.0,
        beam_chance=0.0,
        class_chance=0.0,
        leave_chance=0.0,
        ends_within_s=30.0,
        step_base_s=0.03,
        engine=scenario.engine.model_copy(update={"batch_sequences_max": 4, "waiting_sequences_max": 4}),
        router=scenario.router.model_copy(
            update={
                "queue_requests_max": 16,
                "queue_tenant_max": 0,
                "queue_wait_s": 8.0,
                "reject_below": 0.0,
            }
        ),
    )


def _orphans(scenario: Scenario) -> Scenario:
    """Let routers die while long generations run."""
    return replace(
        scenario,
        faults=frozenset({"router_crash", "worker_crash", "control_outage", "upgrade"}),
        step_base_s=0.06,
        router_grace_s=0.1,
    )


def _calm(scenario: Scenario) -> Scenario:
    """Make nothing so slow that it looks like a fault, because without faults nothing may fail."""
    return replace(
        scenario,
        network_latency_s=0.0005,
        read_block_s=0.0005,
        transfer=scenario.transfer.model_copy(update={"read_timeout_s": 0.4, "lease_s": 2.0}),
        router=scenario.router.model_copy(update={"attempts_max": 8}),
        engine=scenario.engine.model_copy(update={"waiting_sequences_max": 64}),
    )


def _draw_roles(rng: random.Random) -> tuple[Role, ...]:
    prefill, decode, aggregated = Role.PREFILL, Role.DECODE, Role.AGGREGATED
    return rng.choice(
        (
            (prefill, prefill, decode, decode),
            (prefill, prefill, decode, decode),
            (prefill, prefill, decode, decode),
            (prefill, decode),
            (prefill, decode, decode),
            (prefill, decode, aggregated),
            (aggregated, aggregated),
        )
    )


def _draw_engine(rng: random.Random, block_tokens: int) -> EngineConfig:
    return EngineConfig(
        block_tokens=block_tokens,
        step_tokens_max=rng.choice((8, 16, 64)),
        batch_sequences_max=rng.choice((4, 8, 32)),
        waiting_sequences_max=rng.choice((4, 64, 64)),
        overlap_steps=rng.random() < 0.75,
        tpot_slo_s=rng.choice((0.0, 0.02)),
        chunk_tokens_min=rng.choice((1, 8)),
        swap_bytes=rng.choice((0, 8, 64)) * GEOMETRY.block_bytes,
        prepare_s=2.0,
        speculation=rng.choice(("off", "ngram", "ngram")),
        speculation_tokens_max=rng.choice((2, 6)),
    )


def _draw_transfer(rng: random.Random) -> TransferConfig:
    return TransferConfig(
        lease_s=rng.choice((0.6, 1.0, 2.0)),
        lease_slack_s=0.1,
        read_timeout_s=rng.choice((0.15, 0.4)),
        read_attempts_max=rng.choice((1, 2, 3, 10)),
        reads_in_flight_max=rng.choice((1, 2, 8)),
        receive_wait_s=rng.choice((0.3, 1.5)),
        bytes_in_flight_max=rng.choice((2, 8, 1000)) * GEOMETRY.block_bytes,
    )


def _draw_store(rng: random.Random) -> StoreConfig:
    """Draw the store: some seeds have none, some have no SSD, most have too little of both."""
    slot_count = rng.choice((0, 8, 16, 40, 40, 120))
    ssd_count = rng.choice((0, 20, 60, 200))
    return StoreConfig(
        host_bytes=slot_count * PAGE_BYTES,
        ssd_dir="ssd" if ssd_count else "",
        ssd_bytes=ssd_count * 2 * PAGE_BYTES,
        ssd_threads=rng.choice((1, 4)),
        policy=rng.choice(EVICTIONS),
        ttl_s=rng.choice((0.0, 0.0, 1.5)),
        tenant_share_max=rng.choice((1.0, 1.0, 0.6)),
        pinned_share_max=rng.choice((0.3, 0.5, 0.9)),
        load_timeout_s=rng.choice((0.1, 0.5)),
        lookup_timeout_s=0.03,
        lease_s=rng.choice((0.4, 1.0)),
        replicate_bytes_s=rng.choice((0, 20 * PAGE_BYTES, 2**30)),
        checksums=rng.choice((True, True, False)),
    )


def _draw_router(rng: random.Random) -> RouterConfig:
    return RouterConfig(
        policy=rng.choice(POLICIES),
        disaggregate=rng.random() < 0.9,
        fallback_to_other_pool=rng.random() < 0.8,
        queue_requests_max=rng.choice((4, 64, 64)),
        queue_wait_s=rng.choice((1.0, 8.0)),
        attempts_max=rng.choice((2, 8, 8)),
        worker_silence_s=0.8,
        request_timeout_s=60.0,
        queue_tenant_max=rng.choice((0, 0, 6)),
        reject_below=rng.choice((0.0, 0.1, 0.4)),
        hold_above_s=rng.choice((0.0, 0.25)),
        retry_share=rng.choice((0.0, 0.2, 0.2)),
        retry_floor=rng.choice((2, 1000, 1000)),
        breaker_failures=rng.choice((0, 2, 5)),
        breaker_open_s=rng.choice((0.2, 1.0)),
        breaker_open_max_s=2.0,
        hedge_share=rng.choice((0.0, 0.1, 0.5)),
        hedge_after_s=rng.choice((0.05, 0.3)),
        hedge_quantile=rng.choice((0.75, 0.99)),
        migrate_after_s=rng.choice((0.0, 0.3, 20.0)),
        any_role=rng.random() < 0.4,
    )


STRESS_SHAPES = (
    _lease_storm,
    _lease_storm,
    _crowd,
    _orphans,
    _crowd,
    _rush,
    _sick,
    _sick,
    _burst,
    _flood,
    _overload,
)
"""Shapes that press on one thing; those of the store are beside them."""
