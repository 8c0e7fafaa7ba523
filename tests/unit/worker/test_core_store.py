"""Scripts of one worker and its store node."""

import msgspec
import pytest

from baton.config import EngineConfig, StoreConfig
from baton.core.messages import CancelSequence, Phase, Task
from baton.core.sampling import SamplingParams
from baton.core.store import EndLoad, LoadBlocks, OfferBlocks, Tier
from tests.unit.worker.dull_store import DullStore
from tests.unit.worker.worker_pair import ROOT, ROUTER, Cluster, Machine, collected, expected_tokens, start
from worker.core_loads import PREFETCH_HOLD_S
from worker.core_offers import GATHER_S
from worker.events import FromRouter, RouterJoined

PROMPT = tuple(range(100, 123))  # five full blocks and three tokens


def pair(*, store=None, block_count=32, engine=None, **store_fields):
    engine = engine or EngineConfig(step_tokens_max=16, batch_sequences_max=8, speculation="off")
    machine = Machine("w", block_count=block_count, engine=engine, store=store or StoreConfig(load="always"))
    machine.handle(RouterJoined(ROUTER), 0.0)
    node = DullStore(machine, **store_fields)
    node.join()
    return machine, node


def submit(machine, node, seq_id, prompt=PROMPT, **more):
    machine.handle(FromRouter(ROUTER, start(seq_id, prompt, phase=Phase.AGGREGATED, **more)), node.now_s)


def compute(machine, node):
    """All steps there are, with the store answering nothing."""
    while machine.plan is not None:
        node.now_s += 0.01
        machine.finish_step(node.now_s)


def settle(machine, node):
    """Run until nothing can happen without time passing."""
    while machine.plan is not None or node.choices():
        compute(machine, node)
        node.run()


def forget(machine, node):
    """The pool is used for other things, which are not stored."""
    node.lose()
    blocks = machine.block_count * 4 - 6
    size = min(blocks, machine.max_model_tokens - 2)
    for i in range(0, blocks, size):
        submit(machine, node, f"other{node.now_s}-{i}", tuple(range(900 + i, 900 + i + size)), max_tokens=1)
    compute(machine, node)
    node.join()
    node.wait(1.0)
    node.run()


def filled(machine, node, prompt=PROMPT):
    """The prompt's blocks are in the store and not in the pool."""
    submit(machine, node, "filler", prompt)
    settle(machine, node)
    node.wait(1.0)
    node.run()
    forget(machine, node)


def right(seq_id, machine, prompt=PROMPT, max_tokens=6):
    want = expected_tokens(prompt, SamplingParams(max_tokens=max_tokens), 10**6)
    return collected(machine, seq_id=seq_id)[0] == want


def test_committed_blocks_are_offered_and_written():
    machine, node = pair()
    submit(machine, node, "a")
    settle(machine, node)
    node.wait(1.0)
    settle(machine, node)
    assert len(node.slot_of) == 7  # 23 + 6 tokens, of which the last was never computed
    assert sorted(f.depth for f in node.facts.values()) == list(range(7))
    assert [f.is_generated for f in sorted(node.facts.values(), key=lambda f: f.depth)] == [False] * 5 + [
        True
    ] * 2
    assert machine.core.is_idle
    assert machine.core.status().held_blocks == 0


def test_what_the_store_has_is_loaded_and_not_computed():
    machine, node = pair()
    filled(machine, node)
    before = machine.computer.computed_tokens
    submit(machine, node, "b")
    assert machine.plan is None, "the answer is awaited"
    settle(machine, node)
    assert right("b", machine)
    assert machine.computer.computed_tokens - before == 3 + 5
    assert machine.outputs("b")[0].cached_token_count == 20
    node.wait(1.0)
    node.run()
    assert machine.core.is_idle
    assert not node.loads
    status = machine.core.status().store
    assert status.loaded_blocks == {"host": 5}


def heard(node, kind):
    return [message for message in node.heard if isinstance(message, kind)]


def wait_for_load(machine, node, seq_id="b", **more):
    """Its blocks are found and asked for; nothing has come yet."""
    submit(machine, node, seq_id, **more)
    while machine.to_store:
        node.answer(machine.to_store.popleft())
    [load_id] = node.loads
    return load_id


