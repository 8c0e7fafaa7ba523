"""`baton serve` with the autoscaler on: the pool follows the load, and clients do not notice."""

import re
import threading

import pytest

from baton.core.operate import Outcome, Resize
from tests.integration.cluster import Cluster, eventually
from tests.integration.operating import Operator
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(700)]

TOKENS = 160
SETTINGS = {
    "engine__kv_bytes": 32 * 2**20,
    "engine__threads": 1,
    # Two streams fill a worker, so that load does not depend on how fast this machine is.
    "engine__batch_sequences_max": 2,
    "autoscale__interval_s": 1,
    "autoscale__window_s": 8,
    "autoscale__patience_s": 5,
    "autoscale__start_s": 5,
    "autoscale__drain_s": 1,
    "autoscale__prefill_max": 1,
    "autoscale__decode_max": 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "llama", seed=3)


class Load:
    """Streams one after the other in each of some threads; every incomplete answer is kept."""

    def __init__(self, cluster, count):
        self.cluster, self.done, self.wrong, self.answers = cluster, threading.Event(), [], 0
        self.threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(count)]

    def _run(self, number):
        while not self.done.is_set():
            try:
                prompt = f"Once upon a time there was a number {number}, and "
                answer = self.cluster.complete(prompt, max_tokens=TOKENS, ignore_eos=True)
                assert answer["usage"]["completion_tokens"] == TOKENS
                self.answers += 1
            except Exception as error:
                self.wrong.append(error)
                return

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        for thread in self.threads:
            thread.join(120)
        assert self.wrong == []
        assert self.answers >= len(self.threads)


def resizes(state, outcome=None):
    return [
        d
        for d in state.decisions
        if d.who == "autoscaler" and isinstance(d.action, Resize) and outcome in (None, d.outcome)
    ]


def decode_count(state):
    return {role.value: n for role, n in state.pools[0].counts.items()}["decode"]


def test_a_pool_grows_with_the_load_and_shrinks_after_it_and_no_request_is_lost(model):
    with Cluster(model, prefill=1, decode=1, autoscale__mode="on", **SETTINGS) as cluster:
        operator = Operator(cluster)
        with Load(cluster, 6):
            cluster.await_workers(prefill=1, decode=2, timeout_s=120)
        (first, *_) = resizes(operator.state())
        assert re.search(r"decode: .* forecast .* takes \d+, there are 1", first.reason), first
        assert first.action.counts["decode"] == 2
        cluster.await_workers(prefill=1, decode=1, timeout_s=300)
        last = resizes(operator.state())[-1]
        assert "were needed for" in last.reason
        (told,) = eventually("the start was timed", lambda: operator.state().autoscale, timeout_s=10)
        assert (told.mode, told.text) == ("on", "")
        assert told.start_s != SETTINGS["autoscale__start_s"], "it learnt how long a start takes"
        log = "\n".join(cluster.log)
        assert "autoscaler (decode" in log
        cluster.assert_idle()


def test_advice_is_given_and_nothing_is_done(model):
    with Cluster(model, prefill=1, decode=1, autoscale__mode="advise", **SETTINGS) as cluster:
        operator = Operator(cluster)
        before = {w.worker_id for w in cluster.workers()}
        with Load(cluster, 6):
            advice = eventually("advice", lambda: resizes(operator.state(), Outcome.ADVISED), timeout_s=120)
        assert advice[0].action.counts["decode"] == 2
        assert advice[0].text.startswith("would resize")
        assert decode_count(operator.state()) == 1
        assert {w.worker_id for w in cluster.workers()} == before
        cluster.assert_idle()


def test_to_zero_when_idle_and_back_with_the_request_that_waits(model):
    zero = {"autoscale__prefill_min": 0, "autoscale__decode_min": 0, "autoscale__zero_after_s": 5}
    settings = {**SETTINGS, **zero, "router__queue_wait_s": 120}
    with Cluster(model, prefill=1, decode=1, autoscale__mode="on", **settings) as cluster:
        operator = Operator(cluster)
        expected = cluster.complete("The moon is", max_tokens=20)["choices"][0]["text"]
        eventually("no workers", lambda: not operator.state().replicas, timeout_s=120)
        answer = cluster.complete("The moon is", max_tokens=20)
        assert answer["choices"][0]["text"] == expected
        assert "back from zero" in resizes(operator.state())[-1].reason
        cluster.await_workers(prefill=1, decode=1)
