"""Tokenising as the model's folder says, without holding anybody up."""

import asyncio
import json
import threading

import pytest
import transformers

from baton.core.errors import ClientError, QueueFull, SetupError
from router import tokenizer as module
from router.model_card import read_model_card
from router.tokenizer import Tokenizer
from tests.models import EOS_ID
from tests.unit.router.http_fakes import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(str(folder))


async def test_text_comes_back(tokenizer):
    text = "Grüße aus Köln! 你好 🙂\n\n  two spaces ."
    assert tokenizer.decode(list(await tokenizer.encode(text))) == text


async def test_a_chat_is_tokenised_as_transformers_does(tokenizer, folder):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hé"}]
    theirs = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )
    assert list(await tokenizer.encode_chat(messages)) == list(theirs["input_ids"])


async def test_what_the_template_refuses_is_the_clients_error(tokenizer):
    with pytest.raises(ClientError, match="tool") as error:
        await tokenizer.encode_chat([{"role": "tool", "content": "x"}])
    assert error.value.param == "messages"


async def test_many_threads_agree(tokenizer):
    texts = [f"text number {i} " * 50 for i in range(100)]
    together = await asyncio.gather(*map(tokenizer.encode, texts))
    assert together == [tokenizer._encode(text, with_special=True) for text in texts]


async def test_waiting_texts_are_bounded_and_the_loop_goes_on(folder, monkeypatch):
    monkeypatch.setattr(module, "WAITING_MAX", 3)
    tokenizer = Tokenizer.load(str(folder))
    release = threading.Event()
    stuck = [asyncio.create_task(tokenizer._in_thread(lambda: release.wait(20))) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await tokenizer.encode("one more")
    release.set()
    await asyncio.gather(*stuck)
    assert await tokenizer.encode("now")
    await tokenizer.close()


def test_special_tokens_are_known(tokenizer):
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}


def test_the_generation_config_says_what_ends_a_text(tmp_path):
    config = {"max_position_embeddings": 64, "vocab_size": 512, "eos_token_id": EOS_ID}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_card(tmp_path).eos_token_ids == (EOS_ID,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_model_card(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"vocab_size": 5}', '{"max_position_embeddings": "x"}'])
def test_an_unusable_config_is_a_setup_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SetupError):
        read_model_card(tmp_path)


def test_a_card_of_a_text_model_inside_another(tmp_path):
    inner = {"max_position_embeddings": 64, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": inner, "eos_token_id": 3}))
    card = read_model_card(tmp_path)
    assert (card.context_tokens, card.vocab_size, card.eos_token_ids) == (64, 512, (3,))
