"""Every format, with a small hand-written file that follows its authors' documentation."""

import gzip
import json

import pytest

from baton.core.errors import SetupError
from loadgen.formats.base import measured_tick_s
from loadgen.lengths import TraceScaling, make_plan, parse_factor, time_scale_for
from loadgen.traces import TraceFormat, cut, read_trace


def write(tmp_path, text, name="trace"):
    path = tmp_path / name
    path.write_text(text)
    return path


def rows(*objects):
    return "".join(json.dumps(o) + "\n" for o in objects)


AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00+00:00,2162,5\n"
    "2024-05-10 00:00:00.009930+00:00,2399,6\n"
    "2024-05-10 02:00:00.5+02:00,76,7\n"
)

BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,GPT-4,1087,0,1087,API log\n"
    "118.0,GPT-4,417,276,693,Conversation log\n"
)

BURST_SESSIONS = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "100.0,aa,43,GPT-4,906,446,1352,Conversation log\n"
    "110.0,bb,2,ChatGPT,36,29,65,Conversation log\n"
    "120.0,,,ChatGPT,50,9,59,API log\n"
    "200.0,aa,oops,GPT-4,1400,100,1500,Conversation log\n"
    "210.0,aa,3,GPT-4,1600,10,1610,Conversation log\n"
)


def bailian(chat_id, parent_id, at_s, inputs, outputs, turn, ids):
    return {
        "chat_id": chat_id, "parent_chat_id": parent_id, "timestamp": at_s, "input_length": inputs,
        "output_length": outputs, "type": "text", "turn": turn, "hash_ids": ids,
    }  # fmt: skip


def test_azure_of_2024_has_zones_and_instants_without_a_fraction(tmp_path):
    trace = read_trace(write(tmp_path, AZURE_2024))
    assert trace.format is TraceFormat.AZURE
    assert [r.at_s for r in trace.requests] == pytest.approx([0.0, 0.00993, 0.5], abs=1e-6)
    assert [r.input_tokens for r in trace.requests] == [2162, 2399, 76]
    assert not trace.has_prefixes


def test_burstgpt_leaves_out_and_counts_what_failed(tmp_path):
    trace = read_trace(write(tmp_path, BURST))
    assert trace.format is TraceFormat.BURSTGPT
    assert [(r.at_s, r.input_tokens, r.output_tokens) for r in trace.requests] == [
        (0, 472, 18),
        (113, 417, 276),
    ]
    assert trace.skipped_at_s == (40.0,)
    assert not trace.has_sessions


def test_burstgpt_of_release_2_has_sessions_and_how_long_answers_took(tmp_path):
    trace = read_trace(write(tmp_path, BURST_SESSIONS))
    assert [(r.session, r.turn, r.parent_row) for r in trace.requests] == [
        ("aa", 0, None),
        ("bb", 0, None),
        (None, 0, None),
        ("aa", 1, 0),
        ("aa", 2, 3),
    ]
    assert [r.elapsed_s for r in trace.requests] == [43, 2, None, None, 3]
    plan = make_plan(trace, TraceScaling(), spread=False, seed=0)
    assert plan.requests[3].parent == 0
    assert plan.requests[3].think_s == 100 - 43  # the duration of the answer is recorded
    assert plan.requests[4].think_s == pytest.approx(10 - 100 * 0.02)  # and assumed if it is not


