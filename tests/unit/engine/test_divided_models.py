"""Every family gives the tokens of transformers when it is divided over tensor ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from baton.core.sampling import SamplingParams
from engine.execution.executor import Executor
from engine.loading.load import LoadedModel, load_model
from engine.model_files.division import divide_layers
from engine.model_files.read_spec import load_spec
from tests.models import Kind, make_model
from tests.thread_ranks import ThreadGroup, run_ranks
from tests.unit.engine.driver import Driver, load
from tests.unit.engine.test_families import DEEPSEEK_YARN, LONGROPE, TWO_ROPES, prompt

GENERATED = SamplingParams(max_tokens=12)
MODELS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-uneven-vocabulary": ("llama", {"vocab": 531, "tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {"rope_parameters": TWO_ROPES}),
    "mixtral": ("mixtral", {}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen3-moe": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "deepseek-v2": ("deepseek_v2", {}),
    "deepseek-v2-lite": ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek-v3": ("deepseek_v3", {"rope_parameters": DEEPSEEK_YARN}),
    "gpt-oss": ("gpt_oss", {}),
}


def expected_tokens(folder: Path, tokens: tuple[int, ...]) -> list[int]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([tokens])
    options = {"max_new_tokens": GENERATED.max_tokens, "do_sample": False, "pad_token_id": 0}
    made = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return made[0, len(tokens) :].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_transformers_at_tensor_2_and_4(tmp_path: Path, name: str) -> None:
    """Two of four ranks hold the same key-value head. Prompts are computed whole, in chunks, and together."""
    kind, changes = MODELS[name]
    folder = make_model(tmp_path, kind, with_tokenizer=False, **changes)
    prompts = [prompt(36), prompt(130)]
    expected = [expected_tokens(folder, tokens) for tokens in prompts]

    def generate(group: ThreadGroup) -> list[list[int]]:
        kernels = "native" if group.size == 2 else "torch"
        driver = Driver(load(folder, group=group, kernels=kernels, kv_bytes=2**21))
        cold = driver.generate(prompts[0], GENERATED)
        running = [driver.start(tokens, GENERATED) for tokens in prompts]
        driver.finish(*running, chunk=33)
        return [cold, *(one.generated for one in running)]

    for size in (2, 4):
        assert run_ranks(size, generate) == [[expected[0], *expected]] * size


@pytest.mark.parametrize("has_rows", [False, True])
def test_a_step_ends_when_all_ranks_have_written_their_kv(tmp_path: Path, has_rows: bool) -> None:
    """Peers read the KV of all ranks as soon as one of them, the leader, has finished a step. So the last KV
    of every rank is followed by a sum, which waits for all."""
    folder = make_model(tmp_path, "llama", with_tokenizer=False)

    def last_calls(group: ThreadGroup) -> list[str]:
        calls: list[str] = []
        executor = load(folder, group=group, kv_bytes=2**21)
        kernels: Any = executor.kernels
        ranks: Any = group

        def record(name: str, call: Any) -> Any:
            def recorded(*args: Any, **fields: Any) -> Any:
                calls.append(name)
                return call(*args, **fields)

            return recorded

        kernels.rotate_and_store = record("write", kernels.rotate_and_store)
        ranks.all_reduce_ = record("sum", ranks.all_reduce_)
        driver = Driver(executor)
        driver.step((driver.start(prompt(36), GENERATED), 36 if has_rows else 20))
        return calls

    for calls in run_ranks(2, last_calls):
        assert "write" in calls
        assert "sum" in calls[len(calls) - calls[::-1].index("write") :]


class Chain:
    """The stages of a pipeline, one after another, as one model."""

    def __init__(self, stages: list[LoadedModel]) -> None:
        self._stages: list[Any] = [stage.model for stage in stages]
        self.expert_counts = None

    def forward(self, tokens, layout, rows):
        hidden = None
        for stage in self._stages:
            hidden = stage.forward(tokens, layout, rows, hidden=hidden)
        return hidden

    def logits(self, hidden):
        return self._stages[-1].logits(hidden)


@pytest.mark.parametrize(
    ("name", "stages"),
    [("llama", 3), ("qwen2", 2), ("gemma3", 2), ("deepseek-v2", 3), ("gpt-oss", 2), ("phi3", 2)],
)
def test_tokens_equal_transformers_in_stages(tmp_path: Path, name: str, stages: int) -> None:
    """One rank per stage, and two. The first stage of deepseek-v2 has no experts."""
    kind, changes = MODELS[name]
    if kind != "gemma3":
        changes = {**changes, "num_hidden_layers": 3}
    folder = make_model(tmp_path, kind, with_tokenizer=False, **changes)
    tokens = prompt(70)
    expected = expected_tokens(folder, tokens)
    engine = EngineConfig(kv_bytes=2**21, block_tokens=16, threads=1)
    ranges = divide_layers([1.0] * load_spec(folder).layer_count, stages)

    def generate(group: ThreadGroup) -> list[int]:
        model = ModelConfig(path=str(folder))
        loaded = [load_model(model, engine, group=group, layers=layers) for layers in ranges]
        blocks = {one.kv.geometry.block_bytes // one.kv.geometry.layer_count for one in loaded}
        assert len(blocks) == 1
        executor = Executor(loaded[0], engine)
        executor._model = Chain(loaded)
        return Driver(executor).generate(tokens, GENERATED, chunk=33)

    for size in (1, 2):
        assert run_ranks(size, generate) == [expected] * size


def test_quantised_kv_gives_the_tokens_of_one_rank(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama", with_tokenizer=False)

    def generate(group: ThreadGroup) -> list[int]:
        driver = Driver(load(folder, group=group, kv_bytes=2**21, kv_dtype="int8"))
        return driver.generate(prompt(70), GENERATED, chunk=33)

    (one,) = run_ranks(1, generate)
    assert run_ranks(2, generate) == [one] * 2


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "deepseek-v3"])
def test_bfloat16_is_as_close_to_float32_as_on_one_rank(tmp_path: Path, name: str) -> None:
    kind, changes = MODELS[name]
    folder = make_model(tmp_path, kind, with_tokenizer=False, **changes)

    def logits(group: ThreadGroup, dtype: str) -> torch.Tensor:
        executor = load(folder, group=group, kv_bytes=2**21, dtype=dtype)
        return torch.cat(list(executor.logits_of(prompt(70), chunk_tokens=33)))

    (exact,) = run_ranks(1, lambda group: logits(group, "float32"))
    first, second = run_ranks(2, lambda group: logits(group, "bfloat16"))
    assert torch.equal(first, second)
    errors = (first - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert errors.median() < 0.06
