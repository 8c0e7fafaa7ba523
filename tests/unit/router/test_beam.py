"""Beam search finds the same beams as transformers."""

import pytest
import torch
import transformers

from router.openai.beam import BeamSearch
from tests.models import model_config


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = transformers.AutoModelForCausalLM.from_config(
            model_config("llama", vocab=24, num_hidden_layers=1, initializer_range=0.4)
        )
    return made.eval()


@torch.inference_mode()
def next_logprobs(model, tokens, count):
    logits = model(torch.tensor([tokens])).logits[0, -1].float()
    top = torch.log_softmax(logits, -1).topk(min(count, logits.numel()))
    return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))


@pytest.mark.parametrize("prompt", [[5, 6, 7], [9], [2, 3, 17, 8]])
@pytest.mark.parametrize(
    ("width", "penalty", "eos"),
    [(1, 1.0, [1]), (2, 1.0, [1]), (4, 1.0, [1, 7, 12]), (4, 0.0, [1, 4]), (3, 2.0, [1, 9]), (5, -1.0, [3])],
)
def test_the_same_hypotheses_as_transformers(model, prompt, width, penalty, eos):
    search = BeamSearch(width=width, length_penalty=penalty, eos_token_ids=eos, max_tokens=10)
    while not search.is_over:
        search.step(
            [next_logprobs(model, prompt + list(b.tokens), search.alternatives) for b in search.running]
        )
    theirs = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), num_beams=width,
        num_return_sequences=width, do_sample=False, max_new_tokens=10, length_penalty=penalty,
        early_stopping=False, eos_token_id=eos, pad_token_id=23, output_scores=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    rows = theirs.sequences[:, len(prompt) :].tolist()
    for found, row in zip(search.ended, rows, strict=True):
        assert list(found.tokens) == row[: len(found.tokens)]
        assert set(row[len(found.tokens) :]) <= {23}
    scores = [found.score for found in search.ended]
    if width > 1:
        assert scores == pytest.approx(theirs.sequences_scores.tolist(), rel=1e-4)
