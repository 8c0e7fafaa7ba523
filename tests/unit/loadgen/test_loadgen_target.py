"""The models that a server lists, and the checks before anything is sent to it."""

import httpx
import pytest

from baton.core.errors import SetupError
from loadgen import target
from loadgen.client import parse_url
from loadgen.target import Api, probe


@pytest.fixture
def server(monkeypatch):
    """A server that lists these models."""
    models = []
    monkeypatch.setattr(target.httpx, "get", lambda *_, **__: httpx.Response(200, json={"data": models}))
    return models


def asked(model=""):
    return probe(parse_url("http://server:1"), model=model, api=next(iter(Api)))


def test_a_baton_is_not_asked_for_a_model_that_it_does_not_have(server):
    server += [{"id": "a", "owned_by": "baton"}, {"id": "lora", "owned_by": "baton", "parent": "a"}]
    assert asked().model == "a"
    assert asked("lora").model == "lora"
    with pytest.raises(SetupError, match="no model b; choose one with --model: a, lora"):
        asked("b")


def test_of_several_models_one_must_be_chosen(server):
    server += [{"id": "a", "owned_by": "baton", "parent": None}, {"id": "b", "owned_by": "baton"}]
    with pytest.raises(SetupError, match="several models: choose one with --model: a, b"):
        asked()
    assert asked("b").model == "b"


def test_other_servers_may_answer_to_more_than_they_list(server):
    server.append({"id": "a", "owned_by": "vllm"})
    assert asked("alias").model == "alias"


def test_a_server_that_names_no_model_wants_one_named(server):
    with pytest.raises(SetupError, match="names no model"):
        asked()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(200, html="<p>hello"), "answers text/html, not a list of models: is --url a server"),
        (httpx.Response(200, json={"data": []}), r"names no model \(200\); give --model"),
        (httpx.Response(404, html="<p>no"), r"names no model \(404\); give --model"),
        (httpx.Response(401, json={}), "give a valid --api-key"),
    ],
)
def test_what_is_no_list_of_models_is_told(monkeypatch, answer, said):
    monkeypatch.setattr(target.httpx, "get", lambda *_, **__: answer)
    with pytest.raises(SetupError, match=said):
        asked()