def at_rest(machine, node):
    settle(machine, node)
    node.wait(20.0)
    settle(machine, node)
    assert machine.core.is_idle
    assert machine.core.status().held_blocks == 0
    assert not node.loads


def test_without_a_store_nothing_is_said():
    machine = Machine("w", block_count=32)
    machine.handle(RouterJoined(ROUTER), 0.0)
    node = DullStore(machine)
    submit(machine, node, "a")
    compute(machine, node)
    assert right("a", machine)
    assert not machine.to_store


def test_a_store_that_begins_anew_is_offered_what_the_pool_still_has():
    machine = Machine("w", block_count=32)
    machine.handle(RouterJoined(ROUTER), 0.0)
    node = DullStore(machine)
    submit(machine, node, "a")
    compute(machine, node)
    node.join()
    node.wait(1.0)
    settle(machine, node)
    assert len(node.slot_of) == 7


def test_few_blocks_wait_for_company_and_no_longer_than_a_moment():
    machine, node = pair(block_count=512)
    submit(machine, node, "a")
    settle_store(machine, node)
    compute(machine, node)
    assert not machine.to_store
    node.wait(GATHER_S)
    assert isinstance(machine.to_store[0], OfferBlocks)


def test_offers_hold_a_small_part_of_the_pool_and_nothing_once_copied():
    machine, node = pair(block_count=64)
    submit(machine, node, "a", tuple(range(60)), max_tokens=1)
    settle_store(machine, node)
    compute(machine, node)
    node.wait(1.0)
    for _ in range(100):
        if not node.choices():
            break
        assert machine.core.status().store.offers_in_flight <= 2
        assert machine.core.status().held_blocks <= 2
        node.perform(node.choices()[0])
    assert len(node.slot_of) == 15


def test_a_block_that_is_gone_when_it_is_wanted_is_said_to_be_unwritten():
    machine, node = pair(block_count=16)
    submit(machine, node, "a", tuple(range(8)), max_tokens=1)
    settle_store(machine, node)
    compute(machine, node)
    node.wait(1.0)
    offer = machine.to_store.popleft()
    submit(machine, node, "b", tuple(range(200, 262)), max_tokens=1)
    settle_store(machine, node)
    compute(machine, node)
    node.answer(offer)
    assert machine.to_store[0].checksums == (None,)


def test_the_load_is_asked_for_while_the_sequence_waits_for_a_place():
    engine = EngineConfig(step_tokens_max=16, batch_sequences_max=1, speculation="off")
    machine, node = pair(engine=engine)
    filled(machine, node)
    submit(machine, node, "first", tuple(range(300, 310)))
    settle_store(machine, node)
    wait_for_load(machine, node)
    assert not machine.copies
    node.run()
    assert not machine.copies, "there is no place yet"
    settle(machine, node)
    assert right("b", machine)
    assert machine.outputs("b")[0].cached_token_count == 20
    at_rest(machine, node)


def settle_store(machine, node):
    while machine.to_store:
        node.answer(machine.to_store.popleft())


def test_others_are_computed_while_blocks_come():
    machine, node = pair()
    filled(machine, node)
    load_id = wait_for_load(machine, node)
    assert machine.plan is None
    submit(machine, node, "c", tuple(range(400, 406)), max_tokens=2)
    settle_store(machine, node)
    compute(machine, node)
    assert right("c", machine, tuple(range(400, 406)), 2)
    assert not machine.outputs("b")
    assert load_id in node.loads
    at_rest(machine, node)
    assert right("b", machine)


def test_copies_begin_with_the_first_blocks_that_come():
    machine, node = pair()
    filled(machine, node)
    load_id = wait_for_load(machine, node)
    node.bring(load_id, 2)
    [copy] = machine.copies.values()
    assert len(copy.blocks) == 2
    at_rest(machine, node)
    assert right("b", machine)


def test_a_prefill_phase_grants_what_was_copied_while_the_rest_is_brought():
    prefill, decode = Machine("p", store=StoreConfig(load="always")), Machine("d")
    cluster = Cluster(prefill, decode)
    node = DullStore(prefill)
    node.join()
    filled(prefill, node)
    cluster.tell("p", start("s", PROMPT, phase=Phase.PREFILL))
    cluster.tell("d", start("s", PROMPT, phase=Phase.DECODE, source="p"))
    cluster.run()
    settle_store(prefill, node)
    [load_id] = node.loads
    node.bring(load_id, 2)
    node.finish_copy(next(iter(prefill.copies)))
    cluster.post()
    cluster.run()
    reads = [*decode.memory]
    assert sum(PROMPT[:4] == tuple(block) or PROMPT[4:8] == tuple(block) for block in reads) == 2
    cluster.stores["p"] = node
    cluster.run()
    assert collected(prefill, decode, seq_id="s")[0] == expected_tokens(
        PROMPT, SamplingParams(max_tokens=6), 64
    )


