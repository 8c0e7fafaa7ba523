"""The tokenizer's endpoints, the version, ping, and the page that shows the API's document offline."""

import re

import pytest

from baton.core.version import VERSION
from router.text.tokenizer import Tokenizer
from tests.unit.router.http_fakes import MODEL, FakeWorker, cluster, make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("m") / "tiny")


async def test_tokens_are_those_of_the_model(folder):
    tokenizer = Tokenizer.load(str(folder))
    async with cluster(folder, FakeWorker(reply=[5])) as c, c.http() as http:
        plain = await http.post("/tokenize", json={"prompt": "The baton", "return_token_strs": True})
        bare = await http.post("/tokenize", json={"prompt": "The baton", "add_special_tokens": False})
        messages = [{"role": "user", "content": "hi"}]
        chat = await http.post("/tokenize", json={"model": MODEL, "messages": messages})
        answer = await c.openai().chat.completions.create(model=MODEL, messages=messages)
        text = await http.post("/detokenize", json={"tokens": bare.json()["tokens"]})
    found = plain.json()
    assert found["tokens"] == tokenizer._rust.encode("The baton").ids
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert text.json() == {"prompt": "The baton"}
    assert chat.json()["count"] == answer.usage.prompt_tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_a_wrong_field_is_named(folder, path, body, param):
    async with cluster(folder, FakeWorker()) as c, c.http() as http:
        answer = await http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_pages_about_the_router(folder):
    async with cluster(folder, FakeWorker()) as c, c.http() as http:
        assert (await http.get("/version")).json() == {"version": VERSION}
        assert (await http.get("/ping")).status_code == 200
        info = (await http.get("/tokenizer_info")).json()
        page = (await http.get("/docs")).text
    assert info["eos_token"] == "<|eos|>"
    assert "messages" in info["chat_template"]
    assert not re.search(r"https?://|src=|<link", page)  # Nothing is fetched from elsewhere.


async def test_work_for_a_client_needs_a_key(folder, tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text('{"tenants": {}, "keys": []}')
    async with cluster(folder, FakeWorker(), keys=str(keys)) as c, c.http() as http:
        for path in ("/tokenize", "/detokenize"):
            assert (await http.post(path, json={"prompt": "a"})).status_code == 401
        assert (await http.get("/tokenizer_info")).status_code == 401
        assert (await http.get("/version")).status_code == 200
