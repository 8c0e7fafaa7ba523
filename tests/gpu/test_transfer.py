"""KV pools on one GPU, of two processes: what reads by CUDA IPC and by NIXL bring, notice and cost."""

import random

import pytest
import torch

from tests.gpu.transfer_sides import (
    BLOCK_COUNT,
    GEOMETRY,
    SideProcess,
    add_peer,
    clear,
    holds,
    offer,
    rates,
    read,
    reuse,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
KINDS = ("cuda_ipc", "nixl")
OWNER_SEED, MORTAL_SEED = 1, 2
ROUNDS = 8


class Sides:
    def __init__(self, kind):
        self.owner = SideProcess(kind, f"p-{kind}.1", seed=OWNER_SEED)
        self.mortal = SideProcess(kind, f"m-{kind}.1", seed=MORTAL_SEED)
        self.reader = SideProcess(kind, f"d-{kind}.1")

    @property
    def all(self):
        return (self.reader, self.owner, self.mortal)

    def meet(self, peer):
        self.reader.call(clear)
        self.reader.call(add_peer, peer.name, peer.call(offer))


@pytest.fixture(scope="module")
def every_side():
    """All processes start at the same time: most of it is the import of torch."""
    made = {kind: Sides(kind) for kind in KINDS}
    yield made
    statuses = {side.name: side.close() for sides in made.values() for side in sides.all}
    killed = {sides.mortal.name for sides in made.values()}
    assert {name: status for name, status in statuses.items() if status and name not in killed} == {}


@pytest.fixture(params=KINDS)
def sides(request, every_side):
    found = every_side[request.param]
    refusals = [refusal for refusal in (side.ready() for side in found.all) if refusal is not None]
    if refusals and request.param == "nixl":
        pytest.skip(refusals[0])
    assert refusals == []
    return found


def test_scattered_blocks_arrive_identical_and_nothing_else_changes(sides):
    sides.meet(sides.owner)
    source, local = [5, 3, 4, 60, 0, 1, 2, 255], [9, 20, 21, 22, 63, 0, 2, 254]
    found = sides.reader.call(read, sides.owner.name, source, local)
    assert found == [100 + block for block in source]
    assert sides.reader.call(holds, OWNER_SEED, source, local)


def test_parts_of_blocks_land_where_they_are_wanted(sides):
    sides.meet(sides.owner)
    source, local = [7, 9, 8], [3, 2, 250]
    half = GEOMETRY.block_bytes // 2
    ranges = [(1, 5, 7), (half, 64, 4096), (half + 8192, half, half - 8192)]
    found = sides.reader.call(read, sides.owner.name, source, local, ranges)
    assert found == [100 + block for block in source]
    assert sides.reader.call(holds, OWNER_SEED, source, local, ranges)


def test_a_block_that_was_given_to_new_content_shows_in_the_generations(sides):
    sides.meet(sides.owner)
    before = sides.reader.call(read, sides.owner.name, [40, 41], [0, 1])
    sides.owner.call(reuse, 41)
    after = sides.reader.call(read, sides.owner.name, [40, 41], [0, 1])
    assert [before[0], before[1] + 1] == after


def test_a_killed_owner_fails_its_reads_and_no_other(sides):
    sides.meet(sides.owner)
    sides.meet(sides.mortal)
    assert sides.reader.call(read, sides.mortal.name, [1], [1]) == [101]
    assert sides.reader.call(holds, MORTAL_SEED, [1], [1])
    sides.mortal.kill()
    failed = sides.reader.call(read, sides.mortal.name, [2], [2])
    assert isinstance(failed, str), "a read from a process that is dead went well"
    sides.reader.call(clear)
    assert sides.reader.call(read, sides.owner.name, [3], [3]) == [103]
    assert sides.reader.call(holds, OWNER_SEED, [3], [3])


def test_rate_of_a_gibibyte(sides, capsys):
    sides.meet(sides.owner)
    every = list(range(BLOCK_COUNT))
    shuffled = random.Random(3).sample(every, BLOCK_COUNT)
    for name, source, local in (("in order", every, every), ("scattered", shuffled, every)):
        found = sorted(sides.reader.call(rates, sides.owner.name, source, local, ROUNDS))
        with capsys.disabled():
            low, middle, high = (found[i] / 1e9 for i in (0, ROUNDS // 2, -1))
            size = f"{BLOCK_COUNT} blocks of {GEOMETRY.block_bytes >> 20} MiB"
            print(f"\n{sides.reader.name}, {size} {name}: {middle:.1f} GB/s ({low:.1f}-{high:.1f})")
