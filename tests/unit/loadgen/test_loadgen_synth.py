"""Synthetic traces: a fit finds the parameters again, and differences are reported."""

import json
from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from baton.core.errors import SetupError
from loadgen.formats.base import Trace, TraceFormat, TraceRequest
from loadgen.sources import open_trace
from loadgen.synth.cli import synth
from loadgen.synth.fit import fit
from loadgen.synth.generate import FORGET_AT_ONCE, RequestGenerator, stream, synthesize
from loadgen.synth.goodness import compare, ks_distance
from loadgen.synth.library import names, params_of
from loadgen.synth.lineage import Kind, descents
from loadgen.synth.params import LEVELS, Quantiles, from_toml, to_toml
from loadgen.traces import read_trace

MOONCAKE = params_of("mooncake-conversation")
AZURE = params_of("azure-conv")


@pytest.mark.parametrize("name", names())
def test_built_in_parameters_are_small_and_say_where_they_are_from(name):
    params = params_of(name)
    assert params.source.licence
    assert params.source.url
    text = to_toml(params)
    assert len(text) < 8_000
    assert from_toml(text, name="x") == params


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_quantiles_stay_inside_the_sample(sample, level):
    quantiles = Quantiles.of(sample)
    low, high = min(sample), max(sample)
    assert low * 0.999 - 1e-6 <= quantiles.at(level) <= high * 1.001 + 1e-6
    assert quantiles.table().at(level) == pytest.approx(quantiles.at(level), rel=0.5, abs=high * 0.3 + 1)


def test_a_distribution_comes_back_from_its_quantiles():
    rng = np.random.default_rng(0)
    # Two modes, as production lengths have.
    sample = np.concatenate((rng.lognormal(4, 0.3, 4000), rng.lognormal(9, 0.5, 2000)))
    table = Quantiles.of(sample).table()
    again = np.array([table.at(u) for u in rng.random(6000)])
    assert ks_distance(sample, again) < 0.035
    assert ks_distance(sample, sample + 10_000) > 0.6


@pytest.mark.parametrize("params", [MOONCAKE, AZURE], ids=["mooncake", "azure"])
def test_a_fit_to_what_was_made_gives_the_parameters_back(params):
    made = synthesize(params, seed=5, requests=5000)
    fitted = fit(made)
    # The profile of the first part is not that of the whole.
    assert fitted.arrivals.rate_per_s == pytest.approx(params.arrivals.rate_per_s, rel=0.2)
    assert fitted.arrivals.shape == pytest.approx(params.arrivals.shape, rel=0.15)
    assert fitted.block_tokens == params.block_tokens
    assert ks_distance(np.array(fitted.fresh.input.values), np.array(params.fresh.input.values)) < 0.12
    if params.turns:
        assert fitted.turns.share == pytest.approx(params.turns.share, abs=0.04)
        assert fitted.turns.lag_s.at(0.5) == pytest.approx(params.turns.lag_s.at(0.5), rel=0.15)
        assert [h.blocks for h in fitted.heads] == [h.blocks for h in params.heads]
    goodness = compare(made, synthesize(fitted, seed=6, requests=5000))
    assert goodness.hit_ratio_gap < 0.06  # two samples of this length differ by half of it
    assert max(d.ks for d in goodness.distances) < 0.07


def test_what_is_unlike_is_told():
    made = synthesize(MOONCAKE, seed=1, requests=1200)
    unshared = replace(MOONCAKE, turns=None, branches=None)
    goodness = compare(made, synthesize(unshared, seed=1, requests=1200))
    assert not goodness.is_close
    assert goodness.hit_ratio_gap > 0.1
    longer = compare(made, synthesize(AZURE, seed=1, requests=1200))
    assert max(d.ks for d in longer.distances if d.name == "input tokens") > 0.3


def test_bursts_come_back():
    slow = replace(AZURE.arrivals, modulation=0.6, modulation_s=40.0, shape=0.5, profile=(1.0,))
    bursty = replace(AZURE, arrivals=slow)
    fitted = fit(synthesize(bursty, seed=2, requests=20_000)).arrivals
    assert fitted.modulation == pytest.approx(0.6, rel=0.35)
    assert 15 < fitted.modulation_s < 90
    assert fitted.shape == pytest.approx(0.5, rel=0.25)
    steady = fit(
        synthesize(replace(AZURE, arrivals=replace(slow, modulation=0.0, shape=1.0)), seed=2, requests=10_000)
    ).arrivals
    assert steady.modulation < 0.12
    assert steady.shape == pytest.approx(1.0, rel=0.1)


