import json
import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.core.errors import SetupError
from benchmarks.demo_model import make as demo_model
from benchmarks.demo_model.make import (
    FOLDER_BYTES_MAX,
    TrainingPlan,
    batches,
    encode_conversation,
    learning_rate_factor,
    make_demo_model,
    train_tokenizer,
    weighted_loss,
)
from benchmarks.demo_model.text import conversations, topics

TINY = TrainingPlan(row_tokens=64, rows=2, steps_max=3, tokenizer_conversations=500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("demo") / "deep" / "model"
    heard = []
    make_demo_model(out, budget_s=60.0, seed=0, progress=lambda *now: heard.append(now), plan=TINY)
    assert [steps for _, steps, _ in heard] == [1, 2, 3]
    assert heard[-1][0] == 1.0
    return out


def test_the_folder_is_small_and_loads_as_any_checkpoint(folder):
    assert sum(f.stat().st_size for f in folder.rglob("*")) <= FOLDER_BYTES_MAX
    assert [p.name for p in folder.parent.iterdir()] == ["model"]  # nothing half-made is left
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["max_position_embeddings"] >= 8192
    assert config.get("_attn_implementation") in (None, "sdpa")
    assert "Apache-2.0" in (folder / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert model.config.eos_token_id == tokenizer.eos_token_id
    ids = tokenizer("Hello", return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=4, do_sample=False, eos_token_id=[-1])
    assert made.shape[1] == ids["input_ids"].shape[1] + 4


def test_the_template_renders_what_training_saw(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [("system", "Be brief."), ("user", "Hi!"), ("assistant", "Hello!")]
    messages = [{"role": role, "content": text} for role, text in turns]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|system|>Be brief.<|end|><|user|>Hi!<|end|><|assistant|>Hello!<|end|>"
    ids, weights = encode_conversation(tokenizer, turns, question_weight=0.5)
    assert tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"] == ids
    assert ids.count(tokenizer.eos_token_id) == 3
    assert len(weights) == len(ids)
    # The end of an answer is learnt, or the model would never stop.
    assert weights[-1] == 1.0
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|user|>Hi!<|end|><|assistant|>")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi!"}]}]
    assert tokenizer.apply_chat_template(parts, tokenize=False) == "<|user|>Hi!<|end|>"


def test_the_tokenizer_writes_any_text(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Grüße, 東京 🦊\n\ttabs  and  blanks <b>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        (args[0] / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_demo_model(tmp_path / "out", budget_s=1.0, plan=TINY)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError):
        make_demo_model(tmp_path / "out", budget_s=1.0, plan=TINY)


def test_the_loss_and_its_gradient_are_those_of_cross_entropy():
    torch.manual_seed(0)
    logits = torch.randn(7, 11, requires_grad=True)
    targets, weights = torch.randint(11, (7,)), torch.rand(7) + 0.5
    each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    wanted = (each * weights).sum() / weights.sum()
    (gradient,) = torch.autograd.grad(wanted, logits)
    loss = weighted_loss(logits, targets, weights)
    loss.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(logits.grad, gradient)


def test_the_schedule_ends_at_zero_whatever_the_number_of_steps():
    factors = [learning_rate_factor(s / 100, warmup_share=0.04) for s in range(101)]
    assert max(factors) == pytest.approx(1.0, abs=0.01)
    assert factors[-1] == pytest.approx(0.0, abs=1e-9)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert 0 < factors[0] < 0.2


def test_training_lowers_the_loss():
    tokenizer = train_tokenizer(random.Random(0), conversation_count=500)
    plan = TrainingPlan(row_tokens=64, rows=4, steps_max=12)  # of seconds each without bf16 instructions
    model = demo_model.Qwen3ForCausalLM(demo_model.model_config(end_id=1, pad_id=0))
    losses = []
    done = demo_model.train(
        model,
        batches(tokenizer, random.Random(1), plan),
        plan,
        budget_s=600.0,
        on_progress=lambda share, steps, loss: losses.append(loss),
    )
    assert done.steps == 12
    assert all(math.isfinite(x) for x in losses)
    assert sum(losses[-3:]) / 3 < 0.8 * losses[0]


def test_a_used_up_budget_ends_training_after_the_step():
    tokenizer = train_tokenizer(random.Random(0), conversation_count=200)
    plan = TrainingPlan(row_tokens=32, rows=1)
    model = demo_model.Qwen3ForCausalLM(demo_model.model_config(end_id=1, pad_id=0))
    now = iter(range(0, 1000, 4))
    done = demo_model.train(
        model,
        batches(tokenizer, random.Random(1), plan),
        plan,
        budget_s=10.0,
        on_progress=lambda *_: None,
        clock_s=lambda: float(next(now)),
    )
    assert done.steps == 3


def test_conversations_follow_from_the_seed_and_alternate():
    def some(seed):
        source = conversations(random.Random(seed))
        return [next(source) for _ in range(300)]

    assert some(1) == some(1)
    assert some(1) != some(2)
    for turns in some(3):
        roles = [role for role, _ in turns if role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(text.strip() == text and "{" not in text and "<|" not in text for _, text in turns)
    answers = {text for turns in some(4) for role, text in turns if role == "assistant"}
    assert len(answers) > 100
    assert all(questions and answer for questions, answer in topics())


def test_what_cannot_be_made_says_why(tmp_path):
    for out, budget_s in ((tmp_path, 1.0), (tmp_path / "new", math.nan)):
        with pytest.raises(SetupError, match="no demo model"):
            demo_model.demo_model(out, budget_s)
    assert not (tmp_path / "new").exists()


def test_progress_in_a_log_is_a_line_every_ten_seconds():
    now_s, lines = 0.0, []
    progress = demo_model._ProgressLines(lines.append, lambda: now_s)
    for tenths in range(1, 301):
        now_s = tenths / 10
        progress.show(tenths / 300, tenths, 2.0)
    assert lines == [
        "training the demo model: 33%, step 100, loss 2.000",
        "training the demo model: 67%, step 200, loss 2.000",
        "training the demo model: 100%, step 300, loss 2.000",
    ]
