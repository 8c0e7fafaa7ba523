"""The losses that the fault bench reports."""

from dataclasses import replace

from benchmarks.faults_cli import what_was_lost
from loadgen.records import ErrorKind, RequestOutcome, RequestRecord
from loadgen.report import RunSettings, make_report
from loadgen.report.model import AnswerCheck


def report(outcomes, answers, *, planned=None):
    records = [
        RequestRecord(i, float(i), ended_s=i + 0.5, outcome=outcome, error=ErrorKind.STREAM_BROKEN)
        for i, outcome in enumerate(outcomes)
    ]
    settings = RunSettings(trace="t", target="u", model="m", planned=planned or len(records))
    return replace(make_report(records, settings), answers=answers)


DONE = RequestOutcome.COMPLETED


def test_nothing_was_lost_only_if_every_request_was_answered_and_every_answer_is_right():
    assert what_was_lost(report([DONE] * 3, AnswerCheck(3, 0))) == ""
    assert "1 of 3 requests" in what_was_lost(report([DONE, DONE, RequestOutcome.FAILED], AnswerCheck(2, 0)))
    assert "1 refused" in what_was_lost(report([DONE, RequestOutcome.REFUSED], AnswerCheck(1, 0)))
    assert what_was_lost(report([DONE] * 3, AnswerCheck(3, 0), planned=4))
    assert what_was_lost(report([DONE] * 3, AnswerCheck(2, 0))) == "not every answer could be compared"
    assert what_was_lost(report([DONE] * 3, None)) == "not every answer could be compared"
    assert what_was_lost(report([DONE] * 3, AnswerCheck(3, 2, (0, 1)))) == "2 answers differ"