def test_bailian_turns_follow_their_parents(tmp_path):
    trace = read_trace(
        write(
            tmp_path,
            rows(
                bailian(7, -1, 0.5, 40, 30, 1, [5, 6, 7]),
                bailian(9, -1, 1.0, 16, 3, 1, [5]),
                bailian(11, 7, 61.114, 90, 8, 2, [5, 6, 7, 8, 9]),  # one id short: an image's tokens
                bailian(12, 7, 70.0, 48, 8, 2, [5, 6, 7]),  # the same turn asked anew
                bailian(13, 12, 90.0, 64, 8, 3, [5, 6, 7, 9, 1, 1]),  # ids beyond the prompt
                bailian(14, 999, 95.0, 16, 8, 4, [4]),  # its parent is not in the file
            ),
        )
    )
    assert trace.format is TraceFormat.BAILIAN
    assert trace.hash_block_tokens == 16
    assert [(r.session, r.turn, r.parent_row) for r in trace.requests] == [
        ("7", 0, None),
        ("9", 0, None),
        ("7", 1, 0),
        ("7", 1, 0),
        ("7", 2, 3),
        ("14", 0, None),
    ]
    assert trace.requests[4].hash_ids == (5, 6, 7, 9)
    plan = make_plan(trace, TraceScaling(), spread=False, seed=0)
    assert plan.requests[2].think_s == pytest.approx(61.114 - 0.5 - 30 * 0.02)


def ragpulse(at, inputs, parts, session):
    names = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
    return {
        "timestamp": str(at), "input_length": inputs, "output_length": 9,
        "hash_ids": dict(zip(names, parts, strict=True)), "session_id": session,
    }  # fmt: skip


def component_files(tmp_path, lengths):
    (tmp_path / "1_sys_prompt.jsonl").write_text(
        rows(*({"sys_prompt_id": i, "token_length": n} for i, n in lengths.items()))
    )


def test_ragpulse_shares_whole_blocks_of_equal_components(tmp_path):
    component_files(tmp_path, {1: 32, 2: 20, 3: 28, 4: 16, 5: 100})
    path = write(
        tmp_path,
        rows(
            ragpulse(82, 100, ([1], [2, 3], [], [], [4]), "s"),
            ragpulse(93, 104, ([1], [2, 4], [], [], [3]), "t"),  # parts ways inside the fourth block
            ragpulse(99, 60, ([1], [2], [], [], [5]), "s"),  # longer components than the prompt: cut
        ),
    )
    trace = read_trace(path)
    assert trace.format is TraceFormat.RAGPULSE
    assert [(r.at_s, r.input_tokens, r.session, r.turn) for r in trace.requests] == [
        (0, 100, "s", 0),
        (11, 104, "t", 0),
        (17, 60, "s", 1),
    ]
    a, b, c = (r.hash_ids for r in trace.requests)
    assert [len(ids) for ids in (a, b, c)] == [6, 6, 3]
    assert a[:3] == b[:3] == c[:3]  # 32 + 16 of component 2's 20 tokens
    assert a[3] != b[3]
    assert not set(a[3:]) & set(b[3:])


def test_ragpulse_says_what_is_missing(tmp_path):
    path = write(tmp_path, rows(ragpulse(1, 10, ([1], [], [], [], []), "s")))
    with pytest.raises(SetupError, match=r"1_sys_prompt\.jsonl"):
        read_trace(path)
    component_files(tmp_path, {2: 5})
    with pytest.raises(SetupError, match=r":1: hash_ids: no file .* length of 1"):
        read_trace(path)


