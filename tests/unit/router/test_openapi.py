"""The OpenAPI document has every endpoint, with the fields that its body is decoded into."""

import re

import msgspec
import pytest

from router.http.openapi import document
from router.messages.body import MessagesBody
from router.openai.bodies import ChatBody, CompletionBody, EmbeddingBody
from router.responses.body import ResponsesBody
from tests.unit.router.http_fakes import MODEL, FakeWorker, cluster, make_folder


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", ChatBody),
        ("/v1/completions", CompletionBody),
        ("/v1/embeddings", EmbeddingBody),
        ("/v1/responses", ResponsesBody),
        ("/v1/messages", MessagesBody),
    ],
)
def test_every_field_of_a_body_is_in_the_document(path, body):
    found = document(body_bytes_max=1)
    post = found["paths"][path]["post"]
    ref = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = found["components"]["schemas"][ref.rpartition("/")[2]]
    assert set(schema["properties"]) == {field.name for field in msgspec.structs.fields(body)}
    assert {"200", "400", "413", "429", "503"} < post["responses"].keys()


async def test_every_get_is_answered_and_documented(tmp_path):
    async with cluster(make_folder(tmp_path / "tiny"), FakeWorker()) as c, c.http() as http:
        found = (await http.get("/openapi.json")).json()
        for path, item in found["paths"].items():
            if "get" in item:
                answer = await http.get(re.sub(r"{\w+}", "tiny", path))
                media = answer.headers["content-type"].split(";")[0]
                assert media in item["get"]["responses"][str(answer.status_code)]["content"], path


async def test_a_number_beyond_the_documents_range_is_refused_by_name(tmp_path):
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True},
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    }
    tried = 0
    async with cluster(make_folder(tmp_path / "tiny"), FakeWorker()) as c, c.http() as http:
        found = (await http.get("/openapi.json")).json()
        for path, body in bodies.items():
            post = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            fields = found["components"]["schemas"][post["$ref"].rpartition("/")[2]]["properties"]
            for name, field in fields.items():
                for branch in field.get("anyOf", [field]):
                    steps = (("minimum", -1), ("maximum", 1))
                    for value in [branch[key] + by for key, by in steps if key in branch]:
                        answer = await http.post(path, json=body | {"model": MODEL, name: value})
                        assert answer.status_code == 400, (path, name, value, answer.text)
                        assert name in answer.json()["error"]["message"], answer.text
                        tried += 1
    assert tried > 50


async def test_a_list_of_files_is_as_long_as_the_document_says(tmp_path):
    async with cluster(make_folder(tmp_path / "tiny"), FakeWorker()) as c, c.http() as http:
        found = (await http.get("/openapi.json")).json()
        for path in ("/v1/files", "/v1/batches"):
            parameters = found["paths"][path]["get"]["parameters"]
            limit = next(one for one in parameters if one["name"] == "limit")["schema"]["maximum"]
            assert (await http.get(path, params={"limit": limit})).status_code == 200
            assert (await http.get(path, params={"limit": limit + 1})).status_code == 400
