"""Every family gives the tokens of transformers when it is divided over tensor ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.sampling import SamplingParams
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
