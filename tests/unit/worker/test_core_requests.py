"""What a request may ask for beside its tokens, on one worker and across the hand-over."""

import msgspec
import pytest

from baton.core.messages import AdapterRef, Phase, SequenceFailed, SequenceRefused, Task
from baton.core.sampling import FinishReason
from tests.fake_engine import logprobs_of
from tests.unit.worker.worker_pair import (
    Cluster,
    Machine,
    collected,
    expected_tokens,
    failures,
    start,
)

PROMPT = tuple(range(300, 320))
"""More than one chunk."""


@pytest.fixture
def pair():
    return Cluster(Machine("p"), Machine("d"))


def run_split(pair, **sampling):
    for name, phase, source in (("d", Phase.DECODE, "p"), ("p", Phase.PREFILL, None)):
        pair.tell(name, start("s", PROMPT, phase=phase, source=source, **sampling))
    pair.run()
    pair.assert_quiet()


def run_whole(*messages):
    worker = Machine("w")
    cluster = Cluster(worker)
    for message in messages:
        cluster.tell("w", message)
    cluster.run()
    cluster.assert_quiet()
    return worker


def test_logprobs_come_with_every_token_from_both_workers(pair):
    run_split(pair, logprobs=0, max_tokens=4)
    tokens, _ = collected(*pair.machines.values(), seq_id="s")
    for machine in pair.machines.values():
        for output in machine.outputs("s"):
            assert output.logprobs == tuple(map(logprobs_of, output.tokens))
    first = pair.machines["d"].outputs("s")[0]  # the router may hear the decode worker first
    assert first.tokens == tuple(tokens[:1])
    assert first.logprobs == (logprobs_of(tokens[0]),)


def test_prompt_logprobs_cover_the_prompt_and_come_with_the_first_token_from_both_workers(pair):
    run_split(pair, prompt_logprobs=0, max_tokens=3)
    want = tuple(map(logprobs_of, PROMPT[1:]))
    for machine in pair.machines.values():
        first, *later = machine.outputs("s")
        assert first.prompt_logprobs == want
        assert all(output.prompt_logprobs is None for output in later)


def test_a_prompt_whose_logprobs_are_wanted_is_computed_although_it_is_cached():
    again = start("b", PROMPT, phase=Phase.AGGREGATED, max_tokens=1, prompt_logprobs=0)
    worker = Machine("w")
    cluster = Cluster(worker)
    cluster.tell("w", start("a", PROMPT, phase=Phase.AGGREGATED, max_tokens=1))
    cluster.run()
    cluster.tell("w", again)
    cluster.run()
    [output] = worker.outputs("b")
    assert output.prompt_logprobs == tuple(map(logprobs_of, PROMPT[1:]))
    assert output.cached_token_count == 0


def test_a_client_that_has_tokens_has_its_prompt_logprobs_too():
    tokens = expected_tokens(PROMPT, start("", (), phase=Phase.AGGREGATED, max_tokens=2).sampling, 64)
    resumed = start("s", PROMPT, phase=Phase.AGGREGATED, max_tokens=4, prompt_logprobs=0, generated=tokens)
    worker = run_whole(resumed)
    assert [output.prompt_logprobs for output in worker.outputs("s")] == [None, None]


def test_an_embedding_is_one_output_without_a_token():
    message = start("s", PROMPT, phase=Phase.AGGREGATED, logprobs=0)
    worker = run_whole(msgspec.structs.replace(message, task=Task.EMBED))
    [output] = worker.outputs("s")
    assert output.embedding == tuple(map(float, PROMPT))
    assert (output.tokens, output.finish) == ((), FinishReason.STOP)


def test_an_embedding_may_fill_the_context_and_not_more():
    def embed(name, count):
        return msgspec.structs.replace(start(name, range(count), phase=Phase.AGGREGATED), task=Task.EMBED)

    worker = run_whole(embed("fits", 64), embed("over", 65))
    assert worker.outputs("fits")[0].embedding
    [refused] = failures(worker)
    assert isinstance(refused, SequenceRefused)
    assert (refused.seq_id, refused.reason) == ("over", "too_long")


def test_an_embedding_that_the_engine_does_not_return_fails():
    worker = Machine("w")
    worker.computer.run = lambda plan, run=worker.computer.run: msgspec.structs.replace(
        result := run(plan),
        results=tuple(msgspec.structs.replace(item, embedding=()) for item in result.results),
    )
    cluster = Cluster(worker)
    cluster.tell("w", msgspec.structs.replace(start("s", PROMPT, phase=Phase.AGGREGATED), task=Task.EMBED))
    cluster.run()
    [failed] = failures(worker)
    assert isinstance(failed, SequenceFailed)
    assert "embedding" in failed.message
    cluster.assert_quiet()


def test_the_adapter_is_in_every_item():
    adapter = AdapterRef("style", "/a", "digest")
    message = start("s", range(20), phase=Phase.AGGREGATED, max_tokens=2)
    worker = run_whole(msgspec.structs.replace(message, adapter=adapter))
    seen = [item.adapter for plan in worker.plans for item in plan.items]
    assert len(seen) >= 3  # two chunks and a decode
    assert set(seen) == {"style@digest"}


def test_history_is_given_once_per_attempt_and_its_end_is_told():
    """The fake engine fails on a token that it must choose by a history it was not given."""
    worker = run_whole(start("s", range(20), phase=Phase.AGGREGATED, max_tokens=5, presence_penalty=0.5))
    given = [item.history for plan in worker.plans for item in plan.items if item.history is not None]
    assert given == [tuple(range(20))]
    Cluster(worker).tell("w", start("t", PROMPT, phase=Phase.AGGREGATED, max_tokens=1))
    assert [key for plan in worker.plans for key in plan.ended] == [("s", 0)]


def test_history_goes_over_with_the_hand_over(pair):
    run_split(pair, presence_penalty=0.5, max_tokens=5)
    tokens, finish = collected(*pair.machines.values(), seq_id="s")
    assert tokens == expected_tokens(PROMPT, start("", (), phase=Phase.AGGREGATED, max_tokens=5).sampling, 64)
    assert finish is FinishReason.LENGTH
