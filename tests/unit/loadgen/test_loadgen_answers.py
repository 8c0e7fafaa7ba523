"""The answers of a run are compared with those of an earlier one."""

import pytest

from baton.core.errors import SetupError
from loadgen.answers import NAMED_MAX, check_answers, check_same_requests, digest
from loadgen.records import RequestOutcome, RequestRecord
from loadgen.report.model import AnswerCheck, RunSettings
from loadgen.sse import Answer


def record(index, answer, *, outcome=RequestOutcome.COMPLETED, prompt_tokens=8):
    return RequestRecord(index, 0.0, outcome=outcome, prompt_tokens=prompt_tokens, answer=answer)


def test_a_digest_is_of_the_token_ids_and_of_the_text_where_there_are_none():
    assert digest(Answer(["a"], [1, 2])) == digest(Answer(["b"], [1, 2]))
    assert digest(Answer(["a"], [1, 2])) != digest(Answer(["a"], [12]))
    assert digest(Answer(["a", "b"], [])) == digest(Answer(["ab"], []))
    assert digest(Answer(["a"], [])) != digest(Answer(["b"], []))


def test_only_what_both_runs_completed_is_compared():
    before = [record(0, "x"), record(1, "y"), record(2, "z", outcome=RequestOutcome.FAILED)]
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


def settings(**changed):
    options = {"length_scale": "1/16", "api": "chat", "max_input": None}
    given = {"trace": "t", "target": "u", "model": "m", "seed": 0, "options": options}
    return RunSettings(**{**given, **changed})


def test_a_run_of_other_requests_is_refused_and_says_why():
    assert check_same_requests(settings(), settings(target="elsewhere", time_scale="2")) == []
    with pytest.raises(
        SetupError, match="were others: seed 1 there, 0 here; length_scale 1/8 there, 1/16 here"
    ):
        check_same_requests(settings(), settings(seed=1, options={"length_scale": "1/8"}))
    with pytest.raises(SetupError, match="max_input 9 there, None here"):
        check_same_requests(settings(), settings(options={"max_input": 9}))


def test_another_model_may_be_meant_and_is_told():
    assert check_same_requests(settings(), settings(model="fp8")) == ["model fp8 there, m here"]
