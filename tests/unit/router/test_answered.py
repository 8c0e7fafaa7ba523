"""Answers that end at the router (stop strings, the last wanted tool call) are successes like all others."""

import pytest

from baton.core.ids import SequenceId, WorkerId
from baton.core.messages import Role
from router.decisions.events import ClientGone
from router.text.tokenizer import Tokenizer
from tests.unit.router.http_fakes import MODEL, FakeWorker, make_folder
from tests.unit.router.http_fakes import cluster as http_cluster
from tests.unit.router.script import Script
from tests.unit.router.test_http_tools import CALL, TEMPLATE, TIME, USER, WEATHER


def answered(script, seq="s"):
    return script.do(ClientGone(SequenceId(seq), is_answered=True))


def retries_left(script):
    return script.core.status().failure_handling.retries_left


def test_an_answer_that_ends_at_the_router_earns_retries():
    script = Script(retry_share=0.5, retry_floor=0)
    script.pair()
    for number in range(10):
        script.submit(f"s{number}")
        script.output("p", 0, 1, seq=f"s{number}")
        if number % 2:
            script.joined(seq=f"s{number}")
        answered(script, f"s{number}")
    assert retries_left(script) == 5
    assert not script.ends
    assert script.core.is_idle
    assert set(script.in_flight().values()) == {0}


def test_a_client_that_leaves_earns_nothing():
    script = Script(retry_share=1.0, retry_floor=0)
    script.pair()
    script.submit()
    script.output("p", 0, 1)
    script.leave()
    assert retries_left(script) == 0


def test_the_worker_is_told_to_stop():
    script = Script()
    script.pair()
    script.submit()
    script.output("p", 0, 1)
    script.joined()
    answered(script)
    assert script.cancelled() == {"d": 0}
    script.output("d", 1, 2, epoch=0)
    assert script.delivered["s"] == [1]


def test_it_counts_though_its_attempt_was_lost_with_its_last_tokens():
    script = Script(retry_share=1.0, retry_floor=5)
    script.pair()
    script.submit()
    script.output("p", 0, 1)
    script.lose("d")
    script.lose("p")
    assert script.core.queued_count == 1
    left = retries_left(script)
    answered(script)
    assert retries_left(script) == left + 1
    assert script.core.is_idle


def test_predictors_learn_from_it():
    script = Script(policy="slo")
    script.join("a", Role.AGGREGATED)
    predictor = script.core._placing.predictor
    before = predictor.lengths.mean
    for number in range(40):
        script.submit(f"s{number}", max_tokens=2000)
        script.output("a", 0, 1, seq=f"s{number}")
        for index in range(1, 12):
            script.now_s += 0.02
            script.output("a", index, index, seq=f"s{number}")
        answered(script, f"s{number}")
    assert predictor.lengths.mean < before
    assert predictor.lengths.mean == pytest.approx(12, rel=0.5)
    assert predictor.corrections_of(WorkerId("a")).tpot.count > 10


def test_breakers_hear_of_it_as_of_any_other_end():
    script = Script(policy="least_loaded", breaker_failures=2, retry_floor=100)
    script.join("a", Role.AGGREGATED)
    script.join("b", Role.AGGREGATED)
    for number in range(6):  # Failures are never in a row, since an answer ends between them.
        seq = f"s{number}"
        script.submit(seq)
        [at] = script.started()
        script.output(at, 0, 1, seq=seq)
        script.submit(f"t{number}")
        if at in script.started():
            script.failed(at, seq=f"t{number}")
        answered(script, seq)
    assert script.core.status().failure_handling.breakers_opened == 0


# --- through HTTP -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = make_folder(tmp_path_factory.mktemp("model") / "tiny")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def ids(folder):
    rust = Tokenizer.load(str(folder))._rust
    return lambda text: rust.encode(text, add_special_tokens=False).ids


ENDS = {
    "stop string": {"stop": ["look"]},
    "one call": {"tools": [WEATHER, TIME], "parallel_tool_calls": False},
    "no call": {"max_tokens": 3},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("n", [1, 3])
async def test_every_end_of_an_answer_earns_a_retry(folder, ids, stream, end, n):
    worker = FakeWorker(reply=ids(f"I look. {CALL}\n{CALL}" * 2))
    settings = {"retry_share": 1.0, "retry_floor": 0, "context": 2048}
    async with http_cluster(folder, worker, **settings) as c, c.http() as http:
        body = {"model": MODEL, "messages": USER, "max_tokens": 1500, "n": n, "stream": stream} | ENDS[end]
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        await c.nothing_in_flight()
        assert c.driver.status().failure_handling.retries_left == n