@given(st.integers(0, 1000), st.sampled_from([MOONCAKE, replace(MOONCAKE, block_tokens=16)]))
@settings(max_examples=8, deadline=None)
def test_requests_are_as_a_traces_must_be(seed, params):
    requests = list(stream(params, seed=seed, requests=400))
    assert requests == list(stream(params, seed=seed, requests=400))
    assert [r.row for r in requests] == list(range(400))
    assert all(a.at_s <= b.at_s for a, b in pairwise(requests))
    for r in requests:
        assert len(r.hash_ids) == -(-r.input_tokens // params.block_tokens)
        assert 1 <= r.input_tokens <= params.input_tokens_max
        assert r.output_tokens >= 1
        if r.parent_row is not None:
            parent = requests[r.parent_row]
            whole = parent.input_tokens // params.block_tokens
            assert r.hash_ids[:whole] == parent.hash_ids[:whole]
            assert (r.session, r.turn) == (parent.session, parent.turn + 1)


def test_memory_is_that_of_the_longest_lag():
    shorter = {"lag_s": Quantiles(tuple(v / 100 for v in MOONCAKE.turns.lag_s.values))}
    params = replace(
        MOONCAKE, turns=replace(MOONCAKE.turns, **shorter), branches=replace(MOONCAKE.branches, **shorter)
    )
    generator = RequestGenerator(params, seed=0, requests_per_s=20.0)
    window = turns = 0
    for request in islice(generator, 8_000):
        window = max(window, len(generator._past))
        turns += request.parent_row is not None
    assert window < 2 * (20.0 * shorter["lag_s"].values[-2] + FORGET_AT_ONCE) < 5_000
    assert turns > 0.3 * 8_000


def test_length_and_rate_are_free():
    by_time = list(stream(MOONCAKE, duration_s=100.0, requests_per_s=20.0))
    assert 1500 < len(by_time) < 2500
    assert by_time[-1].at_s < 100
    with pytest.raises(SetupError, match="--rate"):
        next(stream(MOONCAKE, requests_per_s=0.0))


def row(at_s, tokens, ids, **more):
    return TraceRequest(at_s, tokens, 5, ids, **more)


def test_where_a_prompt_came_from():
    base = [row(float(i), 100, (0, 1, 100 + i), row=i) for i in range(40)]  # a head of two blocks
    told = [
        row(41.0, 160, (0, 1, 105, 7, 8), row=40),  # all of request 5, and more
        row(42.0, 130, (0, 1, 105, 7, 9), row=41),  # a branch off that
        row(43.0, 60, (50, 51), row=42),  # nothing
    ]
    trace = Trace(TraceFormat.MOONCAKE, (*base, *told), block_tokens=32)
    found, heads = descents(trace)
    assert heads == (2,)
    assert [d.kind for d in found[:40]] == [Kind.FRESH] * 40
    assert [d.head for d in found[1:40]] == [0] * 39
    turn, branch, alone = found[40:]
    assert (turn.kind, turn.parent, turn.shared) == (Kind.TURN, 5, 3)
    assert (branch.kind, branch.parent, branch.shared) == (Kind.BRANCH, 40, 4)
    assert (alone.kind, alone.parent, alone.head) == (Kind.FRESH, None, -1)


def test_conversations_without_prefixes_are_fitted_by_their_sessions():
    rows = []
    for i in range(300):
        parent = i - 30 if i >= 30 and i % 3 == 0 else None
        rows.append(row(i * 1.0, 100 + 5 * (i % 7) + (200 if parent else 0), (), row=i, parent_row=parent))
    fitted = fit(Trace(TraceFormat.BURSTGPT, tuple(rows)))
    assert fitted.turns.share == pytest.approx(90 / 270, abs=0.01)
    assert fitted.turns.lag_s.at(0.5) == 30
    made = synthesize(fitted, requests=600)
    assert not made.has_prefixes
    assert made.has_sessions


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.replace("baton-synth/1", "baton-synth/9"), "schema"),
        (lambda t: t.replace("rate_per_s = ", "rate_per_s = -"), "above 0"),
        (lambda t: t.replace("block_tokens", "block_size", 1), "'block_tokens' is missing"),
        (lambda t: t.replace("input = [", "input = [9e9, ", 1), "rising numbers"),
        (lambda t: t[:300] + "[[[", "not parameters"),
        (lambda t: t.replace("[turns]\nshare = 0.", "[turns]\nshare = 7."), "more than 1"),
        (lambda t: t.replace("shape", "form", 1), "form"),
    ],
)
def test_broken_parameters_are_one_line_that_says_what(change, complaint):
    text = change(to_toml(MOONCAKE))
    with pytest.raises(SetupError) as caught:
        from_toml(text, name="mine.toml")
    assert str(caught.value).startswith("mine.toml: ")
    assert complaint in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def command(*arguments):
    app = typer.Typer()
    app.command()(synth)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_fits_saves_and_makes(tmp_path):
    made, saved, again, figures = (tmp_path / n for n in ("a.jsonl", "mine.toml", "b.jsonl", "f.json"))
    done = command("mooncake-conversation", "--requests", "800", "--seed", "4", "--out", str(made))
    assert done.exit_code == 0, done.output
    trace = read_trace(made)
    assert len(trace.requests) == 800
    assert trace.has_sessions
    arguments = ["--save", str(saved), "--json", str(figures), "--out", str(again), "--plain"]
    done = command(str(made), *arguments)
    assert done.exit_code == 0, done.output
    assert "LRU hit ratio, no bound" in done.output
    told = json.loads(figures.read_text())
    assert told["hit_ratio_gap"] < 0.2
    assert len(told["hit_ratios"]) == 7
    assert set(json.loads(again.read_text().splitlines()[0])) == {
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
    }
    fitted = open_trace(f"synth:{saved}", requests=100)
    assert len(fitted.requests) == 100
    assert len(open_trace("synth:azure-conv", duration_s=30.0).requests) > 60


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "built-in names are azure-conv"),
        (["azure-conv"], "nothing to do"),
        (["gone.toml", "--out", "-"], "cannot read"),
        (["azure-conv", "--out", "/nowhere/x"], "cannot write"),
        (["azure-conv", "--rate", "0", "--out", "-"], "above 0"),
    ],
)
def test_bad_input_is_one_line(arguments, complaint):
    done = command(*arguments)
    assert done.exit_code == 2
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_short_trace_is_not_fitted():
    with pytest.raises(SetupError, match="too few"):
        fit(Trace(TraceFormat.AZURE, (row(0.0, 1, ()),)))


