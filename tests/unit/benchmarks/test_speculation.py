"""The speculation bench: it speculates, its texts deserve their names, and it notices a wrong token."""

import json
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.core.steps import StepPlan, StepResult
from benchmarks import speculation
from benchmarks.speculation import SpeculationLoad, TokensDiffer, measure, passages
from commands.bench import app
from engine.execution.executor import Executor
from tests.models import make_model

ENGINE = EngineConfig(kv_bytes=2**21, block_tokens=16, threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The greedy model repeats the last token for ever, because its layer adds nothing and its embeddings are
    tied. At temperature 1 it gives any token, because its logits are small."""
    path = tmp_path_factory.mktemp("speculation") / "m"
    make_model(path, num_hidden_layers=1, tie_word_embeddings=True)
    file = path / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
    weights["model.norm.weight"].mul_(0.01)
    save_file(weights, file, metadata={"format": "pt"})
    return path


@pytest.fixture(autouse=True)
def steady_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculation pays or not by how long steps take; here all take equally long."""
    execute = Executor.execute

    def steady(self: Executor, plan: StepPlan) -> StepResult:
        return msgspec.structs.replace(execute(self, plan), elapsed_s=0.01)

    monkeypatch.setattr(Executor, "execute", steady)


def run(folder: Path, load: SpeculationLoad, **engine: str) -> list[speculation.TextResult]:
    settings = ENGINE.model_copy(update=engine)
    return measure(ModelConfig(path=str(folder)), settings, load, progress=lambda text: None)


def test_drafts_come_true_where_text_repeats_and_are_not_made_where_it_does_not(folder: Path):
    results = {(r.text, r.mode): r for r in run(folder, SpeculationLoad(batch=2, tokens=48, rounds=1))}
    assert list(results) == [(text, mode) for text in speculation.TEXTS for mode in ("off", "ngram")]
    assert all(r.tokens_per_s > 0 for r in results.values())
    assert all(
        (r.drafted, r.accepted, r.ratio) == (0, 0, 1) for (_, mode), r in results.items() if mode == "off"
    )
    repeats, fresh = results["repeats", "ngram"], results["fresh", "ngram"]
    assert repeats.drafted >= repeats.accepted > 24
    assert fresh.accepted < repeats.accepted / 4


def test_a_draft_model_takes_part(folder: Path):
    results = run(folder, SpeculationLoad(tokens=8, rounds=1), draft_model=str(folder))
    assert [r.mode for r in results[:3]] == ["off", "ngram", "draft"]
    assert results[2].accepted > 0


def test_half_of_a_text_alternates():
    parts = passages("half", 80)
    assert [(p.repeats, p.token_count) for p in parts] == [(False, 32), (True, 32), (False, 16)]
    assert [p.repeats for p in passages("repeats", 80) + passages("fresh", 80)] == [True, False]


def test_a_wrong_token_with_drafts_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    execute = Executor.execute

    def wrong(self: Executor, plan: StepPlan) -> StepResult:
        result = execute(self, plan)
        if not any(item.draft_count for item in plan.items):
            return result
        damaged = tuple(
            msgspec.structs.replace(r, tokens=(*r.tokens[:-1], r.tokens[-1] ^ 1)) if r.tokens else r
            for r in result.results
        )
        return msgspec.structs.replace(result, results=damaged)

    monkeypatch.setattr(Executor, "execute", wrong)
    command = ["speculation", "--model", str(folder), "--tokens", "24", "--rounds", "1"]
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 1
    assert "changes the output: repeats, " in outcome.stderr
    with pytest.raises(TokensDiffer, match=r"sequence 1 .* token 2"):
        speculation.check_same([[1], [1, 2, 3]], [[1], [1, 2, 4]], what="x")
    with pytest.raises(TokensDiffer, match="token 1"):
        speculation.check_same([[1, 2]], [[1]], what="x")


def test_the_command_prints_json(folder: Path):
    command = ["speculation", "--model", str(folder), "--tokens", "4", "--rounds", "1", "--json"]
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(outcome.stdout)
    assert report["load"] == {"batch": 1, "tokens": 4, "rounds": 1}
    assert len(report["results"]) == 6


def test_a_load_that_does_not_fit_is_refused(folder: Path):
    with pytest.raises(SetupError, match=r"--tokens 9000: .* context"):
        run(folder, SpeculationLoad(tokens=9000))
    with pytest.raises(SetupError, match=r"--batch 4000: .* KV blocks"):
        run(folder, SpeculationLoad(batch=4000))
