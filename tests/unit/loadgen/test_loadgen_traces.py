import json

import pytest

from baton.core.errors import SetupError
from loadgen.arrivals import spread_ticks
from loadgen.traces import TraceFormat, cut, read_trace


def row(at_ms=0, inputs=600, outputs=5, ids=(0, 1)):
    return json.dumps(
        {"timestamp": at_ms, "input_length": inputs, "output_length": outputs, "hash_ids": list(ids)}
    )


def write(tmp_path, text, name="trace"):
    path = tmp_path / name
    path.write_text(text)
    return path


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 23:59:59.9000000,374,44\r\n"
    "2023-11-17 00:00:01.4000001,396,109\n"
)


def test_formats_are_told_apart_by_content(tmp_path):
    mooncake = read_trace(write(tmp_path, row() + "\n\n" + row(3000, 512, 1, (7,)), "a.csv"))
    assert mooncake.format is TraceFormat.MOONCAKE
    assert [(r.at_s, r.input_tokens, r.output_tokens, r.hash_ids) for r in mooncake.requests] == [
        (0.0, 600, 5, (0, 1)),
        (3.0, 512, 1, (7,)),
    ]
    azure = read_trace(write(tmp_path, AZURE, "b.jsonl"))
    assert azure.format is TraceFormat.AZURE
    assert [(r.input_tokens, r.output_tokens, r.hash_ids) for r in azure.requests] == [
        (374, 44, ()),
        (396, 109, ()),
    ]
    assert azure.requests[1].at_s == pytest.approx(1.5000001, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no known trace"),
        ("a,b\n1,2", "no known trace"),
        (row() + "\n{broken", ":2: "),
        (row() + "\n[1]", ":2: not a JSON object"),
        (row() + "\n" + row(inputs=0, ids=()), ":2: input_length"),
        (row() + "\n" + row(outputs=-1), ":2: output_length"),
        (row() + "\n" + row(inputs=True, ids=(1,)), ":2: input_length"),
        (row() + "\n\n" + row(inputs=1025, ids=(1,)), ":3: 1 hash_ids"),
        (row() + "\n" + row(ids=(1, "x")), ":2: hash_ids"),
        (row() + "\n" + row(at_ms="soon"), ":2: timestamp"),
        (row(at_ms=float("nan")), ":1: "),
        (AZURE + "yesterday,1,1", ":4: "),
        (AZURE + "2023-11-17 00:00:02.5x,1,1", ":4: TIMESTAMP"),
        (AZURE + "2023-11-17 00:00:02.5,many,1", ":4: "),
        (AZURE + "2023-11-17 00:00:02.5,1", ":4: 2 cells under 3 columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
    ],
)
def test_a_broken_line_is_named_in_one_line(tmp_path, text, complaint):
    path = write(tmp_path, text)
    with pytest.raises(SetupError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert str(path) in message
    assert complaint in message
    assert "\n" not in message


def test_a_missing_or_binary_file_is_a_setup_error(tmp_path):
    with pytest.raises(SetupError, match="cannot read"):
        read_trace(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(SetupError, match="cannot read"):
        read_trace(tmp_path / "binary")


def test_slices_start_at_instant_zero(tmp_path):
    trace = read_trace(write(tmp_path, "\n".join(row(at_ms=1000 * t) for t in (5, 8, 11, 14, 17))))
    assert [r.at_s for r in trace.requests] == [0, 3, 6, 9, 12]
    assert [r.at_s for r in cut(trace, start_s=3, duration_s=6).requests] == [0, 3]
    assert [r.at_s for r in cut(trace, start_s=2, limit=2).requests] == [1, 4]
    with pytest.raises(SetupError, match="holds no request"):
        cut(trace, start_s=13)


def test_spreading_keeps_order_and_stays_inside_the_tick():
    instants = [0.0] * 20 + [3.0] * 5 + [9.0]
    spread = spread_ticks(instants, tick_s=3.0, seed=1)
    assert spread == sorted(spread)
    assert all(a <= b < a + 3.0 for a, b in zip(instants, spread, strict=True))
    assert len(set(spread)) == len(spread)
    assert spread == spread_ticks(instants, tick_s=3.0, seed=1)
    assert spread != spread_ticks(instants, tick_s=3.0, seed=2)
    assert spread_ticks(instants, tick_s=0.0, seed=1) == instants
