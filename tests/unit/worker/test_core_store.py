"""Scripts of one worker and its store node."""

from baton.config import EngineConfig, StoreConfig
from baton.core.messages import Leg
from baton.core.sampling import SamplingParams
from baton.worker.events import FromRouter, RouterJoined
from tests.unit.worker.dull_store import DullStore
from tests.unit.worker.worker_pair import ROUTER, Machine, collected, expected_tokens, start

PROMPT = tuple(range(100, 123))  # five full blocks and three tokens


def pair(*, store=None, block_count=32, engine=None, **store_fields):
    engine = engine or EngineConfig(step_tokens_max=16, batch_sequences_max=8, speculation="off")
    machine = Machine("w", block_count=block_count, engine=engine, store=store or StoreConfig(load="always"))
    machine.handle(RouterJoined(ROUTER), 0.0)
    node = DullStore(machine, **store_fields)
    node.join()
    return machine, node


def submit(machine, node, seq_id, prompt=PROMPT, **more):
    machine.handle(FromRouter(ROUTER, start(seq_id, prompt, leg=Leg.WHOLE, **more)), node.now_s)


def compute(machine, node):
    """All steps there are, with the store answering nothing."""
    while machine.plan is not None:
        node.now_s += 0.01
        machine.finish_step(node.now_s)


def settle(machine, node):
    """Until nothing can happen without time passing."""
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


def test_sealed_blocks_are_offered_and_written():
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