def test_batons_own_fields_beside_mooncakes(tmp_path):
    first = {
        "timestamp": 0,
        "input_length": 40,
        "output_length": 5,
        "hash_ids": [1, 2, 3],
        "block_tokens": 16,
    }
    trace = read_trace(
        write(
            tmp_path,
            rows(
                {**first, "session_id": "a", "slo_class": "chat", "tenant": "x"},
                {**first, "timestamp": 100, "hash_ids": []},
                # Only the first turn has an instant, as in aiperf's format.
                {"session_id": "a", "delay": 2500, "input_length": 16, "output_length": 1, "hash_ids": [1]},
            ),
        )
    )
    assert trace.format is TraceFormat.MOONCAKE
    assert trace.hash_block_tokens == 16
    one, two, three = trace.requests
    assert (one.session, one.slo_class, one.tenant) == ("a", "chat", "x")
    assert (two.hash_ids, two.session) == ((), None)
    assert (three.at_s, three.parent_row, three.turn, three.think_s) == (2.5, 0, 1, 2.5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (BURST + "soon,GPT-4,1,1,2,API log\n", ":5: Timestamp"),
        (BURST + "120,GPT-4,1.5,1,2,API log\n", ":5: Request tokens"),
        (BURST + "120,GPT-4,1\n", ":5: 3 cells under 6 columns"),
        (rows(bailian(1, -1, 0, 5, 5, 1, [1]), bailian(2, -1, "x", 5, 5, 1, [1])), ":2: timestamp"),
        (rows(bailian(1, -1, 0, 5, 5, 1, "1")), ":1: hash_ids"),
        (rows(bailian(-3, -1, 0, 5, 5, 1, [])), ":1: chat_id"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "block_tokens": 0}\n', ":1: block_tokens"),
    ],
)
def test_a_broken_line_is_named(tmp_path, text, complaint):
    with pytest.raises(SetupError) as caught:
        read_trace(write(tmp_path, text))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gzip_is_read_as_it_is_and_a_torn_one_is_an_error(tmp_path):
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress(BURST.encode()))
    assert read_trace(packed).requests == read_trace(write(tmp_path, BURST)).requests
    packed.write_bytes(gzip.compress(BURST.encode())[:40])
    with pytest.raises(SetupError, match="cannot read"):
        read_trace(packed)


def test_the_format_can_be_said(tmp_path):
    with pytest.raises(SetupError, match=":1: this is not Mooncake's JSON lines: no field input_length"):
        read_trace(write(tmp_path, '{"chat_id": 1}'), format=TraceFormat.MOONCAKE)


MOONCAKE = '{"timestamp": 0, "input_length": 9, "output_length": 1}\n'


@pytest.mark.parametrize(
    ("text", "said", "complaint"),
    [
        (BURST, "azure", ":1: this is not Azure CSV: no column ContextTokens, GeneratedTokens, TIMESTAMP"),
        (
            AZURE_2024,
            "burstgpt",
            ":1: this is not BurstGPT CSV: no column Request tokens, Response tok",
        ),
        (MOONCAKE, "azure", ":1: this is not Azure CSV: no column"),
        (MOONCAKE, "bailian", ":1: this is not Bailian's JSON lines: no field chat_id"),
        (MOONCAKE, "ragpulse", ":1: this is not RAGPulse's JSON lines: no field hash_ids"),
        (AZURE_2024, "mooncake", ":1: not a JSON object: 'TIMESTAMP,ContextTokens,GeneratedTokens'"),
        (BURST, "bailian", ":1: not a JSON object: 'Timestamp,"),
        (BURST, "ragpulse", ":1: not a JSON object: 'Timestamp,"),
    ],
)
def test_a_file_of_another_format_than_was_said_is_told(tmp_path, text, said, complaint):
    with pytest.raises(SetupError) as caught:
        read_trace(write(tmp_path, text), format=TraceFormat(said))
    assert complaint in str(caught.value)


