"""Shapes of scenarios: each presses hard on one thing that mixed ones seldom reach."""

from dataclasses import replace

from baton.core.messages import Role
from router.tenants.keys import Tenant
from simulator.faults.scenario import PAGE_BYTES, STORE_FAULTS, Scenario


def lease_storm(scenario: Scenario) -> Scenario:
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
        ends_within_s=60.0,
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
        ends_within_s=60.0,
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
        ends_within_s=60.0,
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
        faults=frozenset({"sick_worker", "straggler", "drain", "reports_lost"}),
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
        ends_within_s=60.0,
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
        faults=frozenset({"router_crash", "worker_crash", "host_crash", "control_outage", "upgrade"}),
        router_count=2,
        step_base_s=0.06,
        router_grace_s=0.1,
    )


def calm(scenario: Scenario) -> Scenario:
    """Make nothing so slow that it looks like a fault, because without faults nothing may fail."""
    return replace(
        scenario,
        network_latency_s=0.0005,
        read_block_s=0.0005,
        transfer=scenario.transfer.model_copy(update={"read_timeout_s": 0.4, "lease_s": 2.0}),
        router=scenario.router.model_copy(update={"attempts_max": 8}),
        engine=scenario.engine.model_copy(update={"waiting_sequences_max": 64}),
    )


SHAPES = (
    lease_storm,
    lease_storm,
    _crowd,
    _orphans,
    _crowd,
    _rush,
    _sick,
    _sick,
    _burst,
    _flood,
    _overload,
    _forgetful,
    _forgetful,
    _forgetful,
    _distant,
    _distant,
)
"""All shapes. Those that stand here more than once are drawn more often."""
