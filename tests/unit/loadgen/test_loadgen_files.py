from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import SetupError
from baton.files.outputs import check_writable
from loadgen.files import parse_records, read_run, report_bytes, write_file, write_records
from loadgen.records import ErrorKind, RequestOutcome, RequestRecord
from loadgen.report import RunSettings, Slo, make_report

SETTINGS = RunSettings(trace="t", target="u", model="m", slo=Slo(1.0, 0.1), planned=3)
RECORDS = [
    RequestRecord(
        0,
        100.0,
        sent_s=100.001,
        token_instants_s=[100.5, 100.75],
        ended_s=100.8,
        outcome=RequestOutcome.COMPLETED,
        prompt_tokens=7,
        completion_tokens=2,
        cached_tokens=0,
        served_by=("p", "d"),
        timings={"queue_s": 0.1},
    ),
    RequestRecord(
        1, 101.0, sent_s=101.0, ended_s=101.5, outcome=RequestOutcome.REFUSED, error=ErrorKind.OVERLOADED
    ),
    RequestRecord(
        2, 102.0, outcome=RequestOutcome.FAILED, error=ErrorKind.CONNECTION_LIMIT, ended_s=102.0, tenant="a"
    ),
]


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_records_come_back(tmp_path, name):
    write_records(tmp_path / name, RECORDS, SETTINGS)
    report = read_run(tmp_path / name)
    made = make_report(RECORDS, SETTINGS)
    assert report.ttft.p50 == pytest.approx(0.5)
    assert (report.goodput, report.settings, report.errors) == (made.goodput, SETTINGS, made.errors)
    assert report.balance == made.balance


def test_what_is_written_of_a_record_is_what_it_was(tmp_path):
    write_records(tmp_path / "r.jsonl", RECORDS, SETTINGS)
    _, records = parse_records((tmp_path / "r.jsonl").read_bytes(), name="r")
    for ours, theirs in zip(RECORDS, records, strict=True):
        assert theirs.ttft_s == (None if ours.ttft_s is None else pytest.approx(ours.ttft_s))
        moved = replace(
            theirs,
            planned_s=ours.planned_s, sent_s=ours.sent_s, ended_s=ours.ended_s,
            token_instants_s=ours.token_instants_s,
        )  # fmt: skip
        assert moved == ours


def test_records_are_judged_by_other_objectives(tmp_path):
    write_records(tmp_path / "r.jsonl", RECORDS, SETTINGS)
    assert read_run(tmp_path / "r.jsonl").goodput.met == 0  # 250 ms per token
    change = {"slo": Slo(1.0, 0.3), "label": "loose"}
    report = read_run(tmp_path / "r.jsonl", change=change, scales=(1, 2))
    assert [p.scale for p in report.slo_scales.points] == [1, 2]
    assert (report.goodput.met, report.label) == (1, "loose")


def test_a_report_comes_back_and_cannot_be_judged_anew(tmp_path):
    report = make_report(RECORDS, SETTINGS)
    write_file(tmp_path / "r.json", report_bytes(report))
    assert read_run(tmp_path / "r.json", change={"slo": SETTINGS.slo}) == report
    with pytest.raises(SetupError, match="--records"):
        read_run(tmp_path / "r.json", change={"slo": Slo(5.0, 5.0)})


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is no report"),
        (b"[1]", "is no report"),
        (b"{}", "has no schema"),
        (b'{"schema": "baton-report/9"}', "baton-report/9"),
        (b'{"schema": "baton-report/2"}', "is no report"),
        (b'{"schema": "baton-records/1", "settings": 3}\n', "holds no records"),
    ],
)
def test_what_is_not_ours_is_told(tmp_path, content, complaint):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(SetupError, match=complaint):
        read_run(tmp_path / "x")


def test_what_cannot_be_written_is_told_before_anything_runs(tmp_path):
    check_writable(None, tmp_path / "report.json")
    assert not list(tmp_path.iterdir())
    for path, complaint in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "x.json", "no folder"),
        (Path("/proc/x"), "/proc:"),
    ):
        with pytest.raises(SetupError, match=complaint):
            check_writable(path)


def test_what_cannot_be_read_or_written_is_told(tmp_path):
    with pytest.raises(SetupError, match="cannot read"):
        read_run(tmp_path / "nothing")
    with pytest.raises(SetupError, match="cannot write"):
        write_file(tmp_path / "no" / "folder", b"")
