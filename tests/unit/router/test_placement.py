"""Whom each policy chooses, and which workers it may choose from."""

import random

import pytest

from baton.config.router import RouterConfig
from baton.core.ids import WorkerId
from baton.core.messages import Phase, Role
from router.decisions.placement import make_policy
from router.decisions.placement.place import place
from router.decisions.placement.views import NoPlace, Placement, RequestView, WorkerView

RNG = random.Random(5)


def worker(name: str, role: Role = Role.PREFILL, load: float = 0.0, **kw) -> WorkerView:
    facts = {
        "fingerprint": "f",
        "block_tokens": 16,
        "is_draining": False,
        "is_refusing": False,
        "fits": True,
        "has_room": True,
        "is_stale": False,
        "is_avoided": False,
        "is_foreign": False,
    } | kw
    return WorkerView(WorkerId(name), role, load=load, **facts)


def policy(name):
    return make_policy(RouterConfig(policy=name, load_bound=1.5))


def chosen(name, workers, matched=None, phase=Phase.PREFILL):
    return policy(name).choose(phase, workers, matched or {}, RNG).worker.worker_id


def placed(*workers, matched=None, last=False, disaggregate=True, fallback=True, name="cached_prefix"):
    request = RequestView(last, lambda fingerprint, block_tokens: matched or {})
    return place(request, workers, policy=policy(name), disaggregate=disaggregate, fallback=fallback, rng=RNG)


def test_cached_prefix_takes_the_longest_match():
    assert chosen("cached_prefix", [worker("a"), worker("b"), worker("c")], {"b": 32, "c": 64}) == "c"


def test_cached_prefix_ties_go_to_the_least_load_then_the_id():
    assert chosen("cached_prefix", [worker("a", load=9), worker("c"), worker("b")]) == "b"
    assert chosen("cached_prefix", [worker("a", load=9), worker("b", load=1)], {"a": 8, "b": 8}) == "b"


def test_cached_prefix_passes_over_a_worker_loaded_beyond_what_its_cache_saves():
    busy, idle = worker("a", load=5000), [worker("b"), worker("c"), worker("d")]
    assert chosen("cached_prefix", [busy, *idle], {"a": 320}) == "b"
    assert chosen("cached_prefix", [busy, *idle], {"a": 4000}) == "a"


def test_cached_prefix_prefers_the_cache_in_a_cluster_that_is_nearly_idle():
    assert chosen("cached_prefix", [worker("a", load=200), worker("b"), worker("c")], {"a": 16}) == "a"


def test_a_match_does_not_excuse_a_decode_workers_load():
    workers = [worker("a", Role.DECODE, load=3000), *(worker(n, Role.DECODE) for n in "bcd")]
    assert chosen("cached_prefix", workers, {"a": 4000}, Phase.DECODE) == "b"


def test_round_robin_takes_turns_for_each_phase_and_survives_losses():
    robin = policy("round_robin")
    workers = [worker("a"), worker("b"), worker("c")]

    def turn(phase, among):
        return robin.choose(phase, among, {}, RNG).worker.worker_id

    assert [turn(Phase.PREFILL, workers) for _ in range(4)] == ["a", "b", "c", "a"]
    assert turn(Phase.DECODE, workers) == "a"
    assert turn(Phase.PREFILL, [workers[0], workers[2]]) == "c"


def test_least_loaded_and_random():
    workers = [worker("a", load=3), worker("b", load=1), worker("c", load=1)]
    assert chosen("least_loaded", workers) == "b"
    assert {chosen("random", workers) for _ in range(50)} == {"a", "b", "c"}


def test_a_draining_worker_is_never_chosen():
    found = placed(worker("p", is_draining=True), worker("d", Role.DECODE), fallback=False)
    assert isinstance(found, NoPlace)


def test_decode_needs_room_prefill_does_not():
    prefill, decode = worker("p", has_room=False), worker("d", Role.DECODE)
    assert isinstance(placed(prefill, decode), Placement)
    assert isinstance(placed(prefill, decode._replace(has_room=False)), NoPlace)


def test_a_pool_without_room_is_not_an_empty_pool():
    found = placed(worker("p"), worker("d", Role.DECODE, has_room=False, is_refusing=True))
    assert found == NoPlace("no decode worker has room")


@pytest.mark.parametrize("flag", ["is_stale", "is_avoided", "is_foreign"])
def test_second_best_only_when_nothing_else(flag):
    doubtful, good = worker("a", **{flag: True}), worker("b", load=100.0)
    decode = worker("d", Role.DECODE)
    assert placed(doubtful, good, decode, matched={"a": 64}).prefill.worker_id == "b"
    assert placed(doubtful, decode).prefill.worker_id == "a"


def test_unequal_fingerprints_never_pair():
    old = [worker("p1", fingerprint="1"), worker("d2", Role.DECODE, fingerprint="2")]
    found = placed(*old)
    assert isinstance(found, Placement)
    assert found.decode is None
    assert found.is_fallback
    assert isinstance(placed(*old, fallback=False), NoPlace)


def test_one_worker_of_both_roles_chosen_twice_runs_it_whole():
    found = placed(worker("b", Role.AGGREGATED), worker("d", Role.DECODE, load=9000.0))
    assert found.phases == {"b": Phase.AGGREGATED}
    assert not found.is_fallback


def test_nothing_is_handed_over_between_two_workers_of_both_roles():
    prefill_only = worker("p", load=9000.0)
    found = placed(
        prefill_only, worker("b1", Role.AGGREGATED, load=10.0), worker("b2", Role.AGGREGATED, load=20.0)
    )
    assert found.phases in ({"b1": Phase.AGGREGATED}, {"b2": Phase.AGGREGATED})
    again = placed(
        worker("b1", Role.AGGREGATED, has_room=False), worker("b2", Role.AGGREGATED), worker("p", load=9000.0)
    )
    assert again.phases == {"b2": Phase.AGGREGATED}


def test_too_long_for_all_is_final():
    assert placed(worker("p", fits=False), worker("d", Role.DECODE, fits=False)).is_final
    assert not placed(worker("p", is_draining=True)).is_final
