"""Models whose experts are on ranks of their own give the tokens of transformers."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from baton.config.experts import ExpertsConfig
from engine.execution.executor import Executor
from engine.kernels.interface import BatchLayout, Span
from engine.loading.load import load_model
from engine.models.halves import halves_of
from tests.expert_ranks import LocalExperts, local_experts
from tests.models import Kind, make_model
from tests.thread_ranks import ThreadGroup, run_ranks
from tests.unit.engine.driver import Driver, load
from tests.unit.engine.test_divided_models import GENERATED, expected_tokens
from tests.unit.engine.test_families import prompt

MODELS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 16}),
    "qwen2-moe": ("qwen2_moe", {"num_experts": 24, "num_experts_per_tok": 4, "num_hidden_layers": 3}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 64, "num_experts_per_tok": 8}),
    "deepseek-v2": ("deepseek_v2", {"num_hidden_layers": 3}),
    "deepseek-v3": (
        "deepseek_v3",
        {"n_routed_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 3},
    ),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 16}),
}
NAMES = ("a", "b", "c", "d")


def connected(
    experts: LocalExperts, folder: Path, *, kernels: str = "native", group: Any = None, **model: Any
):
    engine = EngineConfig(kv_bytes=2**21, block_tokens=16, threads=1, kernels=kernels)
    config = ModelConfig(path=str(folder), **model)
    return Driver(Executor(load_model(config, engine, group=group, routed=experts.routed), engine))


def generated(driver: Driver, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Tokens of each prompt alone, then of all together in chunks."""
    cold = [driver.generate(tokens, GENERATED) for tokens in prompts]
    running = [driver.start(tokens, GENERATED) for tokens in prompts]
    driver.finish(*running, chunk=33)
    return [*cold, *(one.generated for one in running)]


