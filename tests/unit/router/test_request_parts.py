"""A request of many sequences is one arrival with one verdict, and is judged at its first token."""

import asyncio

import pytest

from baton.core.demand import Bin, ClassLoad, bin_of
from baton.core.ids import RequestId, RouterId, SequenceId
from baton.core.messages import FailureReason, Phase, Role, Task
from baton.core.sampling import FinishReason, SamplingParams
from baton.telemetry.catalogue import SLO_REQUESTS
from router.decisions.events import Finished, SequencePart, Submit
from router.http.embeddings import IN_FLIGHT_MAX
from tests.unit.router.http_fakes import MODEL, FakeWorker, cluster, make_folder
from tests.unit.router.script import Script

REQUEST, PROMPT, ANSWER, STEP = SequencePart


@pytest.fixture
def script():
    found = Script(attempts_max=2)
    found.pair()
    return found


def submit(script, seq, part=REQUEST, *, tokens=5, max_tokens=4, task=Task.GENERATE):
    is_first = part is REQUEST
    script.do(
        Submit(
            SequenceId(seq),
            RequestId("r"),
            tuple(range(tokens)),
            SamplingParams(max_tokens=max_tokens),
            salt=b"",
            deadline_s=1000.0,
            ttft_slo_s=1.0 if is_first else 0.0,
            tpot_slo_s=0.1,
            refuse_late=is_first,
            part=part,
            task=task,
        )
    )


def load(script):
    return script.core.demand(RouterId("r"), now_s=script.now_s).classes[""]


def test_answers_to_one_prompt_are_one_arrival_and_many_outputs(script):
    submit(script, "a")
    submit(script, "b", ANSWER)
    script.now_s = 0.5
    script.output("p", 0, 10, cached=4, seq="b")
    script.now_s = 2.0
    script.output("p", 0, 10, cached=0, seq="a")
    for seq in "ab":
        script.output("d", 1, 11, 12, seq=seq, finish=FinishReason.LENGTH)
    assert load(script) == ClassLoad(
        {bin_of(5): Bin(1, 5)},
        started=1,
        started_prompt_tokens=5,
        cached_tokens=0,
        ended=1,
        output_tokens=6,
        context_tokens=2 * (3 * 5 + 3),
        tpot_missed=1,
    )


def test_every_prompt_of_a_request_is_counted_and_the_request_once(script):
    submit(script, "a", tokens=5)
    submit(script, "b", PROMPT, tokens=5)
    submit(script, "c", PROMPT, tokens=64)
    found = load(script)
    assert found.arrived == {bin_of(5): Bin(1, 10, 1), bin_of(64): Bin(0, 64, 1)}
    assert sum(one.prompts for one in found.arrived.values()) == 3
    for seq in "abc":
        script.leave(seq)
    assert (load(script).started, load(script).ttft_missed) == (0, 0)


def test_a_request_that_fails_with_all_its_sequences_missed_once():
    script = Script(queue_wait_s=5.0)
    for seq, part in zip("abc", (REQUEST, ANSWER, PROMPT), strict=True):
        submit(script, seq, part)
    report = script.core.demand(RouterId("r"), now_s=0.0)
    assert (report.queued, report.queued_prompt_tokens) == (3, 11)
    script.at(6.0)
    assert (load(script).started, load(script).ttft_missed) == (1, 1)


def test_steps_that_come_late_are_neither_arrivals_nor_late(script):
    submit(script, "0", max_tokens=1)
    script.now_s = 0.5
    script.output("p", 0, 10, seq="0", finish=FinishReason.LENGTH)
    for step in range(1, 5):
        script.now_s = 10.0 * step
        for beam in "ab":
            submit(script, f"{step}{beam}", STEP, tokens=5 + step, max_tokens=1)
            script.output("p", 0, 10, seq=f"{step}{beam}", finish=FinishReason.LENGTH)
            assert isinstance(script.ends[f"{step}{beam}"], Finished)
    found = load(script)
    assert found.arrived == {bin_of(5): Bin(1, 5)}
    assert (found.started, found.ttft_missed, found.tpot_missed) == (1, 0, 0)
    assert (found.ended, found.output_tokens, found.context_tokens) == (1, 8, 2 * (6 + 7 + 8 + 9))


def test_a_late_first_sequence_is_not_refused_once_the_request_has_a_token():
    script = Script(queue_wait_s=30.0)
    script.join("p", Role.PREFILL, blocks=20)
    script.join("d", Role.DECODE, blocks=20)
    submit(script, "x", tokens=60, max_tokens=100)
    submit(script, "a", tokens=60)  # There is no room for it.
    submit(script, "b", PROMPT)
    assert "a" not in script.starts
    script.now_s = 0.5
    script.output("p", 0, 10, seq="b")
    script.at(2.0)
    assert "a" not in script.ends
    assert (load(script).started, load(script).ttft_missed) == (1, 0)


