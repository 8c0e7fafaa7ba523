"""The processes in which workers compile grammars: one that hangs costs a request seconds and not its answer,
and none outlives its worker."""

import re

import psutil
import pytest

from tests.integration.cluster import Cluster, eventually
from tests.models import make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("models") / "tiny", "llama", seed=3)
    # In turn, so that every worker is asked.
    settings = {"engine__kv_bytes": 32 * 2**20, "engine__threads": 1, "router__policy": "round_robin"}
    with Cluster(model, prefill=2, decode=1, **settings) as cluster:
        yield cluster


def ask(cluster, number):
    """Ask for a text under a grammar that no worker knows, and return how often the request was placed."""
    pattern = f"[a-f]{{3}} {number}"
    body = {
        "model": cluster.model,
        "prompt": [3 + number] * 40,
        "max_tokens": 30,
        "guided_regex": pattern,
        "baton": {"timings": True},
    }
    answer = cluster.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(pattern, answer.json()["choices"][0]["text"])
    return answer.json()["baton"]["attempts"]


def compiler_of(worker):
    children = psutil.Process(worker.pid).children()
    return next((child for child in children if "engine.compile_process" in child.cmdline()), None)


def warm_up(cluster, first_number):
    """Have every worker compile a grammar, for which it waits until its compiler is ready. On a busy machine
    a compiler may take so long that it is ended, and the next grammar starts another."""
    for number in range(first_number, first_number + 12):
        ask(cluster, number)
        if number >= first_number + 3 and all(map(compiler_of, cluster.workers())):
            return
    raise AssertionError("some worker has no compiler after twelve grammars")


def test_workers_start_their_compilers_before_the_first_grammar(cluster):
    workers = cluster.workers()
    eventually("compilers of all", lambda: all(map(compiler_of, workers)), timeout_s=30)


def test_a_compiler_that_hangs_sends_the_request_to_another_worker(cluster):
    warm_up(cluster, 100)
    compiler = compiler_of(cluster.worker("prefill"))
    compiler.suspend()
    attempts = [ask(cluster, number) for number in range(4)]
    assert max(attempts) == 2, attempts
    assert not compiler.is_running()
    cluster.assert_idle()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_compiler_of_a_killed_worker_is_gone_and_no_zombie(cluster, is_stopped):
    warm_up(cluster, 200 + 100 * is_stopped)
    worker = cluster.worker("prefill")
    compiler = compiler_of(worker)
    if is_stopped:
        compiler.suspend()
    psutil.Process(worker.pid).kill()
    serve = psutil.Process(cluster.process.pid)

    def left():
        found = {}
        for child in serve.children(recursive=True):
            try:
                found[child.pid] = child.status()
            except psutil.NoSuchProcess:
                continue
        return found

    eventually("the compiler is gone", lambda: not compiler.is_running(), timeout_s=20)
    eventually("no zombies", lambda: psutil.STATUS_ZOMBIE not in left().values(), timeout_s=20)
    cluster.await_workers(prefill=2, decode=1)
