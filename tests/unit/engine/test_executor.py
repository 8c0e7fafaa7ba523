"""Whatever way a batch is put together, the tokens are those of transformers."""

import functools
import random
from pathlib import Path

import pytest
import torch

from baton.core.sampling import SamplingParams
from tests.models import Kind, make_model
from tests.unit.engine.driver import Driver, load

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
SLIDING_HALF = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
MODELS: dict[str, tuple[Kind, dict]] = {
    "llama": ("llama", {}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("mistral", {}),
    "qwen2-tied-bias": ("qwen2", {}),
    "qwen2-half-window": ("qwen2", SLIDING_HALF),
    "qwen3-sharded": ("qwen3", {"shard": True}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
}
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 63, 130, 300)


class Peer:
    """Our engine and transformers over the same folder; transformers' answers are kept."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.driver = Driver(load(path))
        self.reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()
        self.reference.generation_config.eos_token_id = None
        self.expected = functools.cache(self._expected)

    def prompt(self, length: int, *, seed: int = 2) -> tuple[int, ...]:
        """The seed is one where no greedy choice is a tie: in float32 a margin near 1e-6 is noise."""
        return tuple(random.Random(1000 * seed + length).choices(range(5, 512), k=length))

    def _expected(self, prompt: tuple[int, ...], count: int = 64) -> list[int]:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        made = self.reference.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return made[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=MODELS)
def peer(request, tmp_path_factory) -> Peer:
    kind, changes = MODELS[request.param]
    return Peer(make_model(tmp_path_factory.mktemp("model"), kind, with_tokenizer=False, **changes))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Peer:
    return Peer(make_model(tmp_path_factory.mktemp("model"), "llama", with_tokenizer=False))


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_greedy_tokens_equal_transformers(peer: Peer, length: int) -> None:
    prompt = peer.prompt(length)
    assert peer.driver.generate(prompt) == peer.expected(prompt)


@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_a_prompt_in_chunks_gives_the_same_tokens(peer: Peer, chunk: int) -> None:
    prompt = peer.prompt(130)
    assert peer.driver.generate(prompt, chunk=chunk) == peer.expected(prompt)


def test_chunks_and_decodes_mix_in_one_batch(peer: Peer) -> None:
    driver = peer.driver
    sequences = [driver.start(peer.prompt(length)) for length in PROMPT_LENGTHS]
    rng = random.Random(5)
    while going := [s for s in sequences if len(s.generated) < 64]:
        chosen = rng.sample(going, rng.randint(1, len(going)))
        driver.step(*((s, 1 if s.is_prefilled else rng.choice((1, 5, 33, 64, 100))) for s in chosen))
    for sequence in sequences:
        assert sequence.generated == peer.expected(tuple(sequence.prompt))
        driver.free.extend(sequence.blocks)


def test_shared_prefix_blocks_give_the_same_tokens(peer: Peer) -> None:
    driver = peer.driver
    first = driver.start(peer.prompt(130))
    driver.finish(first)
    for kept in (16, 100, 128, 130):
        prompt = (*peer.prompt(130)[:kept], *peer.prompt(20, seed=kept))
        second = driver.start(prompt, like=first)
        assert second.computed == kept // 16 * 16
        driver.finish(second)
        assert second.generated == peer.expected(prompt)
    # And the sequence whose blocks were shared goes on unharmed.
    first.params = SamplingParams(max_tokens=80)
    driver.finish(first)
    assert first.generated == peer.expected(tuple(first.prompt), 80)


def test_a_long_prompt_in_chunks_equals_transformers(llama: Peer) -> None:
    prompt = llama.prompt(3000)
    assert llama.driver.generate(prompt, chunk=512) == llama.expected(prompt)


def test_a_longer_block_table_changes_nothing(llama: Peer) -> None:
    prompt = llama.prompt(63)
    sequence = llama.driver.start(prompt)
    sequence.blocks = [llama.driver.free.pop() for _ in range(40)]
    llama.driver.finish(sequence)
    assert sequence.generated == llama.expected(prompt)


def test_what_a_block_held_before_does_not_matter(tmp_path: Path) -> None:
    """Even if it was not a number: one sequence's overflow must not reach the next."""
    peer = Peer(make_model(tmp_path, "llama", with_tokenizer=False))
    peer.driver.executor.kv.blocks.fill_(float("nan"))
    prompts = [peer.prompt(length) for length in (3, 17, 130)]
    sequences = [peer.driver.start(prompt) for prompt in prompts]
    peer.driver.finish(*sequences, chunk=50)
    assert [s.generated for s in sequences] == [peer.expected(prompt) for prompt in prompts]


def test_blocks_copied_to_another_pool_go_on_with_the_same_tokens(tmp_path: Path) -> None:
    """The hand-over: prefill here, bytes moved block by block, decode there."""
    peer = Peer(make_model(tmp_path, "qwen3", with_tokenizer=False))
    other = Driver(load(tmp_path))
    assert other.executor.fingerprint == peer.driver.executor.fingerprint
    prompt = peer.prompt(130)
    source = peer.driver.start(prompt)
    peer.driver.step((source, len(prompt)))
    target = other.start(prompt)
    target.computed, target.generated = source.computed, list(source.generated)
    target.blocks = [other.free.pop() for _ in source.blocks]
    for there, here in zip(source.blocks, target.blocks, strict=True):
        other.executor.kv.block_view(here).copy_(peer.driver.executor.kv.block_view(there))
    other.finish(target)
    assert target.generated == peer.expected(prompt)


def test_sampled_tokens_do_not_depend_on_batch_or_chunks(llama: Peer) -> None:
    params = [SamplingParams(max_tokens=24, temperature=1.5, top_p=0.95, seed=seed) for seed in range(6)]
    prompts = [llama.prompt(20 + 9 * seed, seed=seed) for seed in range(6)]
    alone = [llama.driver.generate(p, s, chunk=7) for p, s in zip(prompts, params, strict=True)]
    together = [llama.driver.start(p, s) for p, s in zip(prompts, params, strict=True)]
    llama.driver.finish(*together)
    assert [s.generated for s in together] == alone
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


def test_warm_up_leaves_no_trace(tmp_path: Path) -> None:
    peer = Peer(make_model(tmp_path, "llama", with_tokenizer=False))
    peer.driver.executor.warm_up()
    prompt = peer.prompt(63)
    assert peer.driver.generate(prompt) == peer.expected(prompt)


def test_an_empty_plan_computes_nothing(llama: Peer) -> None:
    llama.driver.step()


def test_bfloat16_logits_are_close_to_float32(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", with_tokenizer=False, initializer_range=0.05)
    exact, rounded = load(tmp_path), load(tmp_path, dtype="bfloat16")
    assert rounded.geometry.dtype == "bfloat16"
    assert rounded.fingerprint != exact.fingerprint
    tokens = random.Random(0).choices(range(512), k=100)
    both = [logits_of(executor, tokens) for executor in (exact, rounded)]
    error = (both[0] - both[1]).norm() / both[0].norm()
    assert error < 0.03


def logits_of(executor, tokens) -> torch.Tensor:
    """Logits after each token, float32 [T, vocab]."""
    from engine.kernels.interface import BatchLayout, Span

    blocks = tuple(range(executor.geometry.blocks_for(len(tokens))))
    with torch.inference_mode():
        layout = BatchLayout.of([Span(0, len(tokens), blocks)])
        rows = torch.arange(len(tokens))
        return executor._model.logits(executor._model.forward(torch.tensor(tokens), layout, rows))


@pytest.mark.parametrize(
    "rope",
    [
        YARN,
        {**YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        LLAMA3_ROPE,
    ],
    ids=lambda rope: "-".join(map(str, rope.values())),
)
def test_rope_variants_give_the_logits_of_transformers(tmp_path: Path, rope: dict) -> None:
    path = make_model(tmp_path, "llama", with_tokenizer=False, rope_parameters=rope)
    peer = Peer(path)
    prompt = list(peer.prompt(400))
    with torch.inference_mode():
        expected = peer.reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits_of(peer.driver.executor, prompt), expected, atol=2e-3, rtol=2e-3)
