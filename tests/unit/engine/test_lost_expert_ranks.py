"""Expert ranks die, stop and refuse while rows are with them: the tokens are the same."""

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from baton.config.experts import ExpertsConfig
from baton.core.experts import ExpertMapRank, ExpertMapUpdate, ExpertRankRef, ExpertRankSuspected
from baton.core.ids import ExpertRankId
from engine.experts.caller import ExpertCaller, ExpertReport, ExpertsUnavailable
from engine.experts.doors import LocalLink
from engine.experts.exchange import FINISHED, TAKEN, SlotView
from tests.forked import fork_server
from tests.models import make_model

LAYERS, EXPERTS, HIDDEN, CHOSEN, TOKENS = 2, 16, 64, 4, 24
ALL = range(LAYERS * EXPERTS)


HELD = {name: [e for e in ALL if e % 3 != number] for number, name in enumerate("abc")}
"""Every expert is on two of three ranks."""


class RankProcess:
    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.is_intact = name, True
        arguments = [str(folder), name]
        self.process = fork_server().start("tests.expert_rank_process:main", arguments, pipes=True)
        self.own_ref: ExpertRankRef | None = None

    def wait(self, *, is_far: bool) -> None:
        """Wait until it holds its part and nothing else. is_far: callers reach it over TCP."""
        if self.own_ref is None:
            assert self.process.stdout is not None
            self.own_ref = msgspec.json.decode(self.process.stdout.readline(), type=ExpertRankRef)
        host = "elsewhere" if is_far else self.own_ref.host
        self.ref = msgspec.structs.replace(self.own_ref, host=host)
        self.experts = HELD[self.name]
        self.tell("drop " + " ".join(str(e) for e in ALL if e not in self.experts))
        self.load(self.experts)

    def load(self, experts: list[int]) -> None:
        self.tell(" ".join(map(str, experts)))

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ok\n"

    def signal(self, number: int) -> None:
        self.is_intact = False
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class RankPool:
    """Processes that tests have not signalled serve the next one, since they take long to start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._idle: dict[str, RankProcess] = {}

    def take(self, far: Sequence[int]) -> list[RankProcess]:
        found = [self._idle.pop(name, None) or RankProcess(self._folder, name) for name in HELD]
        for number, rank in enumerate(found):
            rank.wait(is_far=number in far)
        return found

    def give_back(self, ranks: Sequence[RankProcess]) -> None:
        for rank in ranks:
            if rank.is_intact:
                self._idle[rank.name] = rank
            else:
                rank.end()

    def close(self) -> None:
        for rank in self._idle.values():
            rank.end()


class Cluster:
    def __init__(self, pool: RankPool, *, far: Sequence[int] = ()) -> None:
        """far: ranks that the caller reaches over TCP."""
        self._pool = pool
        self.ranks = pool.take(far)
        self.reports: list[ExpertReport] = []
        self.parked: list[bool] = []
        self._parked_changed = threading.Condition()
        config = ExpertsConfig(answer_timeout_s=0.4, park_after_s=0.3)
        self.caller = ExpertCaller(
            config,
            layer_count=LAYERS,
            expert_count=EXPERTS,
            hidden=HIDDEN,
            dtype=torch.float32,
            name="test",
            report=self.reports.append,
            on_parked=self._note_parked,
        )
        self.epoch = 0
        self.announce()
        assert self.caller.wait_complete(10.0)

    def _note_parked(self, is_parked: bool) -> None:
        with self._parked_changed:
            self.parked.append(is_parked)
            self._parked_changed.notify_all()

    def await_parked(self, *expected: bool) -> None:
        with self._parked_changed:
            assert self._parked_changed.wait_for(lambda: self.parked == list(expected), 30.0), self.parked

    def announce(self, *without: int) -> None:
        self.epoch += 1
        ranks = tuple(
            ExpertMapRank(rank.ref, tuple(rank.experts))
            for number, rank in enumerate(self.ranks)
            if number not in without
        )
        self.caller.use(ExpertMapUpdate(self.epoch, LAYERS, EXPERTS, ranks))

    def dispatch(self, seed: int, tokens: int = TOKENS) -> torch.Tensor:
        made = torch.Generator().manual_seed(seed)
        x = torch.randn((tokens, HIDDEN), generator=made)
        picks = torch.stack([torch.randperm(EXPERTS, generator=made)[:CHOSEN] for _ in range(tokens)])
        sent = self.caller.begin(seed % LAYERS, x, picks)
        return self.caller.finish(sent, torch.rand((tokens, CHOSEN), generator=made))

    def close(self) -> None:
        self.caller.close()
        self._pool.give_back(self.ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("model"),
        "qwen3_moe",
        with_tokenizer=False,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
    )


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[RankPool]:
    with contextlib.closing(RankPool(folder)) as made:
        yield made


@pytest.fixture
def cluster(pool: RankPool) -> Iterator[Cluster]:
    with contextlib.closing(Cluster(pool)) as made:
        yield made


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("seed", "far"), [(0, ()), (1, (0, 1, 2)), (2, (1,))])
def test_a_rank_lost_at_any_moment_costs_no_result(
    pool: RankPool, how: int, seed: int, far: Sequence[int]
) -> None:
    """The signal comes at a random place of a run of dispatches, small and large ones."""
    with contextlib.closing(Cluster(pool, far=far)) as cluster:
        check_that_a_loss_costs_no_result(cluster, how, seed)


def check_that_a_loss_costs_no_result(cluster: Cluster, how: int, seed: int) -> None:
    randomly = random.Random(seed)
    sizes = [randomly.choice((1, TOKENS, 700)) for _ in range(30)]
    expected = [cluster.dispatch(n, size) for n, size in enumerate(sizes)]
    victim, moment = randomly.randrange(3), randomly.randrange(5, 25)
    begun = threading.Event()

    def hit() -> None:
        begun.wait()
        cluster.ranks[victim].signal(how)

    thread = threading.Thread(target=hit)
    thread.start()
    found = []
    for n, size in enumerate(sizes):
        if n == moment:
            begun.set()
        found.append(cluster.dispatch(n, size))
    thread.join()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    suspected = [one for one in cluster.reports if isinstance(one, ExpertRankSuspected)]
    assert {one.rank_id for one in suspected} == {"abc"[victim]}
    assert suspected[0].is_gone == (how == signal.SIGKILL)


def test_rows_wait_for_an_expert_that_nobody_holds(cluster: Cluster) -> None:
    """Two ranks are lost at once. The third loads what only they had, and a new map names it."""
    expected = cluster.dispatch(3)
    for number in (0, 1):
        cluster.ranks[number].signal(signal.SIGKILL)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(cluster.dispatch(3)))
    thread.start()
    survivor = cluster.ranks[2]
    survivor.experts = list(ALL)
    survivor.load(survivor.experts)
    cluster.announce(0, 1)
    thread.join()
    assert torch.equal(found[0], expected)


def test_a_rank_that_does_not_hold_an_expert_refuses_it(cluster: Cluster) -> None:
    """The map is wrong for a moment: rows go to the other replica."""
    expected = [cluster.dispatch(seed) for seed in range(6)]
    cluster.ranks[0].tell("drop " + " ".join(map(str, cluster.ranks[0].experts)))
    assert all(torch.equal(cluster.dispatch(seed), one) for seed, one in enumerate(expected))
    assert not [one for one in cluster.reports if isinstance(one, ExpertRankSuspected)]


def test_a_refused_expert_is_not_asked_for_again(cluster: Cluster) -> None:
    """It is one of the last layer. Each rank refuses one expert of it; the other layers' go on as before."""
    expected = [cluster.dispatch(seed) for seed in range(6)]
    lost = {
        number: max(e for e in rank.experts if e % 3 == (number + 1) % 3)
        for number, rank in enumerate(cluster.ranks)
    }
    for number, expert in lost.items():
        cluster.ranks[number].tell(f"drop {expert}")
    for _ in range(2):
        assert all(torch.equal(cluster.dispatch(seed), one) for seed, one in enumerate(expected))
    refused = {str(rank): experts for rank, experts in cluster.caller._routes._refused.items()}
    assert refused == {"abc"[number]: {expert} for number, expert in lost.items()}
    before = cluster.caller.stats().rerouted
    assert all(torch.equal(cluster.dispatch(seed), one) for seed, one in enumerate(expected))
    assert cluster.caller.stats().rerouted == before


