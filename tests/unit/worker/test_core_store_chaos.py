"""Worker cores with a store beside them: whatever it does, tokens are right and blocks come back."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config import EngineConfig, StoreConfig, TransferConfig
from baton.core.sampling import SamplingParams
from tests.unit.worker.dull_store import DullStore
from tests.unit.worker.test_core_pair import TinyRouter, one_random_thing
from tests.unit.worker.worker_pair import Cluster, Machine, expected_tokens


def with_stores(machines, *, seed):
    """All on one host, with a store process that each has a session with."""
    cluster = Cluster(*machines, seed=seed)
    arena, slot_of = [], {}
    for machine in machines:
        node = DullStore(machine, arena=arena, slot_of=slot_of)
        node.join()
        cluster.stores[machine.name] = node
    return cluster


def one_store_fault(rng, cluster):
    node = cluster.stores[rng.choice(list(cluster.stores))]
    node.now_s = cluster.now_s
    kind = rng.choice(["lose", "join", "spoil", "fail", "copy", "forget"])
    if kind == "lose":
        node.lose()
    elif kind == "join":
        node.lose()
        node.join()
    elif kind == "spoil" and node.slot_of:
        node.spoil(rng.choice(list(node.slot_of)))
    elif kind == "forget" and node.slot_of:
        del node.slot_of[rng.choice(list(node.slot_of))]
    elif kind == "fail" and node.loads:
        node.fail(rng.choice(list(node.loads)))
    elif kind == "copy" and node.machine.copies:
        node.finish_copy(rng.choice(list(node.machine.copies)), error="broken")


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    machine_count=st.integers(1, 3),
    blocks=st.integers(14, 24),
    load=st.sampled_from(["auto", "always", "always"]),
    swap_bytes=st.sampled_from([0, 0, 24]),
    are_faulty=st.booleans(),
)
def test_chaos_with_a_store_ends_with_right_tokens_and_all_blocks_back(
    seed, machine_count, blocks, load, swap_bytes, are_faulty
):
    rng = random.Random(seed)
    machines = [
        Machine(
            f"m{i}",
            block_count=blocks,
            engine=EngineConfig(
                step_tokens_max=rng.choice([5, 16]), batch_sequences_max=8, swap_bytes=swap_bytes
            ),
            transfer=TransferConfig(lease_s=3.0, lease_slack_s=0.2, receive_wait_s=2.0),
            store=StoreConfig(load=load),
        )
        for i in range(max(2, machine_count))
    ]
    cluster = with_stores(machines, seed=seed)
    router = TinyRouter(cluster, rng)
    for _ in range(300):
        if are_faulty and rng.random() < 0.05:
            one_store_fault(rng, cluster)
        one_random_thing(rng, cluster, router)
        router.listen()
    for _ in range(400):
        if all(router.is_done(r) for r in router.requests.values()):
            break
        cluster.settle_late()
        cluster.run()
        cluster.advance(0.5)
        router.listen()
    cluster.settle_late()
    cluster.run()
    cluster.advance(20)
    cluster.run()
    cluster.assert_quiet()
    for node in cluster.stores.values():
        assert not node.loads, "pins left behind"
    room_tokens = min(64, blocks * 4)
    for request in router.requests.values():
        tokens, finish = router.so_far(request)
        want = expected_tokens(request.prompt, SamplingParams(max_tokens=request.max_tokens), room_tokens)
        assert tokens == want[: len(tokens)]
        assert request.is_cancelled or (finish is not None and tokens == want)
