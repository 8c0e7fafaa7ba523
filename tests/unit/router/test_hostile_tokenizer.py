"""Tokenizers and chat templates that come from anybody: refused in one line, or bounded in time and size."""

import json
import threading

import pytest

from baton.core.errors import ClientError, SetupError
from router.text import template_bounds, tokenizer_files
from router.text.template_bounds import TookTooLong, run_bounded
from router.text.tokenizer import Tokenizer
from tests.models import make_model

ENDLESS = "{% set n = range(99999) %}" + "{% for a in n %}" * 3 + "{% endfor %}" * 3


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("plain") / "m", "llama", num_hidden_layers=1)


@pytest.fixture
def folder(plain, tmp_path):
    copy = tmp_path / "m"
    copy.mkdir()
    for file in plain.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def changed(folder, change, name="tokenizer.json"):
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def refused(folder):
    with pytest.raises(SetupError) as caught:
        Tokenizer.load(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(normalizer={"type": "Prepend", "prepend": "x" * 1000}),
        lambda t: t.update(
            normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": "y" * 10**6}
        ),
        lambda t: t.update(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 1000}),
        lambda t: t.update(model={}),
        lambda t: t.update(model={"type": "BPE", "vocab": {"a": -1}, "merges": []}),
        lambda t: t.update(decoder={"type": "Nothing"}),
        lambda t: t.update(added_tokens=[{"id": "x"}]),
        lambda t: t.clear(),
    ],
)
def test_a_tokenizer_that_makes_no_sense_is_refused(folder, change):
    changed(folder, change)
    assert str(folder) in refused(folder)


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\xff", b"[]", b'{"model": 1, "model": 2}'])
def test_a_tokenizer_file_that_is_no_json_object_is_refused(folder, content):
    (folder / "tokenizer.json").write_bytes(content)
    assert "tokenizer" in refused(folder)


def test_a_tokenizer_file_without_end_is_refused(folder, monkeypatch):
    monkeypatch.setattr(tokenizer_files, "BYTES_MAX", 1000)
    assert "at most 1000 bytes" in refused(folder)


def test_a_token_that_the_model_does_not_know_is_refused(folder):
    """The embedding has no row for it, and kernels read where they are told."""
    strange = {"id": 100_000, "content": "<|strange|>", "single_word": False, "lstrip": False}
    strange |= {"rstrip": False, "normalized": False, "special": True}
    changed(folder, lambda t: t["added_tokens"].append(strange))
    tokenizer = Tokenizer.load(str(folder))
    assert max(tokenizer.text_ids("as ever")) < tokenizer.card.vocab_size
    with pytest.raises(ClientError, match="does not know"):
        tokenizer.text_ids("a <|strange|> one")


# --- chat templates -------------------------------------------------------------------------------


def with_template(folder, source):
    (folder / "chat_template.jinja").write_text(source)
    changed(folder, lambda t: t.pop("chat_template", None), "tokenizer_config.json")
    return folder


def test_a_template_without_end_is_refused_at_the_start(folder, monkeypatch):
    monkeypatch.setattr("router.text.tokenizer.THREAD_S", 0.1)
    assert "chat template" in refused(with_template(folder, ENDLESS))


def test_a_template_that_a_conversation_makes_endless_costs_that_conversation_only(folder, monkeypatch):
    monkeypatch.setattr(template_bounds, "LOOP_S", 0.1)
    source = "{% if messages[0].content == 'evil' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    tokenizer = Tokenizer.load(str(with_template(folder, source)))
    with pytest.raises(ClientError, match="too long"):
        tokenizer.chat_prompt([{"role": "user", "content": "evil"}])
    assert tokenizer.chat_prompt([{"role": "user", "content": "good"}]).end == "good"


@pytest.mark.parametrize(
    "bomb",
    [
        "'x' * 10**10",
        "10**9 * ['x']",
        "'x' * 9999999999",
        "9 ** (9 ** 9)",
        "'%1000000000d' % 1",
        "'%*d' % (1000000000, 1)",
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__init__.__globals__",
        "range(10**9)|list",
    ],
)
def test_a_template_makes_no_bomb_and_does_not_leave_its_sandbox(folder, bomb):
    source = "{% if messages[0].content == 'evil' %}{{ " + bomb + " }}{% endif %}"
    tokenizer = Tokenizer.load(str(with_template(folder, source)))
    with pytest.raises(ClientError, match="template refused"):
        tokenizer.chat_prompt([{"role": "user", "content": "evil"}])


def test_what_templates_do_goes_on_as_before(folder):
    source = "{{ '=' * 3 }}{{ 2 * 3 }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ '%s|%02d' % ('a', 1) }}"
    tokenizer = Tokenizer.load(str(with_template(folder, source)))
    assert tokenizer.chat_prompt([{"role": "user", "content": "x"}]).end == "===683a|01"


def test_work_in_time_is_let_through_and_threads_do_not_disturb_each_other():
    def endless():
        while True:
            pass

    found = []

    def late():
        with pytest.raises(TookTooLong):
            run_bounded(endless, seconds=0.05)
        found.append(run_bounded(lambda: 7, seconds=60.0))

    threads = [threading.Thread(target=late) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [7, 7, 7]
    assert not template_bounds._runs
