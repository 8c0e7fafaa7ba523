"""The choice of each policy, and the workers that it may choose from."""

import random
import re
from pathlib import Path
from textwrap import dedent

import pytest

from baton.config.router import RouterConfig
from baton.core.ids import WorkerId
from baton.core.messages import Phase, Role
from baton.core.policies import PLACEMENT_POLICIES
from router.decisions.placement.interface import NoPlace, Placement, PolicyTools
from router.decisions.placement.table import make_placement_policy
from router.decisions.prediction.predictor import Predictor
from tests.unit.router.snapshots import cluster_snapshot, request_of
from tests.unit.router.snapshots import worker_snapshot as worker

RNG = random.Random(5)


def policy(name, **config):
    settings = RouterConfig.model_validate({"policy": name, "load_bound": 1.5, **config})
    return make_placement_policy(name, PolicyTools(settings, Predictor(error_max=1.0), RNG))


def chosen(name, workers, cached=None):
    """Return the worker that a policy takes for prefill, with a decode worker beside."""
    found = policy(name).place(
        request_of(cached=cached), cluster_snapshot(*workers, worker("zz", Role.DECODE))
    )
    return found.prefill.worker_id


def placed(
    *workers,
    tokens=100,
    cached=None,
    last=False,
    disaggregate=True,
    fallback=True,
    name="cached_prefix",
    suspended=(),
    **request,
):
    made = policy(name, disaggregate=disaggregate, fallback_to_other_pool=fallback)
    frozen = cluster_snapshot(*workers, suspended=frozenset(map(WorkerId, suspended)))
    return made.place(request_of(tokens, cached=cached, is_last_token=last, **request), frozen)


@pytest.mark.parametrize("name", PLACEMENT_POLICIES)
def test_every_policy_answers_by_the_same_interface_and_says_why(name):
    frozen = cluster_snapshot(worker("p"), worker("d", Role.DECODE))
    found = policy(name, any_role=False).place(request_of(), frozen)
    assert isinstance(found, Placement)
    assert found.phases == {"p": Phase.PREFILL, "d": Phase.DECODE}
    assert found.reason
    assert (found.forecast is not None) == PLACEMENT_POLICIES[name].predicts
    nobody = policy(name).place(request_of(), cluster_snapshot())
    assert nobody == NoPlace("no worker takes new sequences")
    assert placed(worker("p"), worker("d", Role.DECODE), tokens=99_999, name=name).is_final


def test_the_predicting_policy_that_the_docs_show_works():
    page = (Path(__file__).parents[3] / "docs" / "contributing.md").read_text()
    (example,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "predicts=True" in code)
    names = {}
    exec(dedent(example), names)
    settings = RouterConfig(disaggregate=True)
    made = names["soonest"](PolicyTools(settings, Predictor(error_max=1.0), RNG))
    busy, idle, decode = worker("a", load=5000), worker("b"), worker("d", Role.DECODE)
    found = made.place(request_of(), cluster_snapshot(busy, idle, decode))
    assert (found.prefill.worker_id, found.decode.worker_id) == ("b", "d")
    assert found.forecast is not None


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
    found = placed(worker("p"), *workers, cached={"a": 4000})
    assert found.decode.worker_id == "b"


def test_round_robin_takes_turns_for_each_phase_and_survives_losses():
    robin = policy("round_robin")
    prefills, decodes = [worker(n) for n in "abc"], [worker(n, Role.DECODE) for n in "de"]

    def turn(workers):
        return tuple(robin.place(request_of(), cluster_snapshot(*workers)).phases)

    assert [turn(prefills + decodes) for _ in range(4)] == [("a", "d"), ("b", "e"), ("c", "d"), ("a", "e")]
    assert turn([prefills[0], prefills[2], *decodes]) == ("c", "d")


def test_least_loaded_and_random():
    workers = [worker("a", load=3), worker("b", load=1), worker("c", load=1)]
    assert chosen("least_loaded", workers) == "b"
    assert {chosen("random", workers) for _ in range(50)} == {"a", "b", "c"}


