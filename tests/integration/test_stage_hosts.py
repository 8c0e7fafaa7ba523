"""Stages of a worker on Ray nodes in network namespaces, with mutual TLS: tokens, hand-over, lost nodes."""

from typing import Any

import pytest

from tests.integration.cluster import bytes_read
from tests.integration.ray_hosts import run_drill, why_not
from tests.integration.stage_hosts import FAULTS, HANDED_OVER, PROMPTS, STREAMED
from tests.integration.test_tokens import Reference
from tests.models import make_model

pytest.importorskip("cryptography")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

Report = dict[str, Any]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, Report]:
    """Transformers with the model, and what the drill saw."""
    folder = tmp_path_factory.mktemp("stages")
    model = make_model(folder / "model", "llama", seed=3, num_hidden_layers=4)
    report = run_drill("tests.integration.stage_hosts", folder / "drill", str(model), timeout_s=580)
    return Reference(model), report


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_of_stages_on_two_hosts_outlives_the_loss_of_either(
    seen: tuple[Reference, Report], fault: str
) -> None:
    reference, report = seen
    part = report[fault]
    for placed in (part["placed"], part["placed_again"]):
        assert sorted(placed.values()) == [["follower"], ["leader"]], "each on a host of its own"
    for prompt, tokens, streamed in zip(PROMPTS, report["tokens"], part["streamed"], strict=True):
        assert len(tokens) == 24
        assert tokens == reference.greedy(prompt, tokens)
        assert len(streamed) == STREAMED
        assert streamed == reference.greedy(prompt, streamed)
    assert part["under_way"] > 0
    assert report["left"] == {}


@pytest.mark.parametrize("staged", HANDED_OVER)
def test_stages_on_two_hosts_hand_over_to_another_worker_and_take_over(
    seen: tuple[Reference, Report], staged: str
) -> None:
    reference, report = seen
    part = report[staged]
    assert sorted(part["placed"].values()) == [["follower"], ["leader"], ["leader"]], "each on its own host"
    for prompt, tokens in zip(PROMPTS, part["tokens"], strict=True):
        assert len(tokens) == 24
        assert tokens == reference.greedy(prompt, tokens)
    accounts = part["accounts"]
    blocks = sum(-(-len(prompt) // 16) for prompt in PROMPTS)
    assert bytes_read(accounts["decode"]) >= blocks * accounts["decode"]["block_bytes"]
    assert accounts["decode"]["step_tokens.prefill"] == 0
    assert accounts["prefill"]["step_tokens.decode"] == 0
    assert not any(n for name, n in accounts["decode"].items() if name.endswith(".reads_failed"))
    assert part["left"] == {}
