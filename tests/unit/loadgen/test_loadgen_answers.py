"""Answers of a run beside those of an earlier one."""

import pytest

from baton.core.errors import SetupError
from loadgen.answers import NAMED_MAX, check_answers, digest
from loadgen.records import Outcome, Record
from loadgen.report.model import AnswerCheck
from loadgen.sse import Answer


def record(index, answer, *, outcome=Outcome.COMPLETED, prompt_tokens=8):
    return Record(index, 0.0, outcome=outcome, prompt_tokens=prompt_tokens, answer=answer)


def test_a_digest_is_of_the_token_ids_and_of_the_text_where_there_are_none():
    assert digest(Answer(["a"], [1, 2])) == digest(Answer(["b"], [1, 2]))
    assert digest(Answer(["a"], [1, 2])) != digest(Answer(["a"], [12]))
    assert digest(Answer(["a", "b"], [])) == digest(Answer(["ab"], []))
    assert digest(Answer(["a"], [])) != digest(Answer(["b"], []))


def test_only_what_both_runs_completed_is_compared():
    before = [record(0, "x"), record(1, "y"), record(2, "z", outcome=Outcome.FAILED)]
    now = [record(0, "x"), record(1, "other"), record(2, "q"), record(3, "r")]
    assert check_answers(now, before) == AnswerCheck(2, 1, (1,))


def test_many_that_differ_are_counted_and_the_first_named():
    check = check_answers([record(i, "a") for i in range(90)], [record(i, "b") for i in range(90)])
    assert (check.compared, check.differing) == (90, 90)
    assert check.first_differing == tuple(range(NAMED_MAX))


def test_other_requests_or_none_are_an_error():
    with pytest.raises(SetupError, match="other prompts"):
        check_answers([record(0, "x")], [record(0, "x", prompt_tokens=9)])
    with pytest.raises(SetupError, match="--records"):
        check_answers([record(0, "x")], [record(0, "")])
