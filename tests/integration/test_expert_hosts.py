"""Expert ranks on Ray nodes in network namespaces, with mutual TLS: tokens, a cut link, a lost host."""

from typing import Any

import pytest

from tests.integration.expert_hosts import PROMPTS, RANK, STREAMED, WORKER
from tests.integration.ray_hosts import run_drill, why_not
from tests.integration.test_tokens import Reference
from tests.models import make_model

pytest.importorskip("cryptography")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(500),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

Report = dict[str, Any]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, Report]:
    """Transformers with the model, and what the drill saw."""
    folder = tmp_path_factory.mktemp("experts")
    model = make_model(
        folder / "model", "qwen3_moe", seed=3, num_experts=16, num_experts_per_tok=4, num_hidden_layers=3
    )
    report = run_drill("tests.integration.expert_hosts", folder / "drill", str(model), timeout_s=480)
    return Reference(model), report


def check_tokens(reference: Reference, part: Report) -> None:
    for name, count in (("tokens", 24), ("streamed", STREAMED), ("tokens_after", 24)):
        for prompt, tokens in zip(PROMPTS, part[name], strict=True):
            assert len(tokens) == count
            assert tokens == reference.greedy(prompt, tokens)
    assert part["under_way"] > 0
    assert part["left"] == {}


def check_rows(part: Report) -> None:
    """Every rank computed, and workers sent what they computed. Hosts share nothing but the network."""
    assert sorted(part["rows"]) == ["b", "c"]
    assert all(part["rows"].values())
    sent = sum(accounts["experts.dispatched_rows"] for accounts in part["accounts"])
    assert sent > 0
    assert all(accounts["experts.dispatched_bytes"] > 0 for accounts in part["accounts"])


def test_ranks_of_two_hosts_and_a_cut_link(seen: tuple[Reference, Report]) -> None:
    """The link is whole again later, and the rank that was left out is back."""
    reference, report = seen
    part = report["ranks"]
    assert sorted(part["placed"].values()) == [[RANK], [RANK, WORKER]]
    check_tokens(reference, part)
    check_rows(part)
    assert part["losses"] >= 1


def test_doors_speak_tls_and_know_who_comes(seen: tuple[Reference, Report]) -> None:
    knocked = seen[1]["ranks"]["knocked"]
    assert knocked
    for said in knocked:
        assert said["tls"] == "TLSv1.3"
        assert said["greeting"] == 0, "no answer to a greeting without a secret"


def test_a_rank_beside_each_worker_and_a_lost_host(seen: tuple[Reference, Report]) -> None:
    """The other host takes all of it."""
    reference, report = seen
    part = report["workers"]
    assert sorted(part["placed"].values()) == [[RANK, WORKER]] * 2
    assert part["placed_again"] == {"b": [RANK, RANK, WORKER, WORKER]}
    check_tokens(reference, part)
    check_rows(part)
    assert len(part["accounts"]) == 2
    assert part["losses"] >= 1
