"""Tokenizers and chat templates that come from anybody: refused in one line, or bounded in time and size."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.core.errors import ClientError, SetupError
from router.text import template_bounds, tokenizer_files
from router.text.template_bounds import TookTooLong, run_bounded
from router.text.tokenizer import Tokenizer
from tests.models import make_model

ROOT = Path(__file__).parents[3]
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
    source = "{% if messages[0].content == 'evil' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    tokenizer = Tokenizer.load(str(with_template(folder, source)))
    with monkeypatch.context() as patched:
        patched.setattr(template_bounds, "LOOP_S", 0.1)
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
        "'x'.center(10**9)",
        "'x'.ljust(10**9)",
        "'x'.zfill(10**9)",
        "'\\t'.expandtabs(10**9)",
        "(5).to_bytes(10**9, 'big')",
        "'a'.replace('', 'b' * 16000000)",
        "('x' * 16000000).replace('x', 'y' * 1000)",
        "('x' * 16000000).translate({120: 'y' * 1000})",
        "('x' * 16000000).join(['a'] * 99)",
        "''.join(['x' * 16000000] * 200)",
        "'{:>1000000000}'.format(1)",
        "'{:>{w}}'.format(1, w=10**9)",
        "'{:.1000000000f}'.format(1.0)",
        "('%9999d' * 9999) % ((1,) * 9999)",
        "('%s' * 999) % (('x' * 160000,) * 999)",
        "'x'|center(10**9)",
        "'x'|indent(10**9)",
        "'x'|indent('y' * 16000000, first=True) ~ 'z' * 16000000",
        "[1]|batch(10**9, 'x')|list",
        "[1]|slice(10**9)|list",
        "('x' * 16000000)|replace('x', 'y' * 1000)",
        "(['x' * 16000000] * 200)|join",
        "([{'a': 'x' * 16000000}] * 200)|join(attribute='a')",
        "'%1000000000d'|format(1)",
        "['x']|map('center', 10**9)|list",
        "[[1]]|sum(start=[])",
        "[1]|tojson(indent=10**9)",
        "[1, 2]|tojson(separators=('x' * 16000000, ':'))",
        "('x' * 16000000) + ('x' * 16000000)",
        "('x' * 16000000) ~ ('x' * 16000000)",
    ],
)
def test_a_template_makes_no_bomb_and_does_not_leave_its_sandbox(folder, bomb):
    source = "{% if messages[0].content == 'evil' %}{{ " + bomb + " }}{% endif %}"
    tokenizer = Tokenizer.load(str(with_template(folder, source)))
    with pytest.raises(ClientError, match="template refused"):
        tokenizer.chat_prompt([{"role": "user", "content": "evil"}])


@pytest.mark.parametrize(
    "doubled",
    [
        "{% set ns = namespace(a='x') %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        "{% set ns = namespace(a='x') %}{% for i in range(40) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{% set ns = namespace(a='x') %}{% for i in range(40) %}"
        "{% set t %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = t %}{% endfor %}",
        "{% set ns = namespace(a=[1]) %}{% for i in range(40) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{% for i in range(9999) %}{{ 'x' * 1600000 }}{% endfor %}",
    ],
)
def test_a_text_that_is_doubled_again_and_again_is_refused_soon(folder, doubled):
    source = "{% if messages[0].content == 'evil' %}" + doubled + "{% endif %}"
    tokenizer = Tokenizer.load(str(with_template(folder, source)))
    with pytest.raises(ClientError, match="more than 16777216"):
        tokenizer.chat_prompt([{"role": "user", "content": "evil"}])


AS_BEFORE = {
    "'=' * 3": "===",
    "2 * 3": "6",
    "2 ** 3": "8",
    "7 % 4": "3",
    "'%s|%02d' % ('a', 1)": "a|01",
    "'%(a)s' % {'a': 'b'}": "b",
    "'%s-%s'|format('a', 1)": "a-1",
    "1 + 2": "3",
    "'a' + 'b'": "ab",
    "[1] + [2]": "[1, 2]",
    "'a' ~ 1 ~ none": "a1None",
    "'a,b'.replace(',', '; ')": "a; b",
    "'aaa'.replace('a', 'b', 2)": "bba",
    "'aaa'|replace('a', 'b', 2)": "bba",
    "'ab'|center(6)": "  ab",
    "'a'.ljust(3) ~ '|'": "a  |",
    "'{:>4}|{a}'.format('a', a=2)": "   a|2",
    "'a\nb'|indent(2)": "a\n  b",
    "'a\nb'|indent(width=2, first=true)": "  a\n  b",
    "{'a': [1]}|tojson(indent=2)": '{\n  "a": [\n    1\n  ]\n}',
    "{'a': [1]}|tojson": '{"a": [1]}',
    "[1, 2]|join(', ')": "1, 2",
    "'ab'|join('-')": "a-b",
    "[{'n': 1}, {'n': 2}]|join('+', attribute='n')": "1+2",
    "', '.join(['a', 'b'])": "a, b",
    "'-'.join('ab')": "a-b",
    "[1, 2]|sum": "3",
    "[{'n': 1}]|sum(attribute='n', start=2)": "3",
    "[1, 2, 3]|batch(2)|list": "[[1, 2], [3]]",
    "messages|map(attribute='role')|map('upper')|join": "USER",
}


@pytest.mark.parametrize(("expression", "text"), AS_BEFORE.items(), ids=AS_BEFORE)
def test_what_templates_do_goes_on_as_before(plain, expression, text):
    tokenizer = Tokenizer.load(str(plain))
    tokenizer._pretrained.chat_template = "{{ " + expression + " }}"
    assert tokenizer.chat_prompt([{"role": "user", "content": "x"}]).end.rstrip() == text


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


def test_an_expression_that_is_worked_out_in_advance_ends_as_well():
    """jinja catches every Exception of such an expression, and goes on."""

    def slow(value):
        ends_s = time.monotonic() + 10.0
        while time.monotonic() < ends_s:
            pass
        return value

    environment = ImmutableSandboxedEnvironment()
    environment.filters["slow"] = slow
    with pytest.raises(TookTooLong):
        run_bounded(lambda: environment.compile("{{ 1|slow }}"), seconds=0.05)


TRACED_AFTER_A_TIMEOUT = """
import sys
from router.text.template_bounds import TookTooLong, run_bounded

def endless():
    while True:
        pass

try:
    run_bounded(endless, seconds=0.05)
except TookTooLong:
    sys.settrace(lambda *_: None)
    print((lambda: "traced")())
"""


def test_nothing_is_left_to_raise_after_a_rendering_that_was_cut_short():
    """A traced function of an interpreter that believes so never starts, so it runs in a process that can be
    killed."""
    command = [sys.executable, "-c", TRACED_AFTER_A_TIMEOUT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "traced\n"
