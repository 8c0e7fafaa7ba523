"""A draft model's tokens are its own greedy continuations, and change speed alone."""

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.core.ids import SeqKey
from baton.core.sampling import SamplingParams
from engine.execution.draft import DraftRequest
from engine.execution.executor import Executor
from tests.models import make_model
from tests.unit.engine.request_loop import Asked, Loop

PROMPT = [7, 300, 41, 7, 99, 250, 12, 7, 300, 41, 88, 5, 63, 171, 402, 33, 9, 9, 120]
GREEDY = SamplingParams(30, ignore_eos=True)
SAMPLED = SamplingParams(30, temperature=0.7, seed=4, frequency_penalty=0.5, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    large = make_model(tmp_path_factory.mktemp("large"), "llama", num_hidden_layers=1)
    small = make_model(tmp_path_factory.mktemp("small"), "qwen3", seed=5, num_hidden_layers=1)
    return large, small


def load(large, small, *, draft_kv_bytes=2**20, **engine):
    config = EngineConfig(
        kv_bytes=4 * 2**20,
        block_tokens=16,
        threads=1,
        speculation="draft",
        draft_model=str(small),
        draft_kv_bytes=draft_kv_bytes,
        **engine,
    )
    return Executor.load(ModelConfig(path=str(large)), config)


def asked(params, prompt=PROMPT, **fields):
    """Draft tokens are those that the last step brought."""
    one = Asked(list(prompt), params, want_drafts=4, **fields)
    one.draft = lambda tokens: one.drafts
    return one


def alone(executor, params, prompt=PROMPT):
    return Loop(executor).finish(Asked(list(prompt), params))[0]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_tokens_are_the_same_with_any_draft_model(folders, params):
    large, small = folders
    for draft in (small, large):
        executor = load(large, draft)
        one, other = asked(params), asked(params, PROMPT[::-1], chunk=6)
        tokens = Loop(executor).finish(one, other)
        assert tokens == [alone(executor, params), alone(executor, params, PROMPT[::-1])]
        if draft is large and params.is_greedy:
            assert one.steps == 1 + 29 / 5 + 0.2  # every draft token is right: five tokens a step
        assert len(executor._draft._free) == executor._draft._loaded.kv.block_count


def test_drafts_are_the_small_models_greedy_continuation(folders):
    large, small = folders
    executor = load(large, small, step_tokens_max=8)
    peer = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32).eval()
    loop = Loop(executor)
    one, other = asked(GREEDY, chunk=5), asked(GREEDY, PROMPT * 3, chunk=30)
    answered = 0
    for _ in range(14):
        loop.step(*(x for x in (one, other) if not x.is_over))
        for x in (one, other):
            tokens = list(x.tokens)
            answered += bool(x.drafts)
            for draft in x.drafts:
                with torch.inference_mode():
                    assert draft == int(peer(torch.tensor([tokens])).logits[0, -1].argmax())
                tokens.append(draft)
    assert answered > 8
    assert other.drafts, "57 tokens at 8 a step have been read by now"


def test_a_pool_too_small_for_all_serves_the_latest_and_forgets_nothing_else(folders):
    large, small = folders
    executor = load(large, small, draft_kv_bytes=24 * 1024)
    draft = executor._draft
    assert len(draft._free) == 3
    first, second = SeqKey("first", 0), SeqKey("second", 0)
    draft.begin(first, PROMPT)
    draft.begin(second, PROMPT[::-1])
    want = draft.draft([DraftRequest(first, 3)])
    assert draft.draft([DraftRequest(second, 3)]).keys() == {second}
    assert draft.draft([DraftRequest(first, 3)]) == want
    assert len(draft.draft([DraftRequest(first, 3), DraftRequest(second, 3)])) == 1
    draft.begin(SeqKey("long", 0), PROMPT * 9)
    assert draft.draft([DraftRequest(SeqKey("long", 0), 3)]) == {}
    draft.end([first, second])
    assert len(draft._free) == 3


def test_no_drafts_after_the_last_token(folders):
    large, small = folders
    executor = load(large, small)
    one = asked(msgspec.structs.replace(GREEDY, max_tokens=1))
    Loop(executor).step(one)
    assert one.drafts == ()


def test_another_vocabulary_is_an_error_at_the_start(folders, tmp_path):
    stranger = make_model(tmp_path, "llama", vocab=400, num_hidden_layers=1)
    with pytest.raises(SetupError, match="vocabulary"):
        load(folders[0], stranger)
    with pytest.raises(SetupError, match="needs engine"):
        load(folders[0], "")
