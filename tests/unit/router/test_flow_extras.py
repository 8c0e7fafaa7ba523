"""Logprobs and further values that go with a sequence's tokens, and placement by its siblings and its
adapter."""

import msgspec

from baton.core.ids import RequestId, SequenceId
from baton.core.messages import AdapterRef, Phase, RefusalReason, Role, SequenceOutput, StepOutput, Task
from baton.core.sampling import FinishReason, SamplingParams
from baton.core.steps import TokenLogprobs
from router.decisions.events import Deliver, FailureKind, Submit, ToWorker
from tests.unit.router.script import Script


def logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -float(token), 1)


def delivered(script: Script) -> list[Deliver]:
    return [a for a in script.actions if isinstance(a, Deliver)]


def test_logprobs_come_with_their_tokens_once_and_in_order():
    script = Script()
    script.pair()
    script.submit()

    def say(worker: str, first: int, *tokens: int, prompt: tuple[TokenLogprobs, ...] | None = None) -> None:
        logprobs = tuple(map(logprob, tokens))
        out = SequenceOutput(SequenceId("s"), script.epoch(), first, tokens, None, None, logprobs, prompt)
        script.says(worker, StepOutput((out,)))

    say("d", 1, 12)
    assert delivered(script) == []
    say("p", 0, 11, prompt=(logprob(2),))
    (both,) = delivered(script)
    assert (both.tokens, both.logprobs) == ((11, 12), (logprob(11), logprob(12)))
    assert both.prompt_logprobs == (logprob(2),)
    say("d", 0, 11, 12, 13, prompt=(logprob(2),))
    (last,) = delivered(script)
    assert (last.tokens, last.logprobs, last.prompt_logprobs) == ((13,), (logprob(13),), None)


def test_a_resumed_sequence_keeps_what_it_asked_for_but_the_prompts_logprobs():
    script = Script()
    script.join("a", Role.AGGREGATED)
    adapter = AdapterRef("sql", "/x", "d" * 8)
    sampling = SamplingParams(max_tokens=9, logprobs=1, prompt_logprobs=1, seed=4)
    submit = Submit(
        SequenceId("s"), RequestId("s"), (1, 2, 3), sampling, b"", 1000.0,
        adapter=adapter, priority=-2, tpot_slo_s=0.03, fairness_key="k",
    )  # fmt: skip
    script.do(submit)
    first = script.starts["s"]["a"]
    prompt = (logprob(2), logprob(3))
    out = SequenceOutput(SequenceId("s"), 0, 0, (7,), None, 0, (logprob(7),), prompt)
    script.says("a", StepOutput((out,)))
    script.lose("a")
    script.join("b", Role.AGGREGATED)
    again = script.starts["s"]["b"]
    assert first.sampling == sampling
    assert again.sampling == msgspec.structs.replace(sampling, prompt_logprobs=None)
    for start in (first, again):
        assert (start.adapter, start.priority, start.tpot_slo_s, start.fairness_key) == (
            adapter,
            -2,
            0.03,
            "k",
        )


def test_an_embedding_runs_whole_where_prompts_are_computed_and_elsewhere_after_a_loss():
    script = Script()
    script.pair()
    script.join("q", Role.PREFILL)
    task = Submit(
        SequenceId("s"), RequestId("s"), (1, 2, 3), SamplingParams(max_tokens=1), b"", 1000.0, task=Task.EMBED
    )
    script.do(task)
    assert set(script.phases().values()) == {Phase.AGGREGATED}
    (worker,) = script.phases()
    script.lose(worker)
    (other,) = script.phases()
    assert {worker, other} == {"p", "q"}
    out = SequenceOutput(SequenceId("s"), 1, 0, (), FinishReason.STOP, 0, embedding=(0.5, 1.0))
    script.says(other, StepOutput((out,)))
    assert script.ends["s"].embedding == (0.5, 1.0)


def test_what_a_worker_cannot_do_ends_the_sequence_with_its_words():
    script = Script()
    script.pair()
    script.submit()
    script.refused("p", RefusalReason.UNSUPPORTED)
    assert (script.ends["s"].kind, script.ends["s"].message) == (FailureKind.UNSUPPORTED, "no")
    assert script.cancelled() == {"d": 0}


def test_siblings_go_together_while_there_is_room():
    script = Script()
    for name in "abc":
        script.join(name, Role.AGGREGATED, blocks=10)

    def place(seq: str, group: str) -> str:
        sampling = SamplingParams(max_tokens=4)
        submit = Submit(SequenceId(seq), RequestId(seq), (1, 2, 3), sampling, b"", 1000.0, group=group)
        (worker,) = {str(a.worker_id) for a in script.do(submit) if isinstance(a, ToWorker)}
        return worker

    assert place("alone", "") == "a"
    first = place("g0", "g")
    assert {place(f"g{i}", "g") for i in range(1, 6)} == {first}
    assert len({place(f"h{i}", "h") for i in range(12)}) > 1  # One worker has less room than that.


def test_an_adapter_is_used_again_where_it_is_loaded():
    script = Script()
    for name in "abc":
        script.join(name, Role.AGGREGATED)

    def place(seq: str, adapter: AdapterRef | None) -> str:
        sampling = SamplingParams(max_tokens=4)
        submit = Submit(SequenceId(seq), RequestId(seq), (1, 2, 3), sampling, b"", 1000.0, adapter=adapter)
        (worker,) = {str(a.worker_id) for a in script.do(submit) if isinstance(a, ToWorker)}
        return worker

    one = AdapterRef("one", "/1", "1")
    home = place("s0", one)
    others = {place(f"o{i}", None) for i in range(2)}
    assert home not in others
    assert place("s1", one) == home
