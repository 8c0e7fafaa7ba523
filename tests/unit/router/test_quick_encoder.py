"""The quick encoder gives exactly the ids of the tokenizers library, or there is none."""

import json
import threading
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from router.text import quick_encoder as module
from router.text.quick_encoder import PROBES, quick_encoder
from tests.models import CORPUS

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "llama3": WORDS + r"\p{N}{1,3}" + REST,
    "qwen": WORDS + r"\p{N}" + REST,
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
KINDS = ("gpt2", "prefix_space", *SPLITS, "llama2", "gemma")
"""Ways in which families cut text: https://huggingface.co/docs/tokenizers/components."""


def _byte_level(kind):
    tokenizer = Tokenizer(models.BPE())
    if kind in SPLITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLITS[kind]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix_space")
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, pre_tokenizers.ByteLevel.alphabet(), []


def _byte_fallback(kind):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    blanks = normalizers.Replace(" ", "▁")
    if kind == "gemma":
        tokenizer.normalizer = blanks
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks])
    return tokenizer, [], ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]


@cache
def made(kind):
    tokenizer, alphabet, extra = _byte_fallback(kind) if kind in ("llama2", "gemma") else _byte_level(kind)
    trainer = trainers.BpeTrainer(
        vocab_size=700 + len(extra),
        initial_alphabet=alphabet,
        special_tokens=[*extra, *SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("  spaced", normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<|strips|>", lstrip=True, rstrip=True)])
    if kind in ("llama2", "llama3"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    parts = json.loads(tokenizer.to_str())
    # Bytes are tokens of the vocabulary and no added tokens.
    parts["added_tokens"] = [t for t in parts["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(parts))


@cache
def quick(kind):
    encoder, why_not = quick_encoder(made(kind), made(kind).to_str())
    assert encoder is not None, why_not
    return encoder


pieces = st.one_of(
    st.text(max_size=12),
    st.text(alphabet=" \n\t\r\u00a0\u3000", max_size=8),
    st.sampled_from(
        [*SPECIAL, "<|strips|>", "  spaced", "<|im_", "▁", "Ġ", "<0x41>", "'LL", "n't", "1234567"]
    ),
    st.sampled_from(CORPUS).flatmap(lambda line: st.integers(1, len(line)).map(lambda n: line[:n])),
)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.lists(pieces, max_size=12).map("".join), with_special=st.booleans())
@example(text="".join(PROBES), with_special=True)
@example(text=" " * 5000 + "x", with_special=False)
@example(text="'" * 3000, with_special=False)
@example(text="<0x41>", with_special=False)
def test_every_text_is_encoded_alike(kind, text, with_special):
    found = quick(kind).ids(text, with_special=with_special)
    if found is None:
        assert "<0x" in text, "the library is asked only where it must be"
        assert kind in ("llama2", "gemma")
    else:
        assert list(found) == made(kind).encode(text, add_special_tokens=with_special).ids


def _with(**changes):
    parts = json.loads(made("gpt2").to_str())
    for name, change in changes.items():
        parts[name] = change(parts[name])
    return Tokenizer.from_str(json.dumps(parts))


@pytest.mark.parametrize(
    ("tokenizer", "why_not"),
    [
        (Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")), "no byte-pair encoding"),
        (_with(model=lambda model: {**model, "dropout": 0.1}), "by chance"),
        (_with(added_tokens=lambda all_: [*all_[:-1], {**all_[-1], "single_word": True}]), "whole words"),
        (_with(pre_tokenizer=lambda _: {"type": "WhitespaceSplit"}), "cannot read it"),
    ],
)
def test_where_it_might_differ_there_is_none(tokenizer, why_not):
    encoder, reason = quick_encoder(tokenizer, tokenizer.to_str())
    assert encoder is None
    assert why_not in reason


def test_a_word_of_the_vocabulary_that_it_takes_otherwise_is_found_out(monkeypatch):
    """Such words exist: tokens of bytes, written out. The quick encoder does not handle texts with them."""
    monkeypatch.setattr(module, "BYTE_TOKEN", "")
    encoder, reason = quick_encoder(made("llama2"), made("llama2").to_str())
    assert encoder is None
    assert "<0x" in reason


def test_one_that_says_something_else_is_not_used(monkeypatch):
    other = json.loads(made("gpt2").to_str())
    other["model"]["merges"] = other["model"]["merges"][:-50]
    real = module.fastokens.Tokenizer

    class Wrong:
        from_json_str = staticmethod(lambda _: real.from_json_str(json.dumps(other)))

    monkeypatch.setattr(module.fastokens, "Tokenizer", Wrong)
    encoder, reason = quick_encoder(made("gpt2"), made("gpt2").to_str())
    assert encoder is None
    assert "otherwise" in reason


def test_a_long_text_gives_up_the_interpreter():
    """Other threads run while it is encoded: a counter advances that this thread would otherwise halt."""
    encoder, counted, is_over = quick("llama3"), [0], threading.Event()

    def count():
        while not is_over.is_set():
            counted[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        text = " ".join(f"w{i:x}" for i in range(300_000))
        before = counted[0]
        encoder.ids(text, with_special=False)
        assert counted[0] > before
    finally:
        is_over.set()
        counter.join()
