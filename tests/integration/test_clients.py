"""Misbehaving clients of a real cluster: they leave at any moment, read slowly, send nonsense."""

import contextlib
import json
import random
import socket
import threading

import httpx
import openai
import pytest

from tests.integration.cluster import Cluster
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LONG = 7000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    path = make_model(tmp_path_factory.mktemp("m") / "tiny-llama", "llama", seed=5)
    settings = {
        "model__dtype": "float32",
        "engine__block_tokens": 16,
        "engine__step_tokens_max": 16,
        "router__output_buffer_tokens_max": 512,
    }
    with Cluster(path, **settings) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def a_prompt(seed, length=LONG):
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


def test_chat_streamed_equals_chat_at_once(client, cluster):
    ask = {
        "model": cluster.model,
        "messages": [{"role": "user", "content": "hello there"}],
        "max_tokens": 20,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.choices[0].finish_reason in ("length", "stop")


def test_choices_differ_by_seed_and_repeat_with_it(client, cluster):
    ask = {"model": cluster.model, "prompt": "once", "n": 2, "temperature": 1.0, "max_tokens": 24}
    first = client.completions.create(**ask, seed=11)
    again = client.completions.create(**ask, seed=11)
    texts = [c.text for c in first.choices]
    assert texts == [c.text for c in again.choices]
    assert texts[0] != texts[1]


def test_stop_strings_end_the_text_before_them(client, cluster):
    ask = {"model": cluster.model, "prompt": "once upon", "max_tokens": 60, "temperature": 0}
    text = client.completions.create(**ask).choices[0].text
    stop = text[10:13]
    cut = client.completions.create(**ask, stop=[stop]).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    cluster.assert_idle()


def test_a_prompt_longer_than_the_context_is_a_clear_400(client, cluster):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=cluster.model, prompt=[5] * 9000, max_tokens=5)
    assert refused.value.code == "context_length_exceeded"
    assert "9000" in str(refused.value)


def streamed_request(cluster, fields):
    """The bytes of a streamed completion request, for clients on a bare socket."""
    body = json.dumps({"model": cluster.model, "stream": True, "ignore_eos": True, **fields}).encode()
    head = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


ATTEMPTS = 20


def hang_up(cluster, *, when):
    """Open a streamed request on a bare socket and close it once `when` holds. A state that lasts for
    milliseconds may be over before it is seen; then another request is tried."""
    for attempt in range(ATTEMPTS):
        if hang_up_once(cluster, when, attempt):
            return
    raise AssertionError(f"{when}: never seen in {ATTEMPTS} requests")


def hang_up_once(cluster, when, attempt):
    body = {"prompt": a_prompt(f"{when} {attempt}"), "max_tokens": 400}
    with socket.create_connection(("127.0.0.1", cluster.port)) as s:
        s.sendall(streamed_request(cluster, body))
        seen = True
        if when == "decoding":
            received = b""
            while received.count(b"data:") < 5:
                received += s.recv(4096)
        elif when != "at once":
            role, account = {
                "prefilling": ("prefill", "running_count"),
                "mid-transfer": ("decode", "receiver_count"),
            }[when]
            worker = cluster.worker(role)
            seen = was_seen(cluster, worker, account, s)
        # Send a reset, as a killed client's kernel would.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    return seen


def was_seen(cluster, worker, account, stream):
    """True if the account was not zero before the stream had its first tokens."""
    stream.setblocking(False)
    received = b""
    while received.count(b"data:") < 2:
        if cluster.accounts(worker)[account]:
            return True
        with contextlib.suppress(BlockingIOError):
            received += stream.recv(4096)
    return False


@pytest.mark.parametrize("when", ["at once", "prefilling", "mid-transfer", "decoding"])
def test_a_client_that_leaves_holds_nothing(cluster, when):
    hang_up(cluster, when=when)
    cluster.assert_idle()


def test_a_slow_reader_does_not_slow_another_stream(cluster):
    body = {"prompt": [7, 8, 9], "max_tokens": 6000}
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", cluster.port))
        slow.sendall(streamed_request(cluster, body))
        slow.recv(512)  # it has begun; from here on nothing more is read
        answers = [cluster.complete(a_prompt(i, 40), max_tokens=64, ignore_eos=True) for i in range(4)]
        assert [a["usage"]["completion_tokens"] for a in answers] == [64] * 4
    cluster.assert_idle()


BAD = {
    "malformed JSON": (b"{", 400, None),
    "not UTF-8": (b'{"model": "\xff"}', 400, None),
    "not an object": (b"[1]", 400, None),
    "unknown model": ({"model": "nope", "messages": [{"role": "user", "content": "x"}]}, 404, "model"),
    "no messages": ({"messages": []}, 400, "messages"),
    "messages of the wrong type": ({"messages": "hi"}, 400, "messages"),
    "negative max_tokens": ({"max_tokens": -1}, 400, "max_tokens"),
    "huge max_tokens": ({"max_tokens": 10**12}, 400, "max_tokens"),
    "temperature of the wrong type": ({"temperature": "hot"}, 400, "temperature"),
    "temperature out of range": ({"temperature": -1}, 400, "temperature"),
    "top_p out of range": ({"top_p": 7}, 400, "top_p"),
    "n out of range": ({"n": 0}, 400, "n"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_a_clear_error_and_the_cluster_serves_on(cluster, case):
    body, status, param = BAD[case]
    if isinstance(body, dict):
        good = {"model": cluster.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        body = json.dumps({**good, **body}).encode()
    answer = cluster.http.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert param is None or error["param"].startswith(param)
    assert cluster.complete([5, 6], max_tokens=2)["usage"]["completion_tokens"] <= 2


def test_a_suffix_is_refused_and_so_is_a_body_of_10_megabytes(cluster):
    body = {"model": cluster.model, "prompt": "x", "suffix": "y"}
    refused = cluster.http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
    too_large = cluster.http.post("/v1/completions", content=b" " * 10_000_000)
    assert too_large.status_code == 413
    assert cluster.http.get("/nowhere").json()["error"]["message"]


def test_many_clients_at_once_are_all_answered(cluster):
    answers = []

    def ask(i):
        with httpx.Client(base_url=cluster.url, timeout=120) as http:
            body = {"model": cluster.model, "prompt": a_prompt(i, 60 + i), "max_tokens": 16}
            answers.append(http.post("/v1/completions", json=body).status_code)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(40)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert answers == [200] * 40
    cluster.assert_idle()