def in_background(call) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []

    def run() -> None:
        try:
            found.append(call())
        except ExpertsUnavailable as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_a_caller_whose_ranks_are_all_lost_is_parked_and_goes_on_with_their_successors(
    pool: RankPool, cluster: Cluster
) -> None:
    expected = [cluster.dispatch(seed) for seed in range(3)]
    for rank in cluster.ranks:
        rank.signal(signal.SIGKILL)
    thread, found = in_background(lambda: [cluster.dispatch(seed) for seed in range(3)])
    cluster.await_parked(True)
    assert cluster.caller.is_parked
    assert thread.is_alive()
    pool.give_back(cluster.ranks)
    cluster.ranks = pool.take(())
    for rank in cluster.ranks:
        rank.ref = msgspec.structs.replace(rank.ref, rank_id=ExpertRankId(f"{rank.name}2"))
    cluster.announce()
    thread.join()
    assert all(torch.equal(one, other) for one, other in zip(found[0], expected, strict=True))
    cluster.await_parked(True, False)
    assert cluster.caller.missing_s() > 0.3


def test_a_caller_without_rows_is_parked_as_well_while_there_is_no_rank(cluster: Cluster) -> None:
    for rank in cluster.ranks:
        rank.signal(signal.SIGKILL)
    cluster.await_parked(True)
    assert cluster.caller.missing_s() == 0


