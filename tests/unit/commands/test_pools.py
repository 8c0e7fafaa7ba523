import re

import pytest
from typer.testing import CliRunner

from baton.config.served_models import each_model
from baton.core.errors import SetupError
from commands.app import _experts, _pools, app
from commands.settings import load_config


def test_both_alone_is_the_whole_cluster():
    counts = ("cluster.prefill_workers", "cluster.decode_workers", "cluster.aggregated_workers")
    assert tuple(map(_pools(None, None, "2").get, counts)) == ("0", "0", "2")
    assert tuple(map(_pools(None, None, "2xtp2").get, counts)) == ("0", "0", "2xtp2")
    assert tuple(map(_pools("1", None, "2").get, counts)) == ("1", None, "2")
    assert tuple(map(_pools(None, None, "0").get, counts)) == (None, None, "0")
    assert tuple(map(_pools(None, None, None).get, counts)) == (None, None, None)


def test_experts_on_ranks_of_their_own_are_one_option(monkeypatch):
    configs = []
    monkeypatch.setattr("commands.serve.serve_cluster", lambda config, **_: configs.append(config))
    for words in (["serve"], ["serve", "--experts", "3"], ["control", "--experts", "2"]):
        result = CliRunner().invoke(app, [*words, "--model", "a/mixture"])
        assert result.exit_code == 0, result.output
    assert [(c.experts.parallel, c.experts.ranks) for c in configs] == [
        ("off", 0),
        ("ranks", 3),
        ("ranks", 2),
    ]
    assert CliRunner().invoke(app, ["serve", "--experts", "0"]).exit_code == 2


def pool_of(cluster, role):
    return getattr(cluster, f"{role}_workers"), cluster.shapes.get(role)


@pytest.mark.parametrize(
    ("text", "count", "shape"),
    [
        ("2", 2, None),
        ("2xtp2", 2, "tp2"),
        ("2 x tp2", 2, "tp2"),
        ("2x tp2pp3", 2, "tp2pp3"),
        ("3×tp4", 3, "tp4"),
        ("tp2", 1, "tp2"),
        ("4x1", 4, "1"),
        ("0", 0, None),
    ],
)
def test_a_number_of_workers_may_name_their_shape(text, count, shape):
    config = load_config([], {"cluster.prefill_workers": text})
    assert pool_of(config.cluster, "prefill") == (count, shape)
    assert pool_of(config.cluster, "decode") == (1, None)
    assert load_config([f"cluster.prefill_workers={text}"]).cluster == config.cluster


def test_a_shape_beside_the_number_wins_over_one_that_was_set_for_the_role():
    sets = ["cluster.shapes.prefill=tp4", "cluster.shapes.decode=tp2"]
    shapes = load_config(sets, {"cluster.prefill_workers": "2xtp2"}).cluster.shapes
    assert shapes == {"prefill": "tp2", "decode": "tp2"}
    assert load_config(sets, {"cluster.prefill_workers": "2"}).cluster.shapes["prefill"] == "tp4"


def test_the_environment_and_the_file_of_models_take_the_same(monkeypatch, tmp_path):
    monkeypatch.setenv("BATON_CLUSTER__DECODE_WORKERS", "2xtp2")
    assert pool_of(load_config().cluster, "decode") == (2, "tp2")
    file = tmp_path / "models.yaml"
    file.write_text(
        "models:\n"
        "  chat: {model: {path: a/chat}, cluster: {prefill_workers: 2xtp4, decode_workers: 1}}\n"
        "  small: {model: {path: a/small}, cluster: {aggregated_workers: tp2}, engine: {shape: 1}}\n"
        "  wide: {model: {path: a/wide}, engine: {shape: tp8}, cluster: {shapes: {decode: tp2}}}\n"
    )
    chat, small, wide = each_model(load_config(models=file)).values()
    assert [pool_of(chat.cluster, role) for role in ("prefill", "decode")] == [(2, "tp4"), (1, "tp2")]
    assert (small.cluster.prefill_workers, small.cluster.aggregated_workers) == (0, 1)
    assert str(small.shape_of("aggregated")) == "tp2"
    assert [str(wide.shape_of(role)) for role in ("prefill", "decode")] == ["tp8", "tp2"]
    assert wide.of_role("decode").engine.shape == "tp2"


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["cluster.shapes.prefil=tp2"], "cluster.shapes: prefil: no such role; roles are prefill, decode"),
        (["cluster.shapes.prefill=tp0"], "it must be at least 1"),
        (["cluster.decode_workers=2xtpx"], 'decode_workers: shape "tpx" is not understood'),
        (["cluster.decode_workers=-1"], "cluster.decode_workers: Input should be greater than or equal to 0"),
        (["cluster.decode_workers=-1xtp2"], "-1xtp2 is below 0: a number of workers is at least 0"),
        (["cluster.shapes=tp2"], 'as in cluster.shapes.prefill=tp2 or {"prefill": "tp2"} (engine.shape'),
        (["cluster.decode_workers=2000xtp2"], "less than or equal to 1024"),
        (["models.m.model.path=a/b", "models.m.cluster.shapes.all=tp2"], "models.m.cluster.shapes: all: no"),
    ],
)
def test_what_is_no_number_of_workers_is_refused_by_name(sets, says):
    with pytest.raises(SetupError) as caught:
        each_model(load_config(sets))
    assert says in str(caught.value)


@pytest.mark.parametrize("setting", ["engine.shape=tpp2", "cluster.shapes.decode=tpp2"])
def test_a_wrong_shape_is_said_once(setting):
    with pytest.raises(SetupError, match="is not understood: write") as caught:
        load_config([setting])
    assert str(caught.value).count("tpp2") == 1
    assert str(caught.value).startswith(setting.partition("=")[0])


def test_fewer_workers_than_none_are_refused_without_a_word_of_shapes():
    said = CliRunner().invoke(app, ["serve", "--model", "a/b", "--prefill", "-1"])
    assert said.exit_code == 2
    assert "a number of workers is at least 0" in re.sub(r"[\s│]+", " ", said.output)
    assert "tp2" not in said.output


def test_the_command_line_names_the_option_that_is_wrong():
    said = CliRunner().invoke(app, ["serve", "--model", "a/b", "--prefill", "2xtpx"])
    assert said.exit_code == 2
    assert "--prefill" in said.output
    assert "is not understood" in said.output


def test_experts_are_beside_workers_or_on_ranks_of_their_own():
    assert load_config([], _experts(False, None)).experts.parallel == "off"
    beside = load_config([], _experts(True, None)).experts
    assert (beside.parallel, beside.ranks) == ("workers", 0)
    apart = load_config(["experts.replicas=2"], _experts(False, 3)).experts
    assert (apart.parallel, apart.ranks, apart.replicas) == ("ranks", 3, 2.0)


def test_experts_are_not_at_both_places_and_not_on_no_rank():
    with pytest.raises(SetupError, match="leave one of the two out"):
        _experts(True, 2)
    for command in ("serve", "control"):
        result = CliRunner().invoke(app, [command, "--model", "m", "--experts", "0"])
        assert result.exit_code == 2
        assert "--experts" in re.sub(r"\x1b\[[0-9;]*m", "", result.output)
