"""Several models in the configuration: the content of an entry, and each model's own configuration."""

import json

import pytest

from baton.config import Config
from baton.config.served_models import each_model, worker_count
from baton.core.errors import SetupError
from commands.settings import load_config, overlay
from control_plane.child import child_environment

FILE = """
models:
  org/chat.v2:
    model: {path: a/chat, tool_parser: hermes}
    cluster: {prefill_workers: 2, decode_workers: 3}
    slo: {classes: {fast: {ttft_s: 0.5}}, default: fast}
  small:
    model: {path: a/small}
    cluster: {aggregated_workers: 1}
    engine: {block_tokens: 64}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text(FILE)
    return path


def test_each_model_is_a_configuration_of_its_own(path):
    config = load_config(["engine.threads=2"], {"cluster.drain_timeout_s": 7}, models=path)
    chat, small = each_model(config).values()
    assert list(each_model(config)) == ["org/chat.v2", "small"]
    assert (chat.model.name, chat.model.path, chat.model.tool_parser) == ("org/chat.v2", "a/chat", "hermes")
    assert (chat.cluster.prefill_workers, chat.cluster.decode_workers, chat.cluster.aggregated_workers) == (
        2,
        3,
        0,
    )
    assert (
        small.cluster.prefill_workers,
        small.cluster.decode_workers,
        small.cluster.aggregated_workers,
    ) == (
        0,
        0,
        1,
    )
    assert (chat.engine.block_tokens, small.engine.block_tokens) == (32, 64)
    assert {one.engine.threads for one in (chat, small)} == {2}, "what is said once is of all"
    assert {one.cluster.drain_timeout_s for one in (chat, small)} == {7}
    assert (chat.slo.default, small.slo.default) == ("fast", "")
    assert not chat.models
    assert worker_count(config) == 6


def test_one_model_is_as_it_was():
    config = load_config([], {"model.path": "a/chat"})
    assert each_model(config) == {"chat": config}
    assert worker_count(config) == 2


def test_one_setting_of_one_model_is_set_on_top_of_the_file(path):
    sets = [
        "models.org/chat.v2.cluster.decode_workers=5",
        "models.small.slo.classes.fast.ttft_s=2",
        "models.third.model.path=a/third",
        "models.third.model.adapters=x=a,y=b",
    ]
    chat, small, third = each_model(load_config(sets, models=path)).values()
    assert (chat.cluster.prefill_workers, chat.cluster.decode_workers) == (2, 5)
    assert small.slo.classes["fast"].ttft_s == 2
    assert (third.model.path, third.model.adapters) == ("a/third", ("x=a", "y=b"))


def test_children_see_the_same_models(path, monkeypatch):
    config = load_config(models=path)
    for name, value in child_environment(config).items():
        monkeypatch.setenv(name, value)
    assert each_model(load_config()) == each_model(config)
    # A worker's configuration has one model, whatever the environment says.
    assert not overlay(each_model(config)["small"], ["engine.threads=3"]).models


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({}, "models.m.model: Field required"),
        ({"model": {}}, "models.m.model.path: name"),
        ({"model": {"path": "a", "nme": 1}}, "models.m.model.nme: no such setting"),
        ({"model": {"path": "a", "name": "b"}}, "models.m.model.name: the entry's key"),
        ({"model": {"path": "a"}, "engine": {"block_tokens": 0}}, "models.m.engine.block_tokens"),
        (
            {"model": {"path": "a"}, "cluster": {"ray_address": "x"}},
            "models.m.cluster.ray_address: a model has",
        ),
        ({"model": {"path": "a"}, "autoscale": {"mode": "on"}}, "models.m.autoscale.mode: it is one"),
        ({"model": {"path": "a"}, "slo": {"default": "x"}}, "models.m.slo: default: there is no class"),
        ({"model": {"path": "a"}, "router": {"port": 1}}, "models.m.router: no such setting"),
    ],
)
def test_what_is_wrong_with_an_entry_is_one_line_that_names_it(entry, said, monkeypatch):
    monkeypatch.setenv("BATON_MODELS", json.dumps({"m": entry}))
    with pytest.raises(SetupError) as caught:
        load_config()
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("m.yaml", "models: {", "m.yaml"),
        ("m.yaml", "a: 1", "must say `models:`"),
        ("m.yaml", "models: {a: 1}", "must say `models:`"),
        ("m.yaml", "models: {a: {model: {path: x}}}\nrouter: {}", "nothing else"),
        ("m.yaml", "models: {a: {model: {path: x}}, a: {model: {path: y}}}", "a is there twice"),
        ("m.json", '{"models": {"a": {"model": {"path": "x"}}, "a": {}}}', "a is there twice"),
        ("m.txt", "models: {}", "must end in"),
        ("gone.json", None, "cannot read"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SetupError, match=said):
        load_config(models=tmp_path / name)


def test_names_are_one_things(path):
    with pytest.raises(SetupError, match=r"model\.path describes one model"):
        each_model(load_config([], {"model.path": "x"}, models=path))
    with pytest.raises(SetupError, match="the name small is taken by a model or another adapter"):
        each_model(load_config(["models.org/chat.v2.model.adapters=small=x"], models=path))
    with pytest.raises(SetupError, match=r"write models\.NAME\.SECTION\.FIELD"):
        load_config(["models.small=x"])
    with pytest.raises(SetupError, match="not 'a b'"):
        load_config(["models.a b.model.path=x"])


def test_a_model_of_either_form_has_the_same_schema():
    assert set(Config.model_json_schema()["$defs"]["ModelEntry"]["properties"]) == {
        *("model", "engine", "experts", "cluster", "slo", "autoscale"),
    }
