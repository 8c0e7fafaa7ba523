"""A tokenizer is tested once per version of the libraries, and a lost cache costs a test."""

import pytest
from tokenizers import Tokenizer, models

from router.text import remembered_encoders as module
from router.text.remembered_encoders import remembered_encoder
from tests.unit.router.test_quick_encoder import made


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    return tmp_path / "tokenizers"


@pytest.fixture
def tests(monkeypatch):
    """True for each encoder that was tested, False for others that were asked for."""
    asked, real = [], module.quick_encoder

    def quick_encoder(rust, text, *, is_tested):
        asked.append(not is_tested)
        return real(rust, text, is_tested=is_tested)

    monkeypatch.setattr(module, "quick_encoder", quick_encoder)
    return asked


def ids(rust, text="It's the 1st of May."):
    encoder, reason = remembered_encoder(rust, rust.to_str())
    assert reason == ""
    return encoder.ids(text, with_special=False)


def test_a_second_start_does_not_test_again_and_gives_the_same_ids(tests):
    rust = made("gpt2")
    assert ids(rust) == ids(rust) == tuple(rust.encode("It's the 1st of May.").ids)
    assert tests == [True, False]


@pytest.mark.parametrize("change", ["tokenizer", "library", "probes"])
def test_another_tokenizer_library_or_test_is_tested(tests, monkeypatch, change):
    ids(made("gpt2"))
    if change == "library":
        monkeypatch.setattr(module, "version", lambda _: "999")
    if change == "probes":
        monkeypatch.setattr(module, "PROBES", ("x",))
    ids(made("qwen" if change == "tokenizer" else "gpt2"))
    assert tests == [True, True]


def test_a_refusal_is_remembered_with_its_reason(tests):
    rust = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    first, second = (remembered_encoder(rust, rust.to_str()) for _ in range(2))
    assert first == second == (None, "it is no byte-pair encoding")
    assert tests == [True]


def test_a_cache_that_cannot_be_written_costs_a_test(tests, folder):
    folder.write_text("a file where the folder should be")
    assert ids(made("gpt2")) == ids(made("gpt2"))
    assert tests == [True, True]
