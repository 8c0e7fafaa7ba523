"""A model's own sampling: where it comes from, and which request it reaches."""

import json

import pytest

from baton.config import Config
from baton.core.errors import SetupError
from router.openai.call import RequestLimits
from router.openai.requests import parse_chat, parse_completion
from router.openai.sampling import sampling_params
from router.process import _tokenizer
from router.text.model_card import ModelCard
from router.text.sampling_defaults import SamplingDefaults, read_sampling_defaults
from tests.unit.router.http_fakes import make_folder

OWN = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)


def limits(own):
    return RequestLimits(ModelCard(1000, 100, (1,), sampling=own), 16, 256)


def sampled(own=OWN, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    call = parse_chat(json.dumps(body).encode(), limits(own))
    return sampling_params(call, choice_index=0, prompt_tokens=10, limits=limits(own))


def test_fields_that_are_left_out_have_the_models_values():
    found = sampled()
    assert (found.temperature, found.top_p, found.top_k) == (0.6, 0.9, 20)
    assert (found.min_p, found.repetition_penalty) == (0.1, 1.1)
    assert sampled(SamplingDefaults()).temperature == 1.0


def test_fields_that_are_given_win_even_where_they_are_zero():
    given = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    found = sampled(**given)
    assert (found.temperature, found.top_p, found.top_k) == (0.0, 1.0, 0)
    assert (found.min_p, found.repetition_penalty) == (0.0, 1.0)


def test_max_new_tokens_bounds_every_answer():
    own = SamplingDefaults(max_new_tokens=7)
    assert [sampled(own, **given).max_tokens for given in ({}, {"max_tokens": 50}, {"max_tokens": 5})] == [
        7,
        7,
        5,
    ]


def test_beams_are_scored_by_the_model_alone():
    body = {"model": "m", "prompt": "x", "use_beam_search": True, "n": 2}
    call = parse_completion(json.dumps(body).encode(), limits(OWN))
    assert call.sampling.repetition_penalty == 1.0


def test_the_file_the_overrides_and_neither(tmp_path):
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 50, "do_sample": True, "eos_token_id": [1], "min_p": None})
    )
    read = read_sampling_defaults
    assert read(tmp_path, "auto", {}) == SamplingDefaults(temperature=0.6, top_k=50)
    assert read(tmp_path, "auto", {"temperature": 0.2}) == SamplingDefaults(temperature=0.2, top_k=50)
    for off in ("none", "vllm"):
        assert read(tmp_path, off, {"top_p": 0.5}) == SamplingDefaults(top_p=0.5)
    assert read(tmp_path / "elsewhere", str(tmp_path), {}).temperature == 0.6
    assert read(tmp_path / "elsewhere", "auto", {}) == SamplingDefaults()


@pytest.mark.parametrize(
    ("source", "overrides", "words"),
    [
        ("auto", {}, "temperature must be a number from 0.0 to 2.0, not 'hot'; mend it, or set"),
        ("/nowhere", {}, "/nowhere has no generation_config.json"),
        ("none", {"top_k": 2.5}, "top_k must be a whole number"),
        ("none", {"heat": 1}, "'heat' is none of temperature, top_p"),
    ],
)
def test_what_cannot_be_used_is_a_setup_error(tmp_path, source, overrides, words):
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(SetupError, match=words):
        read_sampling_defaults(tmp_path, source, overrides)


async def test_a_router_reads_them_beside_the_tokenizer(tmp_path):
    folder = make_folder(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 50}')
    model = {"path": str(folder), "generation_overrides": {"top_k": 5}}
    tokenizer = await _tokenizer(Config(model=model))
    assert tokenizer.card.sampling == SamplingDefaults(temperature=0.6, top_k=5)