@pytest.mark.parametrize("come", [0, 1, 3])
def test_a_load_that_fails_leaves_the_rest_to_be_computed(come):
    machine, node = pair()
    filled(machine, node)
    before = machine.computer.computed_tokens
    load_id = wait_for_load(machine, node)
    if come:
        node.bring(load_id, come)
    node.fail(load_id)
    settle(machine, node)
    assert right("b", machine)
    assert machine.computer.computed_tokens - before == len(PROMPT) + 5 - 4 * come
    assert machine.outputs("b")[0].cached_token_count == 4 * come
    assert machine.core.status().store.recomputed_blocks["failed"] == 5 - come
    at_rest(machine, node)


def test_a_load_that_takes_too_long_is_given_up():
    machine, node = pair()
    filled(machine, node)
    load_id = wait_for_load(machine, node)
    node.bring(load_id, 2)
    assert machine.plan is None
    node.wait(10.0)
    assert machine.plan is None, "two blocks are being written into"
    node.finish_copy(next(iter(machine.copies)))
    compute(machine, node)
    assert right("b", machine)
    assert machine.outputs("b")[0].cached_token_count == 8
    assert machine.core.status().store.recomputed_blocks["late"] == 3
    at_rest(machine, node)


def test_a_corrupt_block_is_computed_and_reported():
    machine, node = pair()
    filled(machine, node)
    bad = next(h for h, facts in node.facts.items() if facts.depth == 2)
    node.spoil(bad)
    submit(machine, node, "b")
    settle(machine, node)
    assert right("b", machine)
    [ended] = heard(node, EndLoad)
    assert ended.corrupt == (bad,)
    assert machine.outputs("b")[0].cached_token_count == 8
    at_rest(machine, node)
    assert bad in node.slot_of, "it was computed, and offered again"


def test_nothing_is_computed_into_blocks_that_a_copy_still_writes():
    """The first of two copies is corrupt; what the second brings is of no use, and not yet there."""
    machine, node = pair()
    filled(machine, node)
    for facts in node.facts.values():
        if facts.parent == ROOT or facts.depth == 3:
            node.spoil(facts.block_hash)
    load_id = wait_for_load(machine, node)
    node.bring(load_id, 2)
    node.bring(load_id, 3)
    first, second = machine.copies
    node.finish_copy(first)
    assert machine.plan is None
    node.finish_copy(second)
    compute(machine, node)
    assert right("b", machine)
    assert machine.outputs("b")[0].cached_token_count == 0
    at_rest(machine, node)


def test_losing_the_store_leaves_what_is_not_copied_to_be_computed():
    machine, node = pair()
    filled(machine, node)
    load_id = wait_for_load(machine, node)
    node.bring(load_id, 3)
    node.lose()
    assert machine.plan is None, "a copy is under way"
    node.finish_copy(next(iter(machine.copies)))
    compute(machine, node)
    assert right("b", machine)
    assert machine.outputs("b")[0].cached_token_count == 12
    assert machine.core.is_idle
    assert not machine.to_store, "the next session knows nothing of this one's loads"


def test_blocks_stay_held_until_a_copy_into_them_is_done():
    machine, node = pair()
    filled(machine, node)
    load_id = wait_for_load(machine, node)
    node.bring(load_id, 3)
    machine.handle(FromRouter(ROUTER, CancelSequence("b", 0)), node.now_s)
    assert machine.core.status().held_blocks == 3
    assert not machine.core.is_idle
    assert not machine.to_store, "slots stay as long as they are read"
    node.finish_copy(next(iter(machine.copies)))
    at_rest(machine, node)
    assert len(heard(node, EndLoad)) == 1


