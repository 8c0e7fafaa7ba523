"""A defect that one answer meets ends that answer with an error. Nothing is missing from what came before, no
[DONE] follows, and the router goes on."""

import json
from itertools import product

import pytest

from router.openai.responses import AnswerFormat
from router.text.detokenizer import Detokenizer
from router.text.parsers.select import ParserChain
from tests.unit.router.http_fakes import MODEL, FakeWorker, make_folder
from tests.unit.router.http_fakes import cluster as http_cluster
from tests.unit.router.test_answers_of_any_text import Panic, broken_at
from tests.unit.router.test_http_tools import TEMPLATE, TIME, USER

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = make_folder(tmp_path_factory.mktemp("model") / "tiny")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


async def ask(http, **fields):
    body = {"model": MODEL, "messages": USER, "max_tokens": 12, "tools": [TIME]} | fields
    return await http.post(CHAT, json=body)


def parts(answer):
    """Return the answer's text, whether [DONE] ended it, and its error."""
    texts = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    events = [json.loads(text) for text in texts if text != "[DONE]"]
    text = "".join(c["delta"].get("content") or "" for e in events for c in e.get("choices", ()))
    error = events[-1].get("error")
    assert all("error" not in event for event in events[:-1])
    return text, texts[-1] == "[DONE]", error


PLACES = [
    (Detokenizer, "push", 1),
    (Detokenizer, "push", 2),
    (Detokenizer, "finish", 1),
    (ParserChain, "feed", 2),
    (ParserChain, "finish", 1),
    (AnswerFormat, "rich_chunk", 1),
    (AnswerFormat, "last_chunk", 1),
]


ERRORS = [ValueError("broken"), Panic()]


@pytest.mark.parametrize("stops", [[], ["never"]], ids=["plain", "stops"])
async def test_a_stream_that_meets_a_defect_ends_with_an_error(folder, monkeypatch, stops):
    worker = FakeWorker(reply=list(range(20, 40)))
    async with http_cluster(folder, worker, context=1024) as c, c.http() as http:
        whole, is_done, _ = parts(await ask(http, stream=True, stop=stops))
        assert is_done
        for (kind, name, call), error in product(PLACES, ERRORS):
            with monkeypatch.context() as patch:
                patch.setattr(kind, name, broken_at(getattr(kind, name), call, error))
                answer = await ask(http, stream=True, stop=stops)
            text, is_done, found = parts(answer)
            assert answer.status_code == 200 or (answer.status_code == 500 and not text)
            assert whole.startswith(text)
            assert not is_done, (name, call)
            assert found["message"] == "internal error"
        assert parts(await ask(http, stream=True, stop=stops))[:2] == (whole, True)


async def test_a_whole_answer_that_meets_a_defect_is_an_error(folder, monkeypatch):
    worker = FakeWorker(reply=list(range(20, 40)))
    async with http_cluster(folder, worker, context=1024) as c, c.http() as http:
        for (kind, name, call), error in product([*PLACES[:5], (AnswerFormat, "whole", 1)], ERRORS):
            with monkeypatch.context() as patch:
                patch.setattr(kind, name, broken_at(getattr(kind, name), call, error))
                answer = await ask(http)
            assert answer.status_code == 500, (name, call)
            assert answer.json()["error"]["message"] == "internal error"
        assert (await ask(http)).status_code == 200


async def test_one_choice_with_a_defect_ends_the_others(folder, monkeypatch):
    worker = FakeWorker(reply=list(range(20, 40)), endless=True, pauses_at=40)
    async with http_cluster(folder, worker, context=1024) as c, c.http() as http:
        # Tokens that waited for the router are decoded in one call, so four choices make four calls at least.
        monkeypatch.setattr(Detokenizer, "push", broken_at(Detokenizer.push, 4, ValueError("broken")))
        _, is_done, error = parts(await ask(http, stream=True, n=4, max_tokens=900))
        assert not is_done
        assert error["type"] == "server_error"
        await worker.until(lambda: len(worker.cancelled) == 4)