LONG = 10**23


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (AZURE_2024 + f"2024-05-10 00:00:01,{LONG},1\n", ":5: ContextTokens must be at most 100,000,000"),
        (AZURE_2024 + "2024-05-10 00:00:01,1,100000001\n", ":5: GeneratedTokens must be at most 100,000,000"),
        (AZURE_2024 + "2024-05-10 00:00:01,abc,1\n", ":5: ContextTokens must be a number, is 'abc'"),
        (
            AZURE_2024 + "2035-05-10 00:00:01,1,1\n",
            ":5: TIMESTAMP is 11 years from the first row's",
        ),
        (AZURE_2024 + "2024-13-10 00:00:01,1,1\n", ":5: TIMESTAMP '2024-13-10 00:00:01' is not an instant"),
        (BURST + f"120,GPT-4,{LONG},1,2,API log\n", ":5: Request tokens must be at most"),
        (BURST + "1e10,GPT-4,1,1,2,API log\n", ":5: Timestamp is 317 years from"),
        (MOONCAKE.replace("9", str(LONG // 10**5)), ":1: input_length must be at most"),
        (
            MOONCAKE + MOONCAKE.replace("0", "9e99", 1),
            ":2: timestamp must be an instant in seconds of at most",
        ),
        (MOONCAKE + MOONCAKE.replace("0", "9e11", 1), ":2: timestamp is 28.5 years from"),
        (MOONCAKE + MOONCAKE.replace("}", ', "delay": 9e11}'), ":2: delay must be at most 10 years"),
        (rows(bailian(1, -1, 0, 10**9, 5, 1, [])), ":1: input_length must be at most"),
        (
            rows(bailian(1, -1, 0, 9, 5, 1, [1]), bailian(2, -1, 1e9, 9, 5, 1, [1])),
            ":2: timestamp is 31.7 years",
        ),
    ],
)
def test_what_no_trace_can_mean_is_named(tmp_path, text, complaint):
    path = write(tmp_path, text)
    with pytest.raises(SetupError) as caught:
        read_trace(path)
    assert complaint in str(caught.value)


def test_a_slice_leaves_out_what_failed_within_it(tmp_path):
    header, *lines = BURST.splitlines(keepends=True)
    failed = "2,GPT-4,1087,0,1087,API log\n"
    trace = read_trace(write(tmp_path, header + failed + "".join(lines) + failed.replace("2,", "300,", 1)))
    assert trace.skipped_at_s == (-3.0, 40.0, 295.0)
    assert len(cut(trace).skipped_at_s) == 3
    assert cut(trace, limit=1).skipped_at_s == (-3.0,)
    assert cut(trace, limit=2).skipped_at_s == (-3.0, 40.0, 295.0)
    assert cut(trace, start_s=30).skipped_at_s == (10.0, 265.0)
    assert cut(trace, start_s=30, duration_s=100).skipped_at_s == (10.0,)


@pytest.mark.parametrize("rate", [0.0, -1.0, 1e-300, 1e300, float("inf"), float("nan")])
def test_a_rate_that_cannot_be_meant_is_refused(tmp_path, rate):
    trace = read_trace(write(tmp_path, BURST))
    with pytest.raises(SetupError, match=r"--rate .*: must be from 1e-06 to 1,000,000 per second"):
        time_scale_for(trace, rate)
    assert time_scale_for(trace, 1_000_000) > 0


@pytest.mark.parametrize("factor", ["0", "-1", "nan", "inf", "1e9", "1e-9", "1/0", "1" * 5000, "1e999999999"])
def test_a_factor_that_cannot_be_meant_is_refused(factor):
    with pytest.raises(SetupError, match="is not a positive factor"):
        parse_factor(factor)


def test_lengths_that_are_scaled_beyond_all_use_are_refused(tmp_path):
    trace = read_trace(write(tmp_path, BURST))
    with pytest.raises(SetupError, match="request 0, scaled, has more than 100,000,000 tokens"):
        make_plan(trace, TraceScaling(input_scale=parse_factor("1000000")), spread=False, seed=0)


def test_requests_are_put_in_order(tmp_path):
    def at(seconds):
        return f"{seconds},ChatGPT,10,1,11,API log\n"

    header = BURST.splitlines(keepends=True)[0]
    path = write(tmp_path, header + at(5) + at(3) + at(4) + at(9))
    assert [(r.at_s, r.row) for r in read_trace(path).requests] == [(0, 1), (1, 2), (2, 0), (6, 3)]


def test_a_cut_session_begins_where_it_was_cut(tmp_path):
    trace = cut(read_trace(write(tmp_path, BURST_SESSIONS)), start_s=50)
    assert [(r.session, r.parent_row) for r in trace.requests] == [("aa", None), ("aa", 3)]
    assert [r.parent for r in make_plan(trace, TraceScaling(), spread=False, seed=0).requests] == [None, 0]


def test_a_grid_of_arrivals_is_measured():
    assert measured_tick_s(iter([0, 0, 0, 3, 3, 6, 6, 6, 9.5, 9.5])) == 3
    assert measured_tick_s(iter([0.0, 0.1, 0.1, 0.5, 0.9])) == 0
    assert measured_tick_s(iter([0.0, 0.0])) == 0
