import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.html.lines import LETTER_PX, ROW_PX, levels, uprights
from loadgen.html.marks import Axis, ChartFrame, linear, logarithmic, tag
from loadgen.html.page import render
from loadgen.records import ErrorKind, RequestOutcome, RequestRecord
from loadgen.report import RunSettings, Slo, make_report
from loadgen.report.model import Probe, SearchResult
from loadgen.units import seconds, share, three_digits

VOID = {"meta"}


class Page(HTMLParser):
    """Checks that elements nest, and keeps what tests ask for."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.attributes, self.figures, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attrs):
        values = dict(attrs)
        self.attributes += [(name, *pair) for pair in attrs]
        if name not in VOID:
            self.open.append(name)
        if "data-figure" in values:
            self.figures.append((values["data-figure"], values.get("data-value")))

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    @property
    def json(self):
        return next(json.loads(text) for where, text in self.texts if where == "script")


def a_run(label, *, told, shift=0.0, model="m"):
    records = []
    for i in range(60):
        instants = [i + 0.2 + shift + 0.01 * (i % 7), i + 0.3 + shift, i + 0.5 + shift]
        phases = {
            "queue_s": 0.05,
            "prefill_s": 0.1,
            "first_hop_s": 0.01,
            "transfer_s": 0.004,
            "predicted_ttft_s": 0.2,
        }
        records.append(
            RequestRecord(
                i, float(i), sent_s=i + 0.001, token_instants_s=instants, ended_s=instants[-1],
                outcome=RequestOutcome.COMPLETED, prompt_tokens=50 + i, completion_tokens=3, cached_tokens=i,
                slo_class="chat" if i % 2 else "", timings=phases if told else None,
                served_by=(f"p{i % 2}", f"d{i % 3}") if told else (),
            )
        )  # fmt: skip
    records.append(
        RequestRecord(
            60,
            60.0,
            ended_s=60.1,
            outcome=RequestOutcome.REFUSED,
            error=ErrorKind.OVERLOADED,
            detail="503: </x>",
        )
    )
    records.append(
        RequestRecord(61, 61.0, ended_s=61.1, outcome=RequestOutcome.FAILED, error=ErrorKind.TIMEOUT)
    )
    settings = RunSettings(
        trace="t.jsonl", target="http://127.0.0.1:8000", model=model, slo=Slo(0.25, 0.2),
        label=label, planned=62,
    )  # fmt: skip
    return make_report(records, settings)


PROBES = (Probe(1.0, 95, 100, 0.95, 0.9, 0.98, False), Probe(2.0, 10, 50, 0.2, 0.1, 0.3, True))
SEARCHED = replace(a_run("first", told=True), search=SearchResult(0.9, 1.0, 2.0, "found", PROBES))
RUNS = [SEARCHED, a_run("second", told=False, shift=0.1), a_run("third", told=True, shift=0.3)]


def at(value, path):
    for part in path.split("."):
        if value is None:
            return None
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


@pytest.mark.parametrize("count", [1, 3])
def test_every_figure_on_the_page_is_that_of_the_json(count):
    page = Page(render(RUNS[:count]))
    assert page.json == [json.loads(json.dumps(r.as_json())) for r in RUNS[:count]]
    assert len(page.figures) > 60
    for path, value in page.figures:
        expected = at(page.json, path)
        assert expected == (None if value is None else pytest.approx(float(value))), path


@pytest.mark.parametrize("count", [1, 3])
def test_the_page_needs_nothing_from_elsewhere(count):
    text = render(RUNS[:count])
    page = Page(text)
    assert not [a for a in page.attributes if a[1] in ("src", "href", "action", "data", "srcset", "poster")]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|importScripts|//cdn", text)
    assert "default-src 'none'" in text
    links = re.findall(r"https?://[^\s\"<\\]+", text)
    assert set(links) <= {"http://127.0.0.1:8000"}  # the target, as text
    assert len(text) < 400_000


def test_what_comes_from_outside_is_text():
    page = Page(
        render([a_run("<script>alert(1)</script>", told=True, model='"><img src=x onerror=alert(1)>')])
    )
    assert [a for a in page.attributes if a[0] == "img" or a[1] == "onerror"] == []
    assert sum(name == "script" for name, _ in page.texts) == 2  # the data and the page's own
    assert page.json[0]["refusals"] == {"503: </x>": 1}


def test_refused_requests_keep_a_curve_from_reaching_the_top():
    charts = re.findall(r'data-series="([^"]*)"', render([SEARCHED]))
    ttft = json.loads(charts[0].replace("&quot;", '"'))[0]["points"]
    assert ttft[-1][2].endswith(share(60 / 62))


def test_a_run_without_answers_has_a_page():
    settings = RunSettings(trace="t", target="u", model="m", planned=1)
    for records in (
        [],
        [RequestRecord(0, 1.0, ended_s=1.0, outcome=RequestOutcome.FAILED, error=ErrorKind.CONNECT)],
    ):
        assert "nothing was measured" in render([make_report(records, settings)])


def test_the_same_run_has_the_same_colour_everywhere():
    text = render(RUNS)
    assert set(re.findall(r'<g class="(r\d)"', text)) == {"r0", "r1", "r2"}
    assert 'class="run-badge r1">B<' in text


def test_many_workers_are_a_profile():
    records = [
        RequestRecord(
            i,
            float(i),
            token_instants_s=[i + 1.0, i + 2.0],
            ended_s=i + 2.0,
            outcome=RequestOutcome.COMPLETED,
            prompt_tokens=i + 1,
            served_by=(f"w{i}",),
        )
        for i in range(200)
    ]
    text = render([make_report(records, RunSettings(trace="t", target="u", model="m"))])
    assert "workers, most loaded first" in text


@given(st.floats(1e-9, 1e9), st.floats(0, 1))
@settings(deadline=None)
def test_axes_keep_order_and_bounds(high, part):
    for axis in (linear(high, 50, 500), logarithmic([high, high / 1000], 50, 500), Axis(0, high, 500, 50)):
        value = axis.low + (axis.high - axis.low) * part
        assert (
            min(axis.start_px, axis.end_px) - 1e-6 <= axis.px(value) <= max(axis.start_px, axis.end_px) + 1e-6
        )
        assert 1 <= len(axis.ticks()) <= 14
        assert all(axis.low <= t <= axis.high * (1 + 1e-9) for t in axis.ticks())


def test_text_is_escaped_in_elements_and_attributes():
    assert tag("a", "<&", title='"<') == '<a title="&quot;&lt;">&lt;&amp;</a>'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (1.234, "1.23 s"),
        (0.0852, "85.2 ms"),
        (0.00031, "310 µs"),
        (0.9996, "1.00 s"),
        (123.4, "123 s"),
    ],
)
def test_seconds_have_three_digits_and_a_unit(value, text):
    assert seconds(value) == text


@given(st.floats(0.001, 1e6))
@settings(deadline=None)
def test_three_digits_are_within_half_a_percent(value):
    assert float(three_digits(value).replace(",", "")) == pytest.approx(value, rel=0.0051)


PLANE = ChartFrame(Axis(0.1, 10.0, 58, 506, is_log=True), linear(1.0, 248, 24), 520, 290)


def texts(markup):
    found = re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)" class="rule-text (start|end)">([^<]+)', "".join(markup)
    )
    return [(float(x), float(y), side, text) for x, y, side, text in found]


def apart(one, other):
    def span(x, y, side, text):
        width = LETTER_PX * len(text)
        return (x, x + width) if side == "start" else (x - width, x)

    (a, b), (c, d) = span(*one), span(*other)
    return b <= c or d <= a or abs(one[1] - other[1]) >= ROW_PX


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4, unique=True))
def test_names_of_upright_lines_do_not_lie_on_one_another(values):
    made = texts(uprights(PLANE, [(v, f"objective {seconds(v)}", "target") for v in values]))
    assert len(made) == len(values)
    assert all(apart(a, b) for i, a in enumerate(made) for b in made[:i])


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3, unique=True))
def test_names_of_level_lines_do_not_lie_on_one_another(values):
    made = texts(levels(PLANE, [(v, f"goal {v:.0%}") for v in values]))
    assert len(made) == len(values)
    assert all(apart(a, b) for a, b in pairwise(made))


def test_the_most_stringent_scale_lies_on_its_line():
    run = a_run("ours", told=False)
    scale = run.slo_scales.most_stringent
    assert scale is not None
    page = render([run])
    (cx, cy) = re.search(r'cx="([\d.]+)" cy="([\d.]+)" r="5" class="mark', page).groups()
    chart = page[page.rindex("<svg", 0, page.index('class="mark')) : page.index('class="mark')]
    points = re.search(r'<polyline points="([^"]+)"', chart)[1].split()
    assert any(p == f"{float(cx):.1f},{float(cy):.1f}" for p in points)
