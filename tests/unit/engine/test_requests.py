"""Everything a request asks for comes out of the engine the same however its steps are cut."""

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.config import EngineConfig, ModelConfig
from baton.core.sampling import Grammar, GrammarKind, SamplingParams
from baton.core.steps import StepItem, StepPlan
from engine.execution.executor import Executor
from tests.models import EOS_ID, make_model
from tests.unit.engine.request_loop import Asked, Loop

PROMPT = [7, 300, 41, 7, 99, 250, 12, 7, 300, 41, 88, 5, 63, 171, 402, 33, 9, 9, 120, 77, 301, 45, 18]
GREEDY = SamplingParams(24, ignore_eos=True)
SAMPLED = SamplingParams(24, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
PENALISED = SamplingParams(
    24,
    temperature=0.8,
    seed=5,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias=((17, 2.0), (400, -3.0)),
    ignore_eos=True,
)
WORDS = Grammar(GrammarKind.REGEX, "([a-e]{2,4} ){3,9}[x-z]")
CONSTRAINED = SamplingParams(40, temperature=1.0, seed=3, grammar=WORDS, stop_token_ids=(EOS_ID,))


def load(path, **engine):
    config = EngineConfig(kv_bytes=8 * 2**20, block_tokens=16, threads=1, **engine)
    return Executor.load(ModelConfig(path=str(path)), config)


KINDS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalised": PENALISED,
    "constrained": CONSTRAINED,
    "constrained greedy": SamplingParams(40, grammar=WORDS, stop_token_ids=(EOS_ID,)),
    "all of it": msgspec.structs.replace(
        PENALISED, grammar=WORDS, stop_token_ids=(EOS_ID,), ignore_eos=False, min_tokens=9, logprobs=2
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("requests"), "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def executor(model):
    return load(model)


@pytest.fixture
def loop(executor):
    return Loop(executor)


@pytest.fixture(scope="module")
def plain(executor):
    """One token at a time, alone."""
    return {name: Loop(executor).finish(Asked(PROMPT, params))[0] for name, params in KINDS.items()}


def wrong(tokens):
    return [(tokens[-1] + 1) % 512, 3, 4]


def guessers(known):
    """Drafters of a sequence whose tokens are `known`."""
    random = torch.Generator().manual_seed(1)

    def right(tokens):
        return known[len(tokens) : len(tokens) + 4]

    def half_right(tokens):
        following = right(tokens)
        return [t if i != 2 else (t + 1) % 512 for i, t in enumerate(following)]

    def dice(tokens):
        following = right(tokens)
        hit = torch.rand(4, generator=random).tolist()
        return [t if h < 0.7 else 5 for t, h in zip(following, hit, strict=False)]

    return {"right": right, "wrong": wrong, "half right": half_right, "random": dice}


@pytest.mark.parametrize("name", KINDS)
def test_drafts_change_the_number_of_steps_and_nothing_else(loop, plain, name):
    known = [*PROMPT, *plain[name]]
    asked = {kind: Asked(PROMPT, KINDS[name], draft, chunk=10) for kind, draft in guessers(known).items()}
    for tokens in loop.finish(*asked.values()):
        assert tokens == plain[name]
    assert asked["right"].steps < asked["half right"].steps < asked["wrong"].steps
    assert asked["wrong"].steps == len(plain[name]) + 2  # the prompt took three chunks


@pytest.mark.parametrize("name", KINDS)
def test_logprobs_do_not_see_drafts_either(loop, plain, name):
    params = msgspec.structs.replace(KINDS[name], logprobs=3)
    one = Asked(PROMPT, params)
    drafted = Asked(PROMPT, params, guessers([*PROMPT, *plain[name]])["random"])
    loop.finish(one, drafted)
    assert len(one.logprobs) == len(one.generated)
    for a, b in zip(one.logprobs, drafted.logprobs, strict=True):
        assert (a.token, a.rank, [t for t, _ in a.top]) == (b.token, b.rank, [t for t, _ in b.top])
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("cut", [1, 7])
def test_a_sequence_goes_on_elsewhere_as_if_nothing_happened(model, plain, name, cut):
    """After a hand-over, a preemption or a crash: another executor, knowing the tokens alone."""
    elsewhere = Loop(load(model))
    resumed = Asked(PROMPT, KINDS[name], generated=plain[name][:cut], chunk=9)
    assert elsewhere.finish(resumed) == [plain[name]]


def test_everybody_in_one_batch_gets_what_they_get_alone(loop, plain):
    assert loop.finish(*(Asked(PROMPT, params) for params in KINDS.values())) == list(plain.values())


def test_nothing_is_remembered_of_what_ended(loop, executor):
    loop.finish(*(Asked(PROMPT, params) for params in KINDS.values()))
    assert len(executor._sampler._states) == 0


def test_a_token_can_be_asked_for_before_it_is_known(loop, executor, plain):
    one = Asked(PROMPT, PENALISED)
    loop.step(one)
    blocks = (*one.blocks, loop.free.pop(), loop.free.pop())
    tokens = list(one.generated)
    for index in range(1, 12):
        item = StepItem(one.key, (-1,), len(PROMPT) + index - 1, blocks, index, PENALISED)
        tokens += executor.execute(StepPlan((item,), 100 + index)).results[0].tokens
    assert tokens == plain["penalised"][:12]
    loop.end(one)


@pytest.fixture(scope="module")
def reference(model):
    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def log_softmax(tokens):
        with torch.inference_mode():
            return torch.log_softmax(peer(torch.tensor([tokens])).logits[0].double(), dim=-1)

    return log_softmax


def assert_is_row(found, row, top):
    assert found.logprob == pytest.approx(float(row[found.token]), abs=1e-3)
    assert found.rank == 1 + int((row > row[found.token]).sum())
    assert [token for token, _ in found.top] == row.topk(top).indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-3)


@pytest.mark.parametrize("name", ["greedy", "penalised", "constrained"])
def test_logprobs_are_the_models_own(loop, reference, name):
    one = Asked(PROMPT, msgspec.structs.replace(KINDS[name], logprobs=4))
    loop.finish(one)
    rows = reference(one.tokens)[len(PROMPT) - 1 :]
    assert [x.token for x in one.logprobs] == one.generated
    for found, row in zip(one.logprobs, rows, strict=False):
        assert_is_row(found, row, 4)


@pytest.mark.parametrize("chunk", [1, 7, 22, 23, 100])
def test_prompt_logprobs_cover_the_prompt_whatever_the_chunks(loop, reference, chunk):
    params = SamplingParams(3, prompt_logprobs=2)
    beside = Asked(PROMPT[::-1], GREEDY, chunk=5)
    one = Asked(PROMPT, params, chunk=chunk)
    loop.finish(one, beside)
    assert [x.token for x in one.prompt_logprobs] == PROMPT[1:]
    for found, row in zip(one.prompt_logprobs, reference(PROMPT), strict=False):
        assert_is_row(found, row, 2)
    assert beside.prompt_logprobs == []


def test_an_embedding_is_the_last_hidden_state(executor, model):
    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval().model
    with torch.inference_mode():
        want = peer(torch.tensor([PROMPT])).last_hidden_state[0, -1]
    loop = Loop(executor)
    other = loop._item(Asked(PROMPT, GREEDY))
    item = loop._item(Asked(PROMPT, GREEDY))
    item = msgspec.structs.replace(item, sample_index=None, wants_embedding=True)
    found = executor.execute(StepPlan((other, item), 0)).results
    torch.testing.assert_close(torch.tensor(found[1].embedding), want, atol=1e-3, rtol=1e-3)
    assert found[1].tokens == ()
    assert len(found[0].tokens) == 1
    executor.execute(StepPlan((), 1, ended=(item.key, other.key)))


def test_blocks_come_back_from_the_swap_space_and_copies_are_copies(model):
    executor = load(model, swap_bytes=4 * 2**20)
    loop = Loop(executor)
    one = Asked(PROMPT, GREEDY)
    want = Loop(load(model)).finish(Asked(PROMPT, GREEDY))[0]
    for _ in range(5):
        loop.step(one)
    moved = [loop.free.pop() for _ in one.blocks]
    out = tuple((block, slot) for slot, block in enumerate(one.blocks))
    back = tuple((slot, block) for slot, block in enumerate(moved))
    executor.execute(StepPlan((), 0, swap_out=out))
    for block in one.blocks:
        executor.kv.block_view(block).fill_(7)
    copies = tuple((block, loop.free.pop()) for block in moved)
    executor.execute(StepPlan((), 1, swap_in=back, copies=copies))
    for block in moved:
        executor.kv.block_view(block).fill_(7)
    one.blocks = [block for _, block in copies]
    loop.finish(one)
    assert one.generated == want


def test_the_constrained_text_matches_and_ends(model, plain):
    import re

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    for name in ("constrained", "constrained greedy", "all of it"):
        text = tokenizer.decode(plain[name], skip_special_tokens=True)
        assert plain[name][-1] == EOS_ID
        assert re.fullmatch(WORDS.text, text)