def test_closing_ends_the_wait_of_a_parked_caller(cluster: Cluster) -> None:
    for rank in cluster.ranks:
        rank.signal(signal.SIGKILL)
    thread, found = in_background(lambda: cluster.dispatch(1))
    cluster.await_parked(True)
    cluster.caller.close()
    thread.join()
    assert isinstance(found[0], ExpertsUnavailable)
    assert not cluster.caller._routes._dispatches


def test_a_stopped_rank_that_goes_on_is_used_again(cluster: Cluster) -> None:
    expected = cluster.dispatch(5)
    cluster.ranks[1].signal(signal.SIGSTOP)
    assert torch.equal(cluster.dispatch(5), expected)
    cluster.ranks[1].signal(signal.SIGCONT)
    with cluster.caller._changed:
        assert cluster.caller._changed.wait_for(lambda: not cluster.caller._routes.suspected, 30.0)
    before = cluster.caller.stats().rerouted
    assert torch.equal(cluster.dispatch(5), expected)
    assert cluster.caller.stats().rerouted == before


@pytest.mark.parametrize("far", [(), (0, 1, 2)])
def test_a_connection_to_a_live_rank_that_breaks_is_made_anew(pool: RankPool, far: Sequence[int]) -> None:
    with contextlib.closing(Cluster(pool, far=far)) as cluster:
        expected = cluster.dispatch(5)
        with cluster.caller._changed:
            number, opened = next(iter(cluster.caller._open.items()))
            made = opened.link._made if isinstance(opened.link, LocalLink) else opened.link._requests
            made.shutdown(socket.SHUT_RDWR)
        assert torch.equal(cluster.dispatch(5), expected)
        with cluster.caller._changed:
            assert cluster.caller._changed.wait_for(
                lambda: number not in cluster.caller._open and len(cluster.caller._open) == len(HELD), 30.0
            )
        assert torch.equal(cluster.dispatch(5), expected)
        assert not [one for one in cluster.reports if isinstance(one, ExpertRankSuspected)]


LARGE = 1500
"""Rows of a dispatch that a rank takes long enough to compute for a signal to come meanwhile."""


def states_of(caller: ExpertCaller, rank: str) -> set[int]:
    """States of the slots of the link to a rank."""
    with caller._changed:
        found = [one.link for one in caller._open.values() if one.rank_id == rank]
        layout = caller._layout
        return {SlotView(link.memory, layout, n).state for link in found for n in range(layout.slot_count)}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", ["idle", "dispatch", "compute", "combine", "takeover"])
def test_a_rank_lost_in_each_phase_costs_no_result(cluster: Cluster, phase: str, how: int) -> None:
    """The victim has nothing to do, was sent rows that it has not seen, computes them, has written results
    that nobody has read, or loads an expert."""
    expected, victim = cluster.dispatch(2, LARGE), cluster.ranks[0]
    caller = cluster.caller
    if phase == "dispatch":
        victim.signal(signal.SIGSTOP)  # it sees nothing of what is sent next
    if phase == "takeover":
        assert victim.process.stdin is not None
        victim.process.stdin.write(" ".join(str(e) for e in ALL if e not in victim.experts) + "\n")
        victim.process.stdin.flush()
    if phase in ("idle", "takeover"):
        victim.signal(how)
        assert torch.equal(cluster.dispatch(2, LARGE), expected)
        return
    made = torch.Generator().manual_seed(2)
    x = torch.randn((LARGE, HIDDEN), generator=made)
    picks = torch.stack([torch.randperm(EXPERTS, generator=made)[:CHOSEN] for _ in range(LARGE)])
    sent = caller.begin(2 % LAYERS, x, picks)
    if phase != "dispatch":
        wanted = TAKEN if phase == "compute" else FINISHED
        until_s = time.monotonic() + 30.0
        while not {wanted, FINISHED} & states_of(caller, "a"):
            assert time.monotonic() < until_s, "the rank takes no rows"
    victim.signal(how)
    found = caller.finish(sent, torch.rand((LARGE, CHOSEN), generator=made))
    assert torch.equal(found, expected)
    assert torch.equal(cluster.dispatch(2, LARGE), expected)


def test_rows_of_a_caller_that_was_closed_meanwhile_are_given_up():
    caller = ExpertCaller(
        ExpertsConfig(),
        layer_count=1,
        expert_count=4,
        hidden=8,
        dtype=torch.float32,
        name="closed",
        report=lambda report: None,
    )
    sent = caller.begin(0, torch.ones(2, 8), torch.tensor([[0, 1], [2, 3]]))
    caller.close()
    with pytest.raises(ExpertsUnavailable):
        caller.finish(sent, torch.ones(2, 2))
    assert caller.stats().waited_s == 0.0
