"""The choice of the policy `slo`: one worker or two, and which."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.router import RouterConfig
from baton.core.costs import StepCosts
from baton.core.ids import SequenceId, WorkerId
from baton.core.messages import LoadReport, Phase, Role, WorkerHello
from router.decisions.cluster.load_account import SequenceProfile
from router.decisions.cluster.view import ClusterView
from router.decisions.placement.interface import NoPlace, Placement, PlacementRequest, PolicyTools
from router.decisions.placement.slo import SloPolicy
from router.decisions.placement.slo_candidates import HOLDERS, LEAST_BUSY, SAMPLED
from router.decisions.prediction.forecast import SequenceNeeds
from router.decisions.prediction.predictor import Predictor

COSTS = StepCosts(0.004, 1e-4, 5e-4, 1e-7, 1e-9)
BLOCK_BYTES = 64 * 1024


class Cluster:
    def __init__(self, **roles: str) -> None:
        self.view = ClusterView(silence_s=1e9)
        self.predictor = Predictor(error_max=1.0)
        self.cached: dict[str, int] = {}
        self.count = 0
        self.now_s = 1.0
        for name, role in roles.items():
            self.join(name, Role(role))

    def join(self, name: str, role: Role, costs: StepCosts = COSTS, fingerprint: str = "f") -> None:
        hello = WorkerHello(
            WorkerId(name),
            role,
            fingerprint,
            "m",
            16,
            4000,
            60_000,
            costs=costs,
            block_bytes=BLOCK_BYTES,
            host="h",
        )
        self.view.join(hello, f"{name}:1")
        self.worker(name).on_report(LoadReport(role, False, 4000, 0, 0, 0, 0.01), now_s=1.0)

    def worker(self, name: str):
        return self.view[WorkerId(name)]

    def busy(self, name: str, tokens: int = 0, *, phase: Phase = Phase.PREFILL, slo_s: float = 0.0) -> None:
        self.count += 1
        seq_id, profile = SequenceId(f"x{self.count}"), SequenceProfile(tokens, tpot_slo_s=slo_s)
        fresh = 0 if phase is Phase.DECODE else tokens
        worker = self.worker(name)
        worker.reserve(seq_id, phase=phase, tokens=fresh, blocks=1, profile=profile, now_s=self.now_s)
        if phase is not Phase.PREFILL:
            worker.begin(seq_id, self.now_s)

    def place(
        self,
        tokens=2000,
        *,
        ttft: float = 0.0,
        tpot: float = 0.0,
        avoid: str = "",
        at=None,
        kept: frozenset[WorkerId] = frozenset(),
        **options,
    ) -> Placement | NoPlace:
        config = RouterConfig.model_validate(options)
        policy = SloPolicy(PolicyTools(config, self.predictor, random.Random(1)))
        held = {WorkerId(name): min(count, tokens - 1) for name, count in self.cached.items()}
        avoided = frozenset({WorkerId(avoid)}) if avoid else frozenset[WorkerId]()
        request = PlacementRequest(
            SequenceNeeds(tokens, 0, 100, ttft, tpot, 0.0),
            False,
            lambda fingerprint, block: held,
            avoided,
            adapter_at=at,
            kept=kept,
        )
        return policy.place(request, self.view.snapshot(self.now_s))

    def take(self, found: Placement, tokens: int) -> None:
        self.count += 1
        for worker_id, phase in found.phases.items():
            fresh = 0 if phase is Phase.DECODE else max(1, tokens - self.cached.get(worker_id, 0))
            self.view.reserve(
                worker_id,
                SequenceId(f"t{self.count}"),
                phase=phase,
                tokens=fresh,
                blocks=tokens // 16,
                profile=SequenceProfile(tokens),
                now_s=self.now_s,
            )
            self.view[worker_id].placed(0.0, self.now_s)


def names(found: Placement | NoPlace) -> tuple[str, ...]:
    assert isinstance(found, Placement), found
    return tuple(found.phases)


def test_a_long_prompt_goes_to_two_workers_where_its_chunks_would_hold_others_up():
    cluster = Cluster(p="prefill", d="decode")
    for _ in range(20):
        cluster.busy("d", 500, phase=Phase.DECODE, slo_s=0.03)
        cluster.busy("p", 300, phase=Phase.DECODE, slo_s=0.03)
    assert names(cluster.place(16_000, ttft=5.0, tpot=0.03)) == ("p", "d")


def test_a_prompt_that_is_cached_where_it_will_decode_stays_there():
    cluster = Cluster(p="prefill", d="decode")
    cluster.cached = {"d": 7990}
    assert names(cluster.place(8000)) == ("d",)


def test_one_worker_takes_what_the_queue_of_the_prefill_pool_would_make_wait():
    cluster = Cluster(p="prefill", d="decode")
    cluster.busy("p", 40_000)
    assert names(cluster.place(40_000)) == ("d",)


def test_roles_are_kept_to_where_they_must_be():
    cluster = Cluster(p="prefill", d="decode")
    cluster.cached = {"d": 7990}
    assert names(cluster.place(8000, any_role=False)) == ("p", "d")


def test_a_cached_prefix_wins_until_its_queue_costs_more_than_computing_again():
    cluster = Cluster(a="aggregated", b="aggregated")
    cluster.cached = {"a": 8000}
    placed = []
    for _ in range(10):
        found = cluster.place(9000)
        placed.append(names(found)[0])
        cluster.take(found, 9000)
    assert placed[:2] == ["a", "a"]
    assert "b" in placed


def test_equal_workers_are_used_in_turn():
    cluster = Cluster(a="aggregated", b="aggregated", c="aggregated", d="aggregated")
    used = Counter[str]()
    for _ in range(8):
        cluster.now_s += 0.001
        found = cluster.place(1000)
        used.update(names(found))
        cluster.take(found, 1000)
    assert set(used.values()) == {2}


def test_a_slow_worker_gets_less():
    cluster = Cluster(a="aggregated")
    cluster.join("slow", Role.AGGREGATED, StepCosts(0.02, 5e-4, 2e-3, 5e-7, 5e-9))
    placed = Counter[str]()
    for _ in range(24):
        found = cluster.place(2000)
        placed.update(names(found))
        cluster.take(found, 2000)
    assert placed["a"] > 2 * placed["slow"]


def test_objectives_decide_before_cost_does():
    cluster = Cluster(a="aggregated", b="aggregated")
    cluster.cached = {"a": 4000}
    cluster.busy("a", 5000)
    cheap = cluster.place(5000)
    urgent = cluster.place(5000, ttft=0.9)
    assert isinstance(cheap, Placement)
    assert isinstance(urgent, Placement)
    assert urgent.forecast is not None
    assert cheap.forecast is not None
    assert urgent.forecast.meets >= 0.5
    assert cheap.forecast.meets == 1.0


def test_an_adapter_stays_where_it_is_loaded_until_that_costs_more_than_loading_it():
    cluster, at = Cluster(a="aggregated", b="aggregated"), frozenset({WorkerId("b")})
    for _ in range(3):
        found = cluster.place(100, at=at)
        assert names(found) == ("b",)
        cluster.take(found, 100)
    cluster.busy("b", 40_000)
    assert names(cluster.place(50_000, at=at)) == ("a",)


def test_the_reason_has_the_seconds():
    found = Cluster(p="prefill", d="decode").place(2000)
    assert isinstance(found, Placement)
    assert found.forecast is not None
    assert f"TTFT {found.forecast.ttft_s:.3f} s" in found.reason
    assert "TPOT" in found.reason


def test_without_a_pool_it_falls_back_or_says_what_is_missing():
    cluster = Cluster(p="prefill")
    found = cluster.place()
    assert isinstance(found, Placement)
    assert found.is_fallback
    assert cluster.place(fallback_to_other_pool=False) == NoPlace(
        "there is no decode worker of a compatible fingerprint"
    )
    assert Cluster().place() == NoPlace("no worker takes new sequences")
    assert cluster.place(100_000) == NoPlace("the sequence is longer than any worker can hold", is_final=True)


ROLES = st.sampled_from(["prefill", "decode", "aggregated"])


@settings(max_examples=60, deadline=None)
@given(
    workers=st.lists(st.tuples(ROLES, st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=30),
    tokens=st.integers(1, 59_000),
    seed=st.integers(0, 99),
)
def test_what_may_not_be_chosen_never_is(workers, tokens, seed):
    """Draining workers, those that refused and full ones are not chosen; two aggregated ones are no pair."""
    cluster, rng = Cluster(), random.Random(seed)
    for number, (role, is_draining, has_refused, is_full) in enumerate(workers):
        name = f"w{number}"
        cluster.join(name, Role(role), fingerprint=rng.choice("fg"))
        worker = cluster.worker(name)
        worker.on_report(
            LoadReport(Role(role), is_draining, 0 if is_full else 4000, 0, 0, 0, 0.01), now_s=1.0
        )
        if has_refused:
            worker.refused(is_draining=False)
    found = cluster.place(tokens)
    if isinstance(found, NoPlace):
        return
    phases = found.phases
    for worker_id, phase in phases.items():
        worker = cluster.view[worker_id]
        assert not worker.facts.is_draining
        assert not worker.load.is_refusing
        assert phase is Phase.PREFILL or worker.load.free_blocks >= tokens // 16
    if len(phases) == 2:
        pair = [cluster.view[w] for w in phases]
        assert len({w.hello.fingerprint for w in pair}) == 1
        assert [w.facts.role for w in pair] != [Role.AGGREGATED, Role.AGGREGATED]


def test_who_failed_is_chosen_last():
    cluster = Cluster(a="aggregated", b="aggregated")
    cluster.cached = {"a": 1990}
    assert names(cluster.place(2000)) == ("a",)
    assert names(cluster.place(2000, avoid="a")) == ("b",)


@pytest.mark.parametrize("count", [40, 1000])
def test_a_decision_looks_at_a_bounded_number_of_workers(count, monkeypatch):
    cluster = Cluster()
    for number in range(count):
        cluster.join(f"w{number:04}", Role.PREFILL if number % 2 else Role.DECODE)
    cluster.cached = {f"w{number:04}": 1000 + number for number in range(count)}
    looked = Counter[str]()
    predict = cluster.predictor.prefill

    def counted(worker, *args, **kw):
        looked[worker.worker_id] += 1
        return predict(worker, *args, **kw)

    monkeypatch.setattr(cluster.predictor, "prefill", counted)
    assert isinstance(cluster.place(2000), Placement)
    assert len(looked) <= 2 * (LEAST_BUSY + HOLDERS + SAMPLED)
    assert max(looked.values()) == 1


def test_a_worker_whose_last_room_is_for_others_gets_nothing_even_if_it_is_the_only_one():
    for roles in ({"d": "decode", "p": "prefill"}, {"b": "aggregated"}):
        cluster = Cluster(**roles)
        kept = next(name for name in roles if name != "p")
        found = cluster.place(any_role=False, kept=frozenset({WorkerId(kept)}))
        assert isinstance(found, NoPlace)
        assert not found.is_final
        assert isinstance(cluster.place(any_role=False), Placement)


def test_a_pair_goes_round_the_worker_that_keeps_room():
    cluster = Cluster(p="prefill", d="decode", e="decode")
    for kept in ("d", "e"):
        found = cluster.place(tokens=20_000, any_role=False, kept=frozenset({WorkerId(kept)}))
        assert isinstance(found, Placement)
        assert found.decode is not None
        assert found.decode.worker_id != kept