def test_a_draining_worker_is_never_chosen():
    found = placed(worker("p", is_draining=True), worker("d", Role.DECODE), fallback=False)
    assert isinstance(found, NoPlace)


def test_decode_needs_room_prefill_does_not():
    prefill, decode = worker("p", free_blocks=0), worker("d", Role.DECODE)
    assert isinstance(placed(prefill, decode), Placement)
    assert isinstance(placed(prefill, worker("d", Role.DECODE, free_blocks=0)), NoPlace)


def test_room_that_is_kept_for_others_is_no_room():
    workers = worker("p"), worker("d", Role.DECODE)
    assert isinstance(placed(*workers, kept=frozenset({WorkerId("d")})), NoPlace)
    assert isinstance(placed(*workers, kept=frozenset({WorkerId("p")})), Placement)


def test_a_pool_without_room_is_not_an_empty_pool():
    found = placed(worker("p"), worker("d", Role.DECODE, free_blocks=0, is_refusing=True))
    assert found == NoPlace("no decode worker has enough free blocks")


def test_a_worker_that_was_silent_is_second_best():
    silent, good, decode = worker("a", is_stale=True), worker("b", load=100), worker("d", Role.DECODE)
    assert placed(silent, good, decode, cached={"a": 64}).prefill.worker_id == "b"
    assert placed(silent, decode).prefill.worker_id == "a"


def test_a_worker_that_failed_is_second_best():
    failed, good, decode = worker("a"), worker("b", load=100), worker("d", Role.DECODE)
    avoid = frozenset({WorkerId("a")})
    assert placed(failed, good, decode, cached={"a": 64}, avoid=avoid).prefill.worker_id == "b"
    assert placed(failed, decode, avoid=avoid).prefill.worker_id == "a"


def test_other_weights_than_those_that_began_are_second_best():
    foreign = worker("a", fingerprint="g"), worker("c", Role.DECODE, fingerprint="g")
    own = worker("b", load=100), worker("d", Role.DECODE)
    assert placed(*foreign, *own, cached={"a": 64}, fingerprint="f").prefill.worker_id == "b"
    assert placed(*foreign, fingerprint="f").prefill.worker_id == "a"


def test_a_suspended_worker_gets_nothing_unless_a_phase_would_be_lost():
    workers = worker("a"), worker("b", load=100), worker("d", Role.DECODE)
    assert placed(*workers, suspended="a").prefill.worker_id == "b"
    assert placed(*workers, suspended="ab").prefill.worker_id == "a"


def test_unequal_fingerprints_never_pair():
    old = [worker("p1", fingerprint="1"), worker("d2", Role.DECODE, fingerprint="2")]
    found = placed(*old)
    assert isinstance(found, Placement)
    assert found.decode is None
    assert found.is_fallback
    assert isinstance(placed(*old, fallback=False), NoPlace)


def test_an_aggregated_worker_that_is_chosen_twice_runs_both_phases():
    found = placed(worker("b", Role.AGGREGATED), worker("d", Role.DECODE, load=9000))
    assert found.phases == {"b": Phase.AGGREGATED}
    assert not found.is_fallback


def test_nothing_is_handed_over_between_two_aggregated_workers():
    prefill_only = worker("p", load=9000)
    aggregated = worker("b1", Role.AGGREGATED, load=10), worker("b2", Role.AGGREGATED, load=20)
    found = placed(prefill_only, *aggregated)
    assert found.phases in ({"b1": Phase.AGGREGATED}, {"b2": Phase.AGGREGATED})
    full = worker("b1", Role.AGGREGATED, free_blocks=0)
    assert placed(full, aggregated[1], prefill_only).phases == {"b2": Phase.AGGREGATED}


def test_too_long_for_all_is_final():
    workers = worker("p"), worker("d", Role.DECODE)
    assert placed(*workers, tokens=99_999).is_final
    assert not placed(worker("p", is_draining=True)).is_final
