"""The bench of workers of several ranks measures what it says, with figures of any size."""

import json
import os
import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.core.errors import SetupError
from benchmarks.parallel.cli import PARTS
from benchmarks.parallel.links import CONTEXT_TOKENS, decode_plan
from benchmarks.parallel.measure import Comparison, MemoryResult
from benchmarks.parallel.model_requests import RankMemory
from commands.bench import app
from engine.parallel.order_codec import OrderDecoder, OrderEncoder
from tests.models import make_model

needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks have a core each")
SMALL = ["--prefill-tokens", "40", "--batches", "1,2", "--context-tokens", "40", "--rounds", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", with_tokenizer=False)


def test_help_names_every_part() -> None:
    said = CliRunner().invoke(app, ["parallel", "--help"]).output
    assert [part for part in PARTS if part not in said] == []


def measured(folder: Path, parts: str) -> dict[str, Any]:
    """What the bench reports of some parts. It starts processes for each, which takes a while in itself."""
    sizes = [*SMALL, "--long-prompt-tokens", "80", "--calls", "5"]
    affinity = os.sched_getaffinity(0)
    done = CliRunner().invoke(app, ["parallel", "--model", str(folder), "--parts", parts, *sizes, "--json"])
    assert done.exit_code == 0, done.output
    assert os.sched_getaffinity(0) == affinity
    return json.loads(done.stdout)


def check_comparisons(result: dict[str, Any]) -> None:
    assert [one["work"] for one in result["comparisons"]] == ["prefill", "decode", "decode"]
    for one in result["comparisons"]:
        assert len(one["alone_s"]) == len(one["together_s"]) == 1
        assert min(*one["alone_s"], *one["together_s"]) > 0


@needs_two_cores
def test_links_are_measured_beside_memcpy(folder: Path) -> None:
    links = measured(folder, "links")["links"]
    assert {one["size_bytes"] for one in links["sums"]} >= {16 * 2**10, 4 * 2**20}
    assert all(one["all_reduce_s"] > 0 < one["memcpy_s"] for one in links["sums"])
    assert [one["items"] for one in links["plans"]] == [0, 1, 8, 64]
    assert all(0 < one["p50_s"] <= one["p99_s"] for one in links["plans"])


@needs_two_cores
def test_tensor_ranks_are_measured_beside_two_threads(folder: Path) -> None:
    (tensor,) = measured(folder, "tensor")["shapes"]
    assert tensor["shape"] == "tp2"
    check_comparisons(tensor)
    by_shape = {one["shape"]: one["parts"] for one in tensor["profiles"]}
    assert min(by_shape["tp2"][part] for part in ("sums", "logits gather", "send plan", "share tokens")) > 0
    assert "sums" not in by_shape["1"]
    assert by_shape["1"]["model"] > 0  # a step that was replayed would have no parts


@needs_two_cores
@pytest.mark.parametrize(("part", "shape"), [("pipeline", "pp2"), ("context", "cp2")])
def test_ranks_are_measured_beside_one_core(folder: Path, part: str, shape: str) -> None:
    (result,) = measured(folder, part)["shapes"]
    assert result["shape"] == shape
    check_comparisons(result)


@needs_two_cores
def test_memory_of_a_rank_is_measured_beside_the_whole_models(folder: Path) -> None:
    memory = measured(folder, "memory")["memory"]
    assert [one["shape"] for one in memory] == ["tp2", "pp2"]
    for one in memory:
        assert len(one["ranks"]) == 2
        assert 2 * one["ranks"][0]["kv_pool"] == one["alone"]["kv_pool"]
        assert all(rank["peak"] > rank["libraries"] > 0 for rank in [*one["ranks"], one["alone"]])


@needs_two_cores
def test_predictions_are_measured_for_each_shape(folder: Path) -> None:
    report = measured(folder, "predict")
    predictions = report["predictions"]
    assert {one["shape"] for one in predictions} == {"1", "tp2", "pp2"}
    assert len(predictions) == 3 * 4
    for one in predictions:
        assert len(one["measured_s"]) == len(one["simulated_s"]) == len(one["step_time_s"])
        assert min(*one["measured_s"], *one["step_time_s"], *one["simulated_s"]) > 0
    # What a sum costs beside its bytes is a difference of two measurements, and none is less than nothing.
    assert report["one_rank"]["fixed_s"] > 0 <= report["one_rank"]["sum_s"]


@needs_two_cores
def test_tables_show_what_was_asked_for() -> None:
    sizes = ["--parts", "links", "--rounds", "1", "--calls", "5"]
    done = CliRunner().invoke(app, ["parallel", *sizes], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "All-reduce over two ranks" in done.stdout
    assert "4096" in done.stdout
    assert "pp2" not in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--parts", "links,gpu"], "--parts links,gpu"),
        (["--batches", "1,many"], "--batches 1,many"),
        (["--wide", "--model", "here"], "--wide"),
        (["--model", "/nowhere", "--parts", "tensor"], "/nowhere"),
    ],
)
def test_what_cannot_be_measured_is_said(options: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["parallel", *options])
    assert isinstance(done.exception, SetupError)
    assert words in str(done.exception)


def test_ratios_compare_rounds_with_each_other_and_the_best_with_the_best() -> None:
    one = Comparison("decode", "1", alone_s=[1.0, 10.0, 2.0], together_s=[2.0, 10.0, 3.0])
    assert one.ratio == statistics.median([2.0, 1.0, 1.5])
    assert one.best_ratio == 2.0


def test_memory_goes_by_the_largest_rank() -> None:
    alone, ranks = RankMemory(500, 100, 50), [RankMemory(250, 100, 25), RankMemory(300, 100, 25)]
    result = MemoryResult("tp2", ranks, alone)
    assert (result.peak_ratio, result.model_ratio) == (0.6, 0.5)


def test_plans_continue_one_another_as_those_of_decode_steps_do() -> None:
    encode, decode = OrderEncoder().encode, OrderDecoder().decode
    plans = [decode_plan(number, 8) for number in range(40)]
    sizes: list[int] = []
    for plan in plans:
        data = encode(plan)
        assert decode(data) == plan
        sizes.append(len(data))
    assert max(sizes[1:]) < sizes[0] / 4
    assert [plan.items[0].first_position for plan in plans[:2]] == [CONTEXT_TOKENS, CONTEXT_TOKENS + 1]
