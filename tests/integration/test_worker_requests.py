"""The options of a request survive the hand-over between two real workers."""

import re

import msgspec
import pytest
from transformers import AutoTokenizer

from baton.core.messages import PeerRef, Phase, RefusalReason, SequenceRefused, StepOutput, Task
from baton.core.sampling import Grammar, GrammarKind, SamplingParams
from tests.integration.test_worker_process import prompt_of, session, settled, start, workers
from tests.models import EOS_ID, make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

WORDS = "([a-e]{2,4} ){6,9}[x-z]"
ASKED = SamplingParams(
    80,
    temperature=0.9,
    top_p=0.95,
    seed=3,
    stop_token_ids=(EOS_ID,),
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    logprobs=2,
    prompt_logprobs=1,
    grammar=Grammar(GrammarKind.REGEX, WORDS),
)


def asks(seq_id, phase, prompt, hello, *, source=None, sampling=ASKED, **fields):
    message = start(seq_id, phase, prompt, hello, max_tokens=1, source=source)
    return msgspec.structs.replace(message, sampling=sampling, **fields)


def outputs(one, seq_id):
    return [o for message in one.of(StepOutput) for o in message.outputs if o.seq_id == seq_id]


def logprobs(one, seq_id):
    return {
        o.first_index + i: (x.token, x.rank, x.logprob)
        for o in outputs(one, seq_id)
        for i, x in enumerate(o.logprobs)
    }


async def test_constrained_penalised_sampled_and_drafted_across_two_workers(tmp_path):
    model = make_model(tmp_path / "tiny", "llama", seed=5)
    prompt = prompt_of(150, seed=1)
    drafts = {"engine.speculation": "draft", "engine.draft_model": str(model)}
    with workers(model, **drafts) as (prefill, decode):
        async with session(prefill) as p, session(decode) as d:
            # A worker's first grammar holds it up for seconds, on busy cores for longer than the decode
            # worker waits for the prompt. A router would place the request again.
            p.link.send(asks("first/0", Phase.AGGREGATED, prompt_of(20, seed=2), p.hello))
            await p.finished("first/0")
            d.link.send(asks("whole/0", Phase.AGGREGATED, prompt, d.hello))
            await d.finished("whole/0")
            whole = d.tokens("whole/0")
            source = PeerRef(p.hello.worker_id, prefill.address)
            d.link.send(asks("split/0", Phase.DECODE, prompt, d.hello, source=source))
            p.link.send(asks("split/0", Phase.PREFILL, prompt, p.hello))
            await d.finished("split/0")
            resumed = asks("resumed/0", Phase.AGGREGATED, [*prompt, *(whole[i] for i in range(9))], d.hello)
            d.link.send(msgspec.structs.replace(resumed, prompt_token_count=len(prompt)))
            await d.finished("resumed/0")

            text = AutoTokenizer.from_pretrained(model).decode(list(whole.values())[:-1])
            assert re.fullmatch(WORDS, text)
            assert d.tokens("split/0") == whole
            assert d.tokens("resumed/0") == {i: token for i, token in whole.items() if i >= 9}
            assert [x[:2] for x in logprobs(d, "split/0").values()] == [
                x[:2] for x in logprobs(d, "whole/0").values()
            ]
            first = outputs(d, "split/0")[0]
            assert [x.token for x in first.prompt_logprobs] == prompt[1:]
            greedy = SamplingParams(40, ignore_eos=True)
            d.link.send(asks("greedy/0", Phase.AGGREGATED, prompt, d.hello, sampling=greedy))
            await d.finished("greedy/0")
            assert len(outputs(d, "greedy/0")) < 25, "the draft model is the model itself"

            broken = msgspec.structs.replace(ASKED, grammar=Grammar(GrammarKind.REGEX, "(a"))
            d.link.send(asks("broken/0", Phase.AGGREGATED, prompt, d.hello, sampling=broken))
            (refused,) = await d.until(lambda ms: [m for m in ms if isinstance(m, SequenceRefused)])
            assert refused.reason is RefusalReason.UNSUPPORTED
            assert "missing ')'" in refused.message
            plain = SamplingParams(1)
            d.link.send(asks("embed/0", Phase.AGGREGATED, prompt, d.hello, sampling=plain, task=Task.EMBED))
            await d.finished("embed/0")
            assert len(outputs(d, "embed/0")[0].embedding) == 64
        await settled(decode)
        await settled(prefill)
