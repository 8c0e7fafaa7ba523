"""No answer holds up the event loop: many logprobs are written in threads."""

import threading

import orjson
import pytest

from router.http.streaming import LOGPROBS_ON_LOOP
from router.openai.logprobs import LogprobFormat
from tests.unit.router.http_fakes import MODEL, FakeWorker, cluster, make_folder

MANY = LOGPROBS_ON_LOOP + 40
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": MANY,
    "ignore_eos": True,
}
TEXT = {"model": MODEL, "prompt": [7] * MANY, "max_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def written(monkeypatch):
    """Numbers of tokens whose logprobs were written on the loop and in threads, each time."""
    counts = {"loop": [], "thread": []}
    real = LogprobFormat.of

    def of(self, entries, **options):
        where = "loop" if threading.current_thread() is threading.main_thread() else "thread"
        counts[where].append(len(entries))
        return real(self, entries, **options)

    monkeypatch.setattr(LogprobFormat, "of", of)
    return counts


WHOLE = {
    "chat": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3}),
    "several choices": (
        "/v1/chat/completions", CHAT | {"logprobs": True, "n": 2, "max_tokens": LOGPROBS_ON_LOOP - 4}),
    "completion": ("/v1/completions", TEXT | {"logprobs": 2, "max_tokens": MANY}),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), WHOLE.values(), ids=WHOLE)
async def test_a_whole_answer_with_many_logprobs_is_written_in_a_thread(folder, written, path, body):
    async with cluster(folder, FakeWorker(reply=[7, 8], endless=True)) as c, c.http() as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200
        for choice in answer.json()["choices"]:
            logprobs = choice["logprobs"]
            assert len(logprobs.get("content") or logprobs.get("tokens")) == body["max_tokens"]
        assert written["loop"] == []
        assert sum(written["thread"]) == body["max_tokens"] * body.get("n", 1)


async def test_a_few_logprobs_are_written_on_the_loop(folder, written):
    async with cluster(folder, FakeWorker(reply=[7], endless=True)) as c, c.http() as http:
        answer = await http.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "max_tokens": 3})
        assert answer.status_code == 200
        assert written == {"loop": [3], "thread": []}


async def events_of(http, path, body):
    async with http.stream("POST", path, json=body | {"stream": True}) as answer:
        lines = [line[6:] async for line in answer.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [orjson.loads(line) for line in lines[:-1]]


class AtOnce(FakeWorker):
    """A worker whose answers come in one message."""

    def __init__(self, **options):
        super().__init__(reply=[7, 8], endless=True, **options)
        self._kept = []

    def tell(self, message):
        outputs = getattr(message, "outputs", None)
        if not outputs:
            super().tell(message)
            return
        self._kept.append(message)
        if any(output.finish is not None for output in outputs):
            kept, self._kept = self._kept, []
            for one in kept:
                super().tell(one)


@pytest.mark.parametrize("count", [MANY, 2 * MANY])
async def test_a_stream_writes_many_logprobs_in_a_thread_and_loses_none(folder, written, count):
    async with cluster(folder, AtOnce()) as c, c.http() as http:
        body = CHAT | {"logprobs": True, "top_logprobs": 2, "max_tokens": count}
        events = await events_of(http, "/v1/chat/completions", body)
        choices = [choice for event in events for choice in event["choices"]]
        entries = [entry for c in choices for entry in (c["logprobs"] or {}).get("content", [])]
        assert len(entries) == count
        assert choices[-1]["finish_reason"] == "length"
        assert max(written["loop"], default=0) <= LOGPROBS_ON_LOOP
        assert sum(written["thread"]) > LOGPROBS_ON_LOOP


async def test_what_comes_while_a_thread_writes_is_sent_after_it(folder, written, monkeypatch):
    worker = FakeWorker(reply=[7, 8], endless=True)
    began, goes_on = threading.Event(), threading.Event()
    slow = LogprobFormat.of_echo

    def of_echo(*args):
        began.set()
        assert goes_on.wait(20)
        return slow(*args)

    monkeypatch.setattr(LogprobFormat, "of_echo", of_echo)
    async with cluster(folder, worker) as c, c.http() as http:
        monkeypatch.setattr(worker, "_notify", _then(worker._notify, worker, began, goes_on))
        body = TEXT | {"echo": True, "logprobs": 1, "max_tokens": 9}
        events = await events_of(http, "/v1/completions", body)
        texts = [choice["text"] for event in events for choice in event["choices"]]
        tokens = [t for e in events for c in e["choices"] for t in (c["logprobs"] or {}).get("tokens", [])]
        assert len(tokens) == MANY + 9
        assert "".join(texts) == "".join(tokens)
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert MANY - 1 in written["thread"]


def _then(notify, worker, began, goes_on):
    """Let the thread go on when the worker has ended its answer."""

    def then():
        notify()
        if not worker.running:
            goes_on.set()

    return then
