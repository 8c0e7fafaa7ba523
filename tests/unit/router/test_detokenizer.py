"""Text streams: whatever the tokens and their cuts, the client reads the output of `decode`."""

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from router.text.detokenizer import Detokenizer, StopFinder, TextWindow
from tests.models import _tokenizer_json

SPECIAL = frozenset(range(5))


@functools.cache
def byte_level() -> Tokenizer:
    return Tokenizer.from_str(_tokenizer_json(512))


@functools.cache
def sentencepiece() -> Tokenizer:
    """Return a decoder like that of Llama 2 and Mistral: pieces with a mark for spaces, bytes for characters
    without a piece."""
    pieces = ["<s>", "</s>", "▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "é", "▁世", ".", "▁▁"]
    vocab = {piece: i for i, piece in enumerate([*pieces, *(f"<0x{b:02X}>" for b in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def chunks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    marks = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(marks)]


def stream(detokenizer: Detokenizer, parts: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(part) for part in parts), detokenizer.finish()]


TOKENS = st.lists(st.integers(0, 511), max_size=80)
BROKEN = st.lists(st.integers(5, 5 + 255), max_size=80)  # Single bytes are mostly not UTF-8.
CUTS = st.lists(st.integers(0, 100), max_size=20)


@given(ids=st.one_of(TOKENS, BROKEN), cuts=CUTS)
def test_deltas_add_up_to_the_full_decode(ids, cuts):
    deltas = stream(Detokenizer(byte_level().decode, special_ids=SPECIAL), chunks(ids, cuts))
    assert "".join(deltas) == byte_level().decode(ids, skip_special_tokens=True)


@given(
    words=st.lists(st.sampled_from(["é", "世", "🙂", "👩‍🚀", " naïve", "a", "\n"]), max_size=12), cuts=CUTS
)
def test_no_delta_has_half_a_character(words, cuts):
    text = "".join(words)
    ids = byte_level().encode(text, add_special_tokens=False).ids
    deltas = stream(Detokenizer(byte_level().decode, special_ids=SPECIAL), chunks(ids, cuts))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


@given(ids=st.lists(st.integers(2, 12), max_size=40), cuts=CUTS)
def test_spaces_of_sentencepiece_stay_where_they_are(ids, cuts):
    deltas = stream(Detokenizer(sentencepiece().decode), chunks(ids, cuts))
    assert "".join(deltas) == sentencepiece().decode(ids)


@given(text=st.text(alphabet="aébé世🙂 .", max_size=20), cuts=CUTS)
def test_byte_fallback_waits_for_whole_characters(text, cuts):
    ids = sentencepiece().encode(text, add_special_tokens=False).ids
    deltas = stream(Detokenizer(sentencepiece().decode), chunks(ids, cuts))
    assert "".join(deltas) == sentencepiece().decode(ids)
    assert not any("\ufffd" in delta for delta in deltas)


@given(
    prompt=st.lists(st.integers(3, 12), min_size=1, max_size=6), ids=st.lists(st.integers(3, 12), max_size=9)
)
def test_a_completion_keeps_the_space_after_its_prompt(prompt, ids):
    deltas = stream(Detokenizer(sentencepiece().decode, context=prompt), [[i] for i in ids])
    assert sentencepiece().decode(prompt) + "".join(deltas) == sentencepiece().decode(prompt + ids)


def test_a_context_that_ends_inside_a_character_is_not_used():
    euro = byte_level().encode("€", add_special_tokens=False).ids
    assert len(euro) > 1
    window = TextWindow(byte_level().decode, context=euro[:1])
    assert window.push(byte_level().encode("a", add_special_tokens=False).ids[0]) == "a"


def test_endless_broken_bytes_are_neither_held_back_nor_decoded_again_and_again():
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return byte_level().decode(ids)

    byte_ff = next(i for i in range(5, 261) if byte_level().id_to_token(i) == "ÿ")
    window = TextWindow(decode)
    text = "".join(window.push(byte_ff) for _ in range(500))
    assert len(text) > 470
    assert longest < 40
    assert text + window.flush() == "\ufffd" * 500


# --- ends -----------------------------------------------------------------------------------------


def expected_cut(text: str, stops: list[str]) -> str:
    """Return the expected text by looking at every prefix for a stop string that is complete."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


STOPS = st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), min_size=1, max_size=4)


@given(text=st.text(alphabet="ab.", max_size=30), stops=STOPS, cuts=CUTS)
def test_stop_strings_are_found_across_deltas_and_never_sent(text, stops, cuts):
    finder = StopFinder(stops)
    parts = ["".join(map(chr, part)) for part in chunks([ord(c) for c in text], cuts)]
    sent = "".join(finder.push(part) for part in parts)
    expected = expected_cut(text, stops)
    assert expected.startswith(sent)  # This holds before the end is known, too.
    assert sent + ("" if finder.found else finder.flush()) == expected


@given(text=st.text(alphabet="ab.", max_size=30), stops=STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(text, stops):
    finder = StopFinder(stops)
    sent = finder.push(text)
    if finder.found is None:
        held = text[len(sent) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(ids=st.lists(st.integers(3, 12), max_size=40), stops=STOPS, cuts=CUTS)
def test_tokens_are_cut_at_the_first_stop_string_however_they_arrive(ids, stops, cuts):
    whole = Detokenizer(sentencepiece().decode, stops=stops)
    text = "".join(stream(whole, [[i] for i in ids]))
    assert text == expected_cut(sentencepiece().decode(ids), stops)
    cut = Detokenizer(sentencepiece().decode, stops=stops)
    assert "".join(stream(cut, chunks(ids, cuts))) == text
    assert (cut.stopped, cut.token_count) == (whole.stopped, whole.token_count)


@pytest.mark.parametrize("stops", [(), ("zzz",)])
def test_a_stop_token_is_not_text_and_ends_it(stops):
    letters = byte_level().encode("ab", add_special_tokens=False).ids
    dot = byte_level().encode(".", add_special_tokens=False).ids
    detokenizer = Detokenizer(byte_level().decode, stop_ids=frozenset(dot), stops=stops)
    assert "".join(stream(detokenizer, [[*letters, *dot, *letters]])) == "ab"
    assert detokenizer.stopped
    assert detokenizer.token_count == len(letters) + 1
