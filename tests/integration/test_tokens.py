"""The tokens that come out of the HTTP API are those that transformers generates, whatever path they took."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.cluster import Cluster, bytes_read
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NEW_TOKENS = 32
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 100, 129, 200, 333, 500, 800, 1200, 1700, 2400, 3000)
GENERATED = LENGTHS.index(100)
"""The prompt for which transformers also generates, step by step as its users do."""
MODELS = {
    "llama": {"kind": "llama"},
    "qwen2": {"kind": "qwen2"},
    "qwen3-sharded": {"kind": "qwen3", "shard": True},
}


class Reference:
    """transformers gives the likeliest token after every prefix of prompt and answer. An answer of these
    tokens is what it would generate, token for token, and one pass checks it."""

    def __init__(self, path):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.vocab = self.model.config.vocab_size

    @torch.inference_mode()
    def greedy(self, prompt, answer):
        ids = torch.tensor([[*prompt, *answer]])
        return self.model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()

    @torch.inference_mode()
    def generated(self, prompt, count):
        self.model.generation_config.eos_token_id = None
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_transformers(name, tmp_path):
    path = make_model(tmp_path / name, seed=7, **MODELS[name])
    rng = random.Random(name)
    reference = Reference(path)
    prompts = [[rng.randrange(3, reference.vocab) for _ in range(n)] for n in LENGTHS]
    with Cluster(path, model__dtype="float32", engine__block_tokens=16) as cluster:

        def served(prompt):
            answer = cluster.complete(prompt, max_tokens=NEW_TOKENS, ignore_eos=True, return_token_ids=True)
            return answer["choices"][0]["token_ids"], answer["usage"]

        cold = [served(p) for p in prompts]
        expected = [tokens for tokens, _ in cold]
        assert {len(tokens) for tokens in expected} == {NEW_TOKENS}
        assert expected == [reference.greedy(*pair) for pair in zip(prompts, expected, strict=True)]
        assert expected[GENERATED] == reference.generated(prompts[GENERATED], NEW_TOKENS)
        split = cluster.metric("baton_router_placements_total", kind="split")
        assert split == len(prompts)
        decode = cluster.worker("decode").accounts
        blocks = sum(-(-n // 16) for n in LENGTHS)
        assert bytes_read(decode) == blocks * decode["block_bytes"]
        assert decode["step_tokens.prefill"] == 0  # every prompt token was computed remotely

        warm = [served(p) for p in prompts]
        assert [tokens for tokens, _ in warm] == expected
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for _, usage in warm]
        assert cached == [n - 1 for n in LENGTHS]  # part-filled blocks included

        fresh = [[(t + 1) % reference.vocab or 3 for t in p] for p in prompts]
        with ThreadPoolExecutor(8) as pool:
            together = [tokens for tokens, _ in pool.map(served, fresh)]
        assert {len(tokens) for tokens in together} == {NEW_TOKENS}
        assert together == [reference.greedy(*pair) for pair in zip(fresh, together, strict=True)]
        assert cluster.metric("baton_router_placements_total", kind="split") == 3 * len(prompts)
        cluster.assert_idle()
