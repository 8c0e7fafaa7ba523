"""The OpenAPI document has every endpoint, with the fields that its body is decoded into."""

import re

import msgspec
import pytest

from router.http.openapi import document
from router.messages.body import MessagesBody
from router.openai.bodies import ChatBody, CompletionBody, EmbeddingBody
from router.responses.body import ResponsesBody
from tests.unit.router.http_fakes import FakeWorker, cluster, make_folder


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
