"""Tokenising by the model's folder, without holding up other requests."""

import asyncio
import json
import threading

import pytest
import tokenizers
import transformers

from baton.core.errors import ClientError, PromptTooLong, QueueFull, SetupError
from router.text import tokenizer as module
from router.text.model_card import read_model_card
from router.text.text_bound import characters_per_token_max
from router.text.tokenizer import Tokenizer
from tests.models import BOS_ID, EOS_ID
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
    assert list((tokenizer.chat_prompt(messages)).tokens) == list(theirs["input_ids"])


async def test_what_the_template_refuses_is_the_clients_error(tokenizer):
    with pytest.raises(ClientError, match="tool") as error:
        tokenizer.chat_prompt([{"role": "tool", "content": "x"}], tool_parser="mistral")
    assert error.value.param == "messages"


async def test_many_threads_agree(tokenizer):
    texts = [f"text number {i} " * 50 for i in range(100)]
    together = await asyncio.gather(*map(tokenizer.encode, texts))
    assert together == [tokenizer.text_ids(text) for text in texts]


async def test_waiting_texts_are_bounded_and_the_loop_goes_on(folder, monkeypatch):
    monkeypatch.setattr(module, "WAITING_MAX", 3)
    tokenizer = Tokenizer.load(str(folder))
    release = threading.Event()
    stuck = [asyncio.create_task(tokenizer.in_thread(lambda: release.wait(20))) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await tokenizer.encode("one more")
    release.set()
    await asyncio.gather(*stuck)
    assert await tokenizer.encode("now")
    await tokenizer.close()


def test_special_tokens_are_known(tokenizer):
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 64,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_the_generation_config_says_what_ends_a_text(tmp_path):
    config = {**LLAMA, "eos_token_id": EOS_ID}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_card(tmp_path).eos_token_ids == (EOS_ID,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_model_card(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"vocab_size": 5}', '{"max_position_embeddings": "x"}'])
def test_an_unusable_config_is_a_setup_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SetupError):
        read_model_card(tmp_path)


def test_a_chat_template_that_is_none_is_a_setup_error_and_not_every_clients(tmp_path):
    folder = make_folder(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text("{# greeting #}\n{% for x in %}")
    with pytest.raises(SetupError, match=r"chat template of .*tiny does not parse: line 2: .*take it out"):
        Tokenizer.load(str(folder))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('I greet nobody') }}")
    assert Tokenizer.load(str(folder)).has_chat_template


def test_a_card_of_a_text_model_inside_another(tmp_path):
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": 3}
    inner = {**LLAMA, "architectures": None}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": inner}))
    card = read_model_card(tmp_path)
    assert (card.context_tokens, card.vocab_size, card.eos_token_ids) == (64, 512, (3,))


# --- what would hold everybody up -----------------------------------------------------------------


async def test_what_cannot_fit_is_refused_before_it_is_tokenised(folder, monkeypatch):
    tokenizer = Tokenizer.load(str(folder))
    tokenizer.limit_context(8)
    longest = tokenizer._characters_per_token
    for text in ("a b c d e f g h i j k l", "x" * (8 * longest + 1)):
        with pytest.raises(PromptTooLong, match="8 tokens") as error:
            await tokenizer.encode(text)
        assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded")
    monkeypatch.setattr(tokenizer, "_rust", None)  # Using either of them would be an error.
    monkeypatch.setattr(tokenizer, "_pretrained", None)
    with pytest.raises(PromptTooLong, match="characters"):
        await tokenizer.encode("x" * (8 * longest + 1))
    await tokenizer.close()


async def test_what_the_quick_encoder_gives_up_on_is_encoded_nevertheless(tokenizer, monkeypatch):
    """The tokenizers library encodes it as a batch, which gives up the interpreter; a single text does
    not."""
    batches = []

    class Spy:
        def __init__(self, rust):
            self._rust = rust

        def encode_batch_fast(self, texts, **options):
            batches.append(texts)
            return self._rust.encode_batch_fast(texts, **options)

    class GivesUp:
        def ids(self, text, *, with_special):
            return None

    expected = tokenizer._rust.encode("one text").ids
    assert tokenizer._quick is not None
    monkeypatch.setattr(tokenizer, "_quick", GivesUp())
    monkeypatch.setattr(tokenizer, "_rust", Spy(tokenizer._rust))
    assert list(await tokenizer.encode("one text")) == expected
    assert batches == [["one text"]]


async def test_short_texts_are_encoded_at_once_and_long_ones_in_a_thread(tokenizer, monkeypatch):
    def here():
        return threading.current_thread()

    mine = threading.current_thread()
    assert await tokenizer.on_loop_or_in_thread(module.ON_LOOP_CHARACTERS, here) is mine
    assert await tokenizer.on_loop_or_in_thread(module.ON_LOOP_CHARACTERS + 1, here) is not mine
    monkeypatch.setattr(tokenizer, "_quick", None)  # The tokenizers library takes ten times as long.
    assert await tokenizer.on_loop_or_in_thread(1, here) is not mine


async def test_the_quick_encoder_can_be_switched_off(folder, tokenizer):
    slow = Tokenizer.load(str(folder), may_be_quick=False)
    assert tokenizer._quick is not None
    assert slow._quick is None
    assert (tokenizer.why_not_quick, slow.why_not_quick) == ("", "it was switched off")
    assert slow.text_ids("the same text") == tokenizer.text_ids("the same text")


BYTE_LEVEL = {"type": "ByteLevel"}


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, 5),
        ({"added_tokens": [{"content": "<special>"}]}, 9),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}}, 20),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "_"}}, 5),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": "_"}}, None),
        ({"normalizer": {"type": "Strip"}}, None),
        ({"pre_tokenizer": {"type": "Whitespace"}}, None),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL]}}, 5),
        ({"added_tokens": [{"content": "<mask>", "lstrip": True}]}, None),
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}}, None),
        ({"pre_tokenizer": None, "model": {"type": "BPE", "vocab": {"ab": 0}, "byte_fallback": True}}, 2),
    ],
)
def test_the_characters_a_token_can_stand_for(changes, bound):
    parts = {"model": {"type": "BPE", "vocab": {"a": 0, "hello": 1}}, "pre_tokenizer": BYTE_LEVEL}
    assert characters_per_token_max(json.dumps(parts | changes)) == bound


async def test_whatever_goes_wrong_in_a_template_is_the_clients_error(tokenizer):
    nested = []
    for _ in range(800):
        nested = [nested]
    with pytest.raises(ClientError) as error:
        tokenizer.chat_prompt([{"role": "user", "content": "x", "zz": nested}])
    assert error.value.param == "messages"


@pytest.mark.parametrize("adds_bos", [True, False])
async def test_a_text_begins_as_transformers_begins_it_and_a_chat_not_twice(tmp_path, adds_bos):
    folder = make_folder(tmp_path / "bos")
    if adds_bos:  # Llama's templates do so.
        rust = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        bos = rust.id_to_token(BOS_ID)
        rust.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", pair=None, special_tokens=[(bos, BOS_ID)]
        )
        rust.save(str(folder / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.load(str(folder))
    ids = await tokenizer.encode("some text")
    assert list(ids) == theirs("some text")["input_ids"]
    assert (ids[0] == BOS_ID) is adds_bos
    tokenizer._pretrained.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    chat = (tokenizer.chat_prompt([{"role": "user", "content": "some text"}])).tokens
    assert chat.count(BOS_ID) == 1
    await tokenizer.close()
