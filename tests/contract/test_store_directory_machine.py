"""Nodes that do as they like, against a dull model of what a directory knows."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from baton.core.store import BlockLocation, NodeRef, StoreChanges, StoreMember, Tier
from kv_store.directory.interface import GONE_S
from tests.contract.directory_worlds import MemoryWorld, RedisWorld
from tests.contract.redis_servers import RedisServer

NODES = ("a", "b", "c")
BLOCKS = range(6)
SHORT_S, LONG_S = 1000.0, 100_000.0

nodes = st.sampled_from(NODES)
tiers = st.sampled_from([Tier.HOST, Tier.SSD])
told = st.dictionaries(st.sampled_from(BLOCKS), tiers, max_size=4)
removed = st.sets(st.sampled_from(BLOCKS), max_size=3)


def h(number):
    return number.to_bytes(16, "big")


def member(name, is_draining=False):
    return StoreMember(NodeRef(name, f"{name}:1"), is_draining=is_draining)


@dataclass
class Known:
    """Facts that the model has of one node."""

    member: StoreMember
    left_s: float
    last: int | None = None
    blocks: dict = field(default_factory=dict)


class Machine(RuleBasedStateMachine):
    make_world = None

    @initialize()
    def begin(self):
        self.runner = asyncio.Runner()
        self.world = self.make_world()
        self.directory = self.run(self.world.client())
        self.known, self.gone_s = {}, {}
        self.numbers = dict.fromkeys(NODES, 0)

    def run(self, coroutine):
        return self.runner.run(coroutine)

    def teardown(self):
        if hasattr(self, "runner"):
            self.run(self.world.close())
            self.runner.close()

    @rule(name=nodes, lease_s=st.sampled_from([SHORT_S, LONG_S]), is_draining=st.booleans())
    def renew(self, name, lease_s, is_draining):
        answer = self.run(self.directory.renew(member(name, is_draining), lease_s=lease_s))
        if name in self.gone_s:
            assert not answer
            return
        known = self.known.setdefault(name, Known(member(name), 0))
        known.member, known.left_s = member(name, is_draining), lease_s
        assert answer == (known.last is not None)

    @rule(name=nodes, skipped=st.sampled_from([0, 0, 0, 1]), stored=told, removed=removed)
    def change(self, name, skipped, stored, removed):
        number = self.numbers[name] = self.numbers[name] + 1 + skipped
        known = self.known.get(name)
        is_next = known is not None and known.last is not None and number == known.last + 1
        if is_next:
            known.last = number
            known.blocks = {b: t for b, t in known.blocks.items() if b not in removed} | stored
        elif known is not None:
            known.last = None
        self.tell(name, number, is_next, stored, removed=tuple(map(h, removed)))

    @rule(name=nodes, stored=told, is_last=st.booleans())
    def snapshot(self, name, stored, is_last):
        number = self.numbers[name] = self.numbers[name] + 1
        known = self.known.get(name)
        if known is not None:
            known.last, known.blocks = number, dict(stored)
        self.tell(name, number, known is not None, stored, is_snapshot=True, is_last=is_last)

    @rule(name=nodes, stored=told, is_first=st.booleans())
    def repeat_an_old_one(self, name, stored, is_first):
        known = self.known.get(name)
        if known is not None and known.last is not None:
            self.tell(name, known.last, True, stored, is_snapshot=True, is_first=is_first)

    def tell(self, name, number, answer, stored, **fields):
        changes = StoreChanges(name, number, stored=tuple((h(b), t) for b, t in stored.items()), **fields)
        assert self.run(self.directory.publish(changes)) == answer

    @rule(name=nodes)
    def leave(self, name):
        self.run(self.directory.leave(name))
        self.known.pop(name, None)
        self.gone_s[name] = GONE_S

    @precondition(lambda self: hasattr(self, "known"))
    @rule(seconds=st.sampled_from([GONE_S / 2, SHORT_S * 0.6]))
    def time_passes(self, seconds):
        self.run(self.world.advance(seconds))
        for known in self.known.values():
            known.left_s -= seconds
        self.known = {name: known for name, known in self.known.items() if known.left_s > 0}
        self.gone_s = {name: left_s - seconds for name, left_s in self.gone_s.items() if left_s > seconds + 1}

    @invariant()
    def all_is_known_that_was_told(self):
        if not hasattr(self, "known"):
            return
        assert self.run(self.directory.members()) == tuple(self.known[n].member for n in sorted(self.known))
        found = self.run(self.directory.look_up(list(map(h, BLOCKS))))
        assert found == [
            tuple(
                BlockLocation(self.known[n].member.node, self.known[n].blocks[b])
                for n in sorted(self.known)
                if b in self.known[n].blocks
            )
            for b in BLOCKS
        ]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.mark.parametrize(("kind", "examples"), [("memory", 150), ("redis", 60)])
def test_the_model_agrees(kind, examples, request):
    class Chosen(Machine):
        if kind == "memory":
            make_world = staticmethod(MemoryWorld)
        else:
            url = request.getfixturevalue("server").url
            make_world = staticmethod(lambda: RedisWorld(Chosen.url))

    run_machine(Chosen, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None))
