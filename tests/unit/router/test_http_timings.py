"""`baton: {"timings": true}` through a real server."""

import orjson
import pytest

from baton.core.costs import PhaseTimings
from baton.core.messages import Role
from router.openai.timings import PARTS
from router.text.tokenizer import Tokenizer
from tests.unit.router.http_fakes import MODEL, FakeWorker, cluster, make_folder

ASK = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 5, "baton": {"timings": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def reply(folder):
    return Tokenizer.load(str(folder))._rust.encode("in a land", add_special_tokens=False).ids


def workers(reply):
    told = PhaseTimings(0.0, 0.0, 0.0)
    return (
        FakeWorker("p", Role.PREFILL, reply, endless=True, timings=told),
        FakeWorker("d", Role.DECODE, reply, endless=True),
    )


def check(baton):
    assert set(baton["timings"]) == {f"{part}_s" for part in PARTS}
    assert all(seconds >= 0 for seconds in baton["timings"].values())
    assert baton["timings"]["route_s"] > 0
    assert baton["timings"]["first_hop_s"] > 0
    assert (baton["prefill_worker"], baton["decode_worker"], baton["attempts"]) == ("p.1", "d.1", 1)


def events(text):
    lines = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [orjson.loads(line) for line in lines[:-1]]


async def test_an_answer_in_one_piece_has_them(folder, reply):
    async with cluster(folder, *workers(reply)) as c, c.http() as http:
        check((await http.post("/v1/completions", json=ASK)).json()["baton"])
        without = (await http.post("/v1/completions", json=ASK | {"baton": {}})).json()
        assert "baton" not in without
        text = (await http.get("/metrics")).text
        for part in PARTS:
            assert f'baton_ttft_part_seconds_count{{model="tiny",part="{part}"' in text


@pytest.mark.parametrize("with_usage", [True, False])
async def test_a_streams_last_chunk_has_them(folder, reply, with_usage):
    body = ASK | {"stream": True, "stream_options": {"include_usage": with_usage}}
    async with cluster(folder, *workers(reply)) as c, c.http() as http:
        chunks = events((await http.post("/v1/completions", json=body)).text)
    check(chunks[-1]["baton"])
    assert chunks[-1]["choices"] == []
    assert ("usage" in chunks[-1]) == with_usage
    assert not any("baton" in chunk for chunk in chunks[:-1])


async def test_a_text_that_a_stop_string_ends_has_them(folder, reply):
    body = ASK | {"stop": ["a"], "max_tokens": 50}
    async with cluster(folder, *workers(reply)) as c, c.http() as http:
        answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    check(answer["baton"])
