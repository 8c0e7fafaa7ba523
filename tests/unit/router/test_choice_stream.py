"""One choice of an answer: whatever the tokens of a message, the client gets the same."""

from types import SimpleNamespace

import pytest

from router.openai.choice_stream import ChoiceOptions, ChoiceStream
from router.text.detokenizer import Detokenizer
from tests.unit.router.test_detokenizer import SPECIAL, byte_level

OWNER = SimpleNamespace(
    now_s=lambda: 0.0,
    on_progress=lambda _: None,
    progress_of=lambda _: (None, None),
    answered=lambda _: None,
    cancel=lambda _: None,
)


@pytest.mark.parametrize("at_once", [1, 2, 5, 100])
def test_a_stop_string_ends_the_token_ids_where_it_ends_the_text(at_once):
    ids = byte_level().encode("Paris is the capital of France. Eight legs.", add_special_tokens=False).ids
    whole = byte_level().decode
    last = next(n for n in range(len(ids)) if "capital" in whole(ids[: n + 1]))
    detokenizer = Detokenizer(whole, special_ids=SPECIAL, stops=["capital"])
    choice = ChoiceStream(OWNER, 0, SimpleNamespace(), detokenizer, ChoiceOptions(token_ids=True))
    heard = []
    for start in range(0, len(ids), at_once):
        choice.on_tokens(tuple(ids[start : start + at_once]))
        _text, unsent = choice.take()
        heard += unsent
    assert heard == ids[: last + 1]
    assert choice.token_count == len(heard)