@pytest.mark.parametrize("rank_count", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_transformers(tmp_path: Path, name: str, rank_count: int) -> None:
    kind, changes = MODELS[name]
    folder = make_model(tmp_path, kind, with_tokenizer=False, **changes)
    prompts = [prompt(36), prompt(130)]
    expected = [expected_tokens(folder, tokens) for tokens in prompts]
    with local_experts(folder, NAMES[:rank_count]) as experts:
        driver = connected(experts, folder)
        assert generated(driver, prompts) == [*expected, *expected]
        assert all(rank.rows for rank in experts.ranks.values())
        assert driver.executor.expert_counts.read().sum() == experts.callers[0].stats().pairs


@pytest.mark.parametrize("rows", ["exact", "model", "int8"])
@pytest.mark.parametrize("is_far", [False, True])
def test_rows_travel_in_each_kind_and_over_tcp(tmp_path: Path, rows: Any, is_far: bool) -> None:
    """Exact rows give the tokens of a worker that holds all experts, bit by bit, in bfloat16 too."""
    folder = make_model(tmp_path, "qwen3_moe", dtype="bfloat16", with_tokenizer=False)
    prompts = [prompt(36), prompt(70)]
    whole = generated(Driver(load(folder, kernels="native")), prompts)
    config = ExpertsConfig(rows=rows)
    with local_experts(folder, config=config, is_far=is_far) as experts:
        found = generated(connected(experts, folder), prompts)
    if rows == "exact":
        assert found == whole
    assert [len(tokens) for tokens in found] == [len(tokens) for tokens in whole]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_experts_equal_those_of_one_worker(tmp_path: Path, quantization: str) -> None:
    folder = make_model(tmp_path, "mixtral", with_tokenizer=False, num_local_experts=8)
    prompts = [prompt(36)]
    whole = generated(Driver(load(folder, kernels="native", quantization=quantization)), prompts)
    model = ModelConfig(path=str(folder), quantization=quantization)
    with local_experts(folder, model=model) as experts:
        assert generated(connected(experts, folder, quantization=quantization), prompts) == whole


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_ranks_with_other_kernels(tmp_path: Path, kind: Kind) -> None:
    """A rank whose kernels are not the native ones computes batch by batch through their interface."""
    folder = make_model(tmp_path, kind, with_tokenizer=False)
    expected = expected_tokens(folder, prompt(36))
    with local_experts(folder, kernels="torch") as experts:
        assert generated(connected(experts, folder, kernels="torch"), [prompt(36)]) == [expected] * 2


def test_attention_of_two_tensor_ranks(tmp_path: Path) -> None:
    """Each rank sends its part of the rows."""
    folder = make_model(
        tmp_path, "deepseek_v3", with_tokenizer=False, n_routed_experts=16, num_hidden_layers=3
    )
    prompts = [prompt(36), prompt(130)]
    expected = [expected_tokens(folder, tokens) for tokens in prompts]
    with local_experts(folder) as experts:

        def generate(group: ThreadGroup) -> list[list[int]]:
            return generated(connected(experts, folder, group=group), prompts)

        assert run_ranks(2, generate) == [[*expected, *expected]] * 2
        sent = [caller.stats().pairs for caller in experts.callers]
        assert min(sent) > 0.3 * max(sent)


def test_experts_migrate_between_steps(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "mixtral", with_tokenizer=False, num_local_experts=16)
    expected = expected_tokens(folder, prompt(50))
    with local_experts(folder, NAMES[:3]) as experts:
        driver = connected(experts, folder)
        running = driver.start(prompt(50), GENERATED)
        driver.step((running, 50))
        everything = experts.everything()
        for turn in range(1, GENERATED.max_tokens):
            held = {
                name: [e for e in everything if turn % 3 in ((e + place) % 3, (e * 7 + place) % 3)]
                for place, name in enumerate(NAMES[:3])
            }
            missing = set(everything) - {e for names in held.values() for e in names}
            held["a"] += sorted(missing)
            experts.announce(held)
            driver.step((running, 1))
        assert running.generated == expected
        assert experts.callers[0].epoch == experts.epoch


def test_memory_of_ranks_and_bytes_of_rows(tmp_path: Path) -> None:
    """Rows travel once per rank, results once per expert; each rank holds its part of the experts."""
    hidden, chosen = 64, 4
    folder = make_model(
        tmp_path, "qwen3_moe", with_tokenizer=False, num_experts=16, num_experts_per_tok=chosen
    )
    with local_experts(folder, NAMES) as experts:
        caller = experts.caller(hidden, torch.float32)
        random = torch.Generator().manual_seed(3)
        x = torch.randn((50, hidden), generator=random)
        picks = torch.stack([torch.randperm(16, generator=random)[:chosen] for _ in range(50)])
        sent = caller.begin(1, x, picks)
        caller.finish(sent, torch.ones((50, chosen)))
        stats = caller.stats()
        ranks_of_rows = sum(len({e % 4 for e in row}) for row in picks.tolist())
        assert stats.rows == ranks_of_rows
        assert stats.row_bytes == ranks_of_rows * hidden * 4
        assert stats.pairs == 50 * chosen
        assert stats.result_bytes == 50 * chosen * hidden * 4
        assert {len(rank.held) for rank in experts.ranks.values()} == {2 * 16 // 4}


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_two_halves_in_turn_give_the_same_tokens(
    tmp_path: Path, kind: Kind, tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of chunks, of decodes, and of both are divided; a long chunk is divided within itself."""
    halved: list[int] = []

    def counted(*args: Any) -> Any:
        found = halves_of(*args)
        halved.append(found is not None)
        return found

    monkeypatch.setattr("engine.models.decoder.OVERLAP_ROWS_MIN", 1e-9)
    monkeypatch.setattr("engine.models.decoder.halves_of", counted)
    folder = make_model(tmp_path, kind, with_tokenizer=False, num_hidden_layers=3)
    prompts = [prompt(36), prompt(130), prompt(61)]
    expected = [expected_tokens(folder, tokens) for tokens in prompts]
    with local_experts(folder) as experts:

        def generate(group: ThreadGroup | None) -> list[list[int]]:
            return generated(connected(experts, folder, group=group), prompts)

        found = [generate(None)] if tensor == 1 else run_ranks(tensor, generate)
    assert found == [[*expected, *expected]] * tensor
    assert sum(halved) > 10


def test_halves_have_the_same_tokens_in_order() -> None:
    spans = [Span(7, 1, (0,)), Span(9, 1, (1,)), Span(16, 40, (2, 3, 4, 5)), Span(0, 5, (6,))]
    layout = BatchLayout.of(spans)
    found = halves_of(layout, 16)
    assert found is not None
    first, second = found
    assert abs(first.token_count - second.token_count) <= 2
    positions = [*first.positions(), *second.positions()]
    assert positions == list(layout.positions())
    for span in (*first.spans, *second.spans):
        assert len(span.block_ids) == -(-span.context_tokens // 16)
    assert halves_of(BatchLayout.of([Span(3, 1, (0,))]), 16) is None
    assert halves_of(BatchLayout.of([Span(3, 2, (0,))]), 16) is None


@pytest.mark.parametrize(("rows", "most"), [("model", 0.004), ("int8", 0.02)])
def test_rows_of_fewer_bytes_change_results_a_little(tmp_path: Path, rows: Any, most: float) -> None:
    """The relative error of a layer's results, as the root of mean squares."""
    folder = make_model(tmp_path, "qwen3_moe", dtype="bfloat16", with_tokenizer=False)
    random = torch.Generator().manual_seed(4)
    x = torch.randn((200, 64), generator=random).bfloat16()
    picks = torch.stack([torch.randperm(8, generator=random)[:2] for _ in range(200)])
    with local_experts(folder) as experts:

        def results(kind: Any) -> torch.Tensor:
            experts.config = ExpertsConfig(rows=kind)
            caller = experts.caller(64, torch.bfloat16)
            sent = caller.begin(0, x, picks)
            caller.finish(sent, torch.ones((200, 2)))
            return sent.results

        exact, found = results("exact"), results(rows)
    error = float((found - exact).norm() / exact.norm())
    assert 0 < error < most


def test_a_dispatch_that_nobody_finishes_keeps_its_memory(tmp_path: Path) -> None:
    """An error between `begin` and `finish` leaves results to come, which need a place."""
    folder = make_model(tmp_path, "mixtral", with_tokenizer=False)
    with local_experts(folder) as experts:
        caller = experts.caller(64, torch.float32)
        x, picks = torch.randn((300, 64)), torch.randint(0, 4, (300, 2))
        left = weakref.ref(caller.begin(0, x, picks).results)
        gc.collect()
        assert left() is not None
        caller.finish(caller.begin(0, x, picks), torch.ones((300, 2)))
        assert left() is not None