@pytest.fixture
def hedged():
    """Return a script with four workers, and the workers of a sequence and of its backup attempt."""
    script = Script(
        policy="least_loaded", hedge_share=0.5, hedge_after_s=0.2, hedge_quantile=0.9, attempts_max=1
    )
    for name in ("p1", "p2"):
        script.join(name, Role.PREFILL)
    for name in ("d1", "d2"):
        script.join(name, Role.DECODE)
    for i in range(20):  # The router learns how long first tokens usually take.
        script.submit(f"warm{i}", max_tokens=1)
        (worker,) = script.phases()
        script.output(worker, 0, 10, seq=f"warm{i}", finish=FinishReason.LENGTH)
    submit(script, "a")
    first = next(w for w, phase in script.phases().items() if phase is not Phase.DECODE)
    script.at(0.3)
    assert "hedged" in script.notes()
    backup = next(w for w, phase in script.phases().items() if phase is not Phase.DECODE)
    (name,) = {start.seq_id for start in script.started().values()}
    return script, first, backup, name


def test_a_first_attempt_that_fails_is_no_miss_while_its_backup_runs(hedged):
    script, first, backup, name = hedged
    before = load(script)
    script.failed(first, FailureReason.INTERNAL, seq="a")
    assert load(script) == before
    script.output(backup, 0, 10, seq=name, finish=FinishReason.STOP)
    assert (load(script).started - before.started, load(script).ttft_missed) == (1, 0)


def test_an_attempt_that_lost_is_not_counted(hedged):
    script, _, backup, name = hedged
    before = load(script)
    script.now_s = 3.0
    script.output(backup, 0, 10, seq=name, finish=FinishReason.STOP)
    assert (load(script).started - before.started, load(script).ttft_missed) == (1, 1)


# --- as a client meets it -------------------------------------------------------------------------

ASK = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
SLO = {"classes": {"fast": {"ttft_s": 0.5, "tpot_s": 0.2, "late": "refuse"}}, "default": "fast"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


class SlowWorker(FakeWorker):
    """A worker at which the loop's clock moves on by a quarter of a second for every sequence beyond the
    first ones."""

    slow_after = 1000

    def on_message(self, message):
        if len(self.started) >= self.slow_after:
            loop = asyncio.get_running_loop()
            now_s = loop.time
            loop.time = lambda: now_s() + 0.25
        super().on_message(message)


BEAMS = {"use_beam_search": True, "best_of": 3, "n": 3}


@pytest.mark.parametrize(
    ("path", "body", "prompts", "outputs"),
    [
        ("completions", {}, 1, 4),
        ("completions", {"n": 3}, 1, 12),
        ("completions", {"n": 2, "best_of": 4}, 1, 16),
        ("completions", {"prompt": ["hi", "hi", "hi"], "n": 2}, 3, 24),
        ("completions", BEAMS, 1, 9),
        ("completions", BEAMS | {"prompt": ["hi", "hi"]}, 2, 18),
        ("embeddings", {"input": ["hi"] * 70}, 70, 0),
    ],
)
async def test_a_request_is_one_arrival_with_one_verdict(folder, path, body, prompts, outputs):
    worker = SlowWorker(reply=[9], endless=True)
    async with cluster(folder, worker, slo=SLO) as c, c.http() as http:
        if path == "embeddings":
            worker.slow_after = IN_FLIGHT_MAX
        elif "use_beam_search" in body:
            worker.slow_after = 1
        ask = {"model": MODEL} | (ASK if path == "completions" else {}) | body
        answer = await http.post(f"/v1/{path}", json=ask)
        assert answer.status_code == 200, answer.text
        await c.nothing_in_flight()
        found = c.driver.demand(RouterId("r")).classes["fast"]
        usage = answer.json()["usage"]
        arrived = found.arrived.values()
        assert sum(one.requests for one in arrived) == 1
        assert sum(one.prompts for one in arrived) == prompts
        assert sum(one.prompt_tokens for one in arrived) == usage["prompt_tokens"]
        assert (found.started, found.ttft_missed, found.tpot_missed) == (1, 0, 0)
        assert (found.output_tokens, found.ended) == (outputs, int(outputs > 0))
        meter = c.router.models.first.observer.meter
        labels = {"model": MODEL, "slo_class": "fast", "tenant": "default"}
        assert meter.value(SLO_REQUESTS, outcome="met", **labels) == 1