def test_pins_of_who_waits_for_long_are_let_go_and_taken_again():
    engine = EngineConfig(step_tokens_max=16, batch_sequences_max=1, speculation="off")
    machine, node = pair(engine=engine)
    filled(machine, node)
    submit(machine, node, "first", tuple(range(300, 310)))
    settle_store(machine, node)
    wait_for_load(machine, node)
    node.run()
    node.wait(PREFETCH_HOLD_S)
    settle_store(machine, node)
    assert not node.loads
    settle(machine, node)
    assert right("b", machine)
    assert machine.outputs("b")[0].cached_token_count == 20
    at_rest(machine, node)


def test_siblings_load_once():
    machine, node = pair()
    filled(machine, node)
    for name in ("b", "c", "d"):
        submit(machine, node, name)
    settle(machine, node)
    assert all(right(name, machine) for name in ("b", "c", "d"))
    assert len(heard(node, LoadBlocks)) == 1
    at_rest(machine, node)


def test_an_answer_that_comes_after_the_sequence_began_still_helps():
    machine, node = pair()
    prompt = tuple(range(100, 160))
    filled(machine, node, prompt)
    submit(machine, node, "b", prompt, max_tokens=1)
    node.wait(1.0)
    assert len(machine.line) == 2, "it did not wait for ever"
    settle_store(machine, node)
    settle(machine, node)
    assert right("b", machine, prompt, 1)
    assert machine.core.status().store.loaded_blocks == {"host": 6}, "two steps compute eight blocks"
    at_rest(machine, node)


def test_a_path_slower_than_computing_is_shared_with_it():
    engine = EngineConfig(step_tokens_max=16, batch_sequences_max=1, speculation="off")
    machine, node = pair(store=StoreConfig(), engine=engine, tier=Tier.SSD, wait_s=0.0, block_s=0.003)
    prompt = tuple(range(100, 160))
    filled(machine, node, prompt)
    before = machine.computer.computed_tokens
    submit(machine, node, "b", prompt, max_tokens=1)
    settle_store(machine, node)
    [(load, _)] = node.loads.values()
    assert 0 < len(load.hashes) < 14
    settle(machine, node)
    assert right("b", machine, prompt, 1)
    assert machine.computer.computed_tokens - before == 60 - 4 * len(load.hashes)
    at_rest(machine, node)


def test_prompts_whose_logprobs_are_wanted_are_computed():
    machine, node = pair()
    filled(machine, node)
    submit(machine, node, "b", prompt_logprobs=0)
    settle(machine, node)
    assert right("b", machine)
    assert not heard(node, LoadBlocks)
    assert len(machine.outputs("b")[0].prompt_logprobs) == 22


def test_a_preempted_sequence_loads_what_it_computed_before():
    """Two that grow over the pool: the younger gives way, others take its blocks."""
    machine, node = pair(block_count=16, engine=EngineConfig(step_tokens_max=16, speculation="off"))
    for name, first in (("old", 0), ("young", 100)):
        submit(machine, node, name, tuple(range(first, first + 12)), max_tokens=40)
    for _ in range(600):
        if machine.plan is None and not node.choices():
            break
        node.run()
        if machine.plan is not None:
            node.wait(0.2)
            machine.finish_step(node.now_s)
    status = machine.core.status()
    assert status.preemption_count
    assert sum(status.store.loaded_blocks.values())
    assert right("young", machine, tuple(range(100, 112)), 40)
    assert right("old", machine, tuple(range(12)), 40)
    at_rest(machine, node)


def test_embeddings_are_loaded_too():
    machine, node = pair()
    filled(machine, node)
    embed = msgspec.structs.replace(start("e", PROMPT, phase=Phase.AGGREGATED), task=Task.EMBED)
    machine.handle(FromRouter(ROUTER, embed), node.now_s)
    settle(machine, node)
    [output] = machine.outputs("e")
    assert output.cached_token_count == 20
    assert output.embedding == tuple(map(float, PROMPT))
    at_rest(machine, node)


def test_traffic_without_reuse_stops_waiting_for_answers():
    machine, node = pair(store=StoreConfig())
    waited = []
    for i in range(20):
        prompt = tuple(range(2000 + 100 * i, 2000 + 100 * i + 8))
        submit(machine, node, f"s{i}", prompt, max_tokens=1)
        waited.append(machine.plan is None)
        node.now_s += 0.002
        settle(machine, node)
        assert right(f"s{i}", machine, prompt, 1)
    assert waited[0]
    assert not waited[-1]
    at_rest(machine, node)