def test_levels_cover_everything():
    assert LEVELS[0] == 0
    assert LEVELS[-1] == 1
    assert list(LEVELS) == sorted(set(LEVELS))


def test_the_rate_asked_for_is_that_of_what_is_made_and_not_of_the_whole_profile():
    rising = replace(MOONCAKE.arrivals, profile=(0.2, 1.0, 1.8), profile_s=3000.0, shape=50.0, modulation=0.0)
    params = replace(MOONCAKE, arrivals=rising)
    for duration_s in (500.0, 1500.0, 3000.0, 4000.0, 7000.0):
        made = sum(1 for _ in stream(params, duration_s=duration_s, requests_per_s=2.0))
        assert made == pytest.approx(2.0 * duration_s, rel=0.02), duration_s
    for requests in (300, 3000, 9000):
        last = list(stream(params, requests=requests, requests_per_s=2.0))[-1]
        assert last.at_s == pytest.approx(requests / 2.0, rel=0.02), requests
    untouched = sum(1 for _ in stream(params, duration_s=500.0))
    assert untouched == pytest.approx(0.2 * 500 * rising.rate_per_s, rel=0.1), "as fitted"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["azure-conv", "--requests", "5", "--duration", "5", "--out", "{o}"], "give one of them"),
        (["azure-conv", "--duration", "0", "--out", "{o}"], "--duration 0: must be above 0"),
        (["azure-conv", "--duration", "inf", "--out", "{o}"], "--duration inf: must be above 0"),
        (["azure-conv", "--duration", "nan", "--out", "{o}"], "than or equal to 0"),
        (["azure-conv", "--duration", "1e12", "--out", "{o}"], "more than 1,000,000,000"),
        (["azure-conv", "--requests", "5", "--rate", "inf", "--out", "{o}"], "--rate inf: must be above 0"),
        (["azure-conv", "--requests", "5", "--out", "{o}", "--json", "{j}"], "give --check TRACE"),
        (["azure-conv", "--requests", "5"], "give --out FILE"),
        (["azure-conv", "--save", "-", "--out", "-"], "give each a place of its own"),
        (["azure-conv", "--save", "{o}", "--out", "{o}"], "give each a place of its own"),
        (["trace.jsonl", "--check", "other.jsonl"], "is fitted, and compared with"),
    ],
)
def test_what_would_be_left_undone_is_refused(tmp_path, arguments, says):
    places = {"{o}": str(tmp_path / "o.jsonl"), "{j}": str(tmp_path / "j.json")}
    result = command(*[places.get(a, a) for a in arguments])
    assert result.exit_code == 2
    assert not list(tmp_path.iterdir()), "nothing is begun"
    assert says in result.output
    assert "Traceback" not in result.output
