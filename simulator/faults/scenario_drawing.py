"""Scenarios drawn from a seed."""

import random

from baton.config import EngineConfig, StoreConfig, TransferConfig
from baton.config.router import RouterConfig
from baton.core.messages import Role
from baton.core.policies import (
    DEFAULT_EVICTION,
    DEFAULT_PLACEMENT,
    EVICTION_POLICIES,
    PLACEMENT_POLICIES,
)
from simulator.faults.scenario import FAULTS, GEOMETRY, PAGE_BYTES, Scenario
from simulator.faults.shapes import SHAPES, calm
from simulator.faults.tenancy import draw_slo, draw_tenants

POLICIES = (DEFAULT_PLACEMENT, DEFAULT_PLACEMENT, *PLACEMENT_POLICIES)
"""The default policy comes three times as often as each other."""
EVICTIONS = (DEFAULT_EVICTION, *EVICTION_POLICIES)


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
        return calm(scenario)
    shape = rng.choice((*(None,) * 6, *SHAPES))
    return scenario if shape is None else shape(scenario)


def _draw_faults(rng: random.Random) -> frozenset[str]:
    chance = rng.choice((0.0, 0.15, 0.15, 0.35, 0.35, 0.6))
    chances = dict.fromkeys(FAULTS, chance)
    if chance:
        chances["small_pool"] = 0.5  # blocks that are soon reused make every other fault worse
    return frozenset(name for name in FAULTS if rng.random() < chances[name])


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
