"""Trains a demo model on this machine, so that `baton` can be tried where nothing can be downloaded.

The result is a Qwen3-shaped model of about 2 million parameters with its own byte-level BPE tokenizer and
chat template, written as a Hugging Face folder of less than 8 MB. It learns the conversations of
`benchmarks.demo_model.text` (text of this project, Apache-2.0) in about two minutes on two CPU cores.

Precision: weights are rounded to bf16 in the file, so that it stays small, and config.json says `"dtype":
"float32"`, so that computation is in fp32. The greedy answer must be the same on one worker or two, in chunks
or not, from cache or not, and these add the same numbers in different orders. In fp32 the resulting noise is
about 1e-6 of a logit, and two best tokens that close are practically impossible. In bf16 it is about 1e-2,
and ties happen in every long answer. At this size fp32 costs no speed: a CPU's bf16 attention with one query
is slower than its fp32 one.

The schedule follows the clock, not a number of steps. A slow machine takes fewer steps, but still ends on
time with the learning rate at zero.
"""

import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from baton.core.errors import SetupError
from benchmarks.demo_model.text import Turn, conversations

BUDGET_S = 120.0
LINE_S = 10.0
VOCAB_TOKENS = 2048
CONTEXT_TOKENS_MAX = 16_384
FOLDER_BYTES_MAX = 8 * 2**20

PAD, END, SYSTEM, USER, ASSISTANT = "<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}
{{- message['content'] | trim -}}
{%- else -%}
{%- for part in message['content'] or [] -%}
{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

MODEL_CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# Baton demo model

A tiny chat model ({parameters:,} parameters, Qwen3 architecture) for trying Baton without a download. It
greets, explains what Baton does, knows some capitals, animals, colours, opposites and small sums, and tells
short stories. It knows nothing else and is often wrong: it is for demonstrations and tests only.

- Text: only conversations generated from the tables in `benchmarks/demo_model/facts.py` and
  `topics.py`, written for Baton, Apache-2.0. No other data, no other model.
- Training: {steps} steps of {step_tokens} tokens in {seconds:.0f} s on this machine,
  seed {seed}, last loss {loss:.3f}.
- Weights are stored as bf16 and computed with in fp32 (`dtype` in config.json), so that greedy answers do not
  depend on how the work is divided.
- Licence of the weights: Apache-2.0.
"""

OnProgress = Callable[[float, int, float], None]
"""Is called after every step with the share of the budget that is used, the steps done, and the loss of this
step."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The training settings. The defaults are the best found for two minutes on two cores."""

    row_tokens: int = 128
    rows: int = 8
    learning_rate: float = 6e-3
    warmup_share: float = 0.04
    """Share of the budget in which the learning rate rises from zero."""
    question_weight: float = 0.05
    """Weight of the loss at the tokens of a question; the answers' is 1."""
    steps_max: int = 1_000_000
    tokenizer_conversations: int = 6_000


@dataclass(frozen=True, slots=True)
class Trained:
    steps: int
    seconds: float
    loss: float


def train_tokenizer(rng: random.Random, *, conversation_count: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text can be written, and the demo's own words are mostly one token."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_TOKENS,
        special_tokens=[PAD, END, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    source = conversations(rng)
    raw.train_from_iterator(
        (text for _ in range(conversation_count) for _, text in next(source)), trainer=trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=CONTEXT_TOKENS_MAX,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int), token
    return found


def model_config(*, end_id: int, pad_id: int) -> Qwen3Config:
    """Four layers of 192 with grouped queries, 3 KiB of fp32 KV per token. A wider model learns more from a
    token, but sees too few of them in two minutes on two busy cores."""
    return Qwen3Config(
        vocab_size=VOCAB_TOKENS,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS_MAX,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        bos_token_id=None,
    )


def encode_conversation(
    tokenizer: PreTrainedTokenizerFast, turns: list[Turn], *, question_weight: float
) -> tuple[list[int], list[float]]:
    """Token ids exactly as the chat template writes them, and the weight of the loss at each."""
    end_id = token_id(tokenizer, END)
    ids: list[int] = []
    weights: list[float] = []
    for role, text in turns:
        body = [*tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids, end_id]
        ids += [token_id(tokenizer, f"<|{role}|>"), *body]
        # The template writes the role token after a question, so it is never predicted.
        weights += [0.0, *([1.0 if role == "assistant" else question_weight] * len(body))]
    return ids, weights


def batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, plan: TrainingPlan
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids, weights), both [rows, row_tokens + 1]. A row begins with the start of a conversation, as
    every prompt does, and is filled with further ones; the last is cut."""
    source = conversations(rng)
    length = plan.row_tokens + 1
    while True:
        rows: list[list[int]] = []
        row_weights: list[list[float]] = []
        for _ in range(plan.rows):
            ids: list[int] = []
            weights: list[float] = []
            while len(ids) < length:
                more = encode_conversation(tokenizer, next(source), question_weight=plan.question_weight)
                ids += more[0]
                weights += more[1]
            rows.append(ids[:length])
            row_weights.append(weights[:length])
        yield torch.tensor(rows), torch.tensor(row_weights)


def learning_rate_factor(share: float, *, warmup_share: float) -> float:
    """A linear rise, then half a cosine down to zero; `share` of the budget is used."""
    if share < warmup_share:
        return (share + 0.1 * warmup_share) / (1.1 * warmup_share)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (share - warmup_share) / (1 - warmup_share))))


class WeightedLoss(torch.autograd.Function):
    """Cross entropy whose gradient is computed in the forward pass, in place. The generic one passes over the
    [tokens, vocabulary] matrix five more times, which was a quarter of a step."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
        rows = torch.arange(targets.numel())
        share = weights / weights.sum().clamp(min=1.0)
        loss = -(probabilities[rows, targets].clamp(min=1e-30).log() * share).sum()
        probabilities[rows, targets] -= 1.0
        ctx.save_for_backward(probabilities.mul_(share[:, None]).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The loss is the root of the backward pass, so the incoming gradient is 1."""
        return ctx.saved_tensors[0], None, None


def weighted_loss(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats; logits [tokens, vocabulary], targets and weights [tokens]. It must be the
    root of the backward pass, because its own gradient is taken as 1."""
    return cast(torch.Tensor, WeightedLoss.apply(logits, targets, weights))


def make_optimizers(model: Qwen3ForCausalLM, plan: TrainingPlan) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for the layers' matrices and AdamW for the rest, at one learning rate. Muon
    needs fewer steps to the same loss, and two minutes allow few steps."""
    inner = [p for p in model.model.layers.parameters() if p.dim() == 2]
    taken = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in taken]
    return [
        torch.optim.Muon(
            inner, lr=plan.learning_rate, weight_decay=0.05, ns_steps=4, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train(
    model: Qwen3ForCausalLM,
    source: Iterator[tuple[torch.Tensor, torch.Tensor]],
    plan: TrainingPlan,
    *,
    budget_s: float,
    on_progress: OnProgress,
    clock_s: Callable[[], float] = time.monotonic,
) -> Trained:
    """Train in place until the budget is used or `plan.steps_max` steps are done; at least one step."""
    optimizers = make_optimizers(model, plan)
    model.train()
    begun_s = clock_s()
    steps, loss_value, share = 0, math.nan, 0.0
    while steps < plan.steps_max and (share < 1.0 or steps == 0):
        ids, weights = next(source)
        factor = learning_rate_factor(share, warmup_share=plan.warmup_share)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = plan.learning_rate * factor
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            # Only the positions that are learnt: logits over the vocabulary are a third of the work.
            counted = weights[:, 1:].flatten().nonzero().squeeze(1)
            logits = model.lm_head(hidden.flatten(0, 1).index_select(0, counted))
        targets, shares = (t[:, 1:].flatten().index_select(0, counted) for t in (ids, weights))
        loss = weighted_loss(logits, targets, shares)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        steps += 1
        loss_value = float(loss.detach())
        # A plan of few steps (in tests) follows the steps; otherwise the clock decides.
        share = max((clock_s() - begun_s) / budget_s, steps / plan.steps_max)
        on_progress(min(1.0, share), steps, loss_value)
    model.eval()
    return Trained(steps, clock_s() - begun_s, loss_value)


def save(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, card: str) -> None:
    """Write the Hugging Face folder: bf16 weights, and a config.json that asks for fp32."""
    cast(torch.nn.Module, model).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    config["dtype"] = "float32"
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "README.md").write_text(card)
    for file in folder.iterdir():
        # safetensors makes it readable by the owner only, and a server may run as another user
        file.chmod(0o644)


def make_demo_model(
    out: Path,
    *,
    budget_s: float = BUDGET_S,
    seed: int = 0,
    progress: OnProgress | None = None,
    plan: TrainingPlan | None = None,
) -> None:
    """Train the demo model for `budget_s` seconds and put its folder at `out`, whole or not at all.

    Raises FileExistsError if `out` exists, ValueError if the budget is not a positive number of seconds.

    The same seed gives the same texts in the same order, but not the same weights bit by bit, because the
    number of steps follows the clock.
    """
    _check(out, budget_s=budget_s)
    chosen = plan or TrainingPlan()
    out.parent.mkdir(parents=True, exist_ok=True)
    # The folder is made first, so that a place that cannot be written to is known before the training. It is
    # beside `out`, because a rename is atomic only within one file system.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        tokenizer = train_tokenizer(random.Random(seed), conversation_count=chosen.tokenizer_conversations)
        torch.manual_seed(seed)
        end_id, pad_id = (token_id(tokenizer, t) for t in (END, PAD))
        model = Qwen3ForCausalLM(model_config(end_id=end_id, pad_id=pad_id))
        # rows are short, and plain matmuls are faster than the CPU's fused backward
        model.set_attn_implementation("eager")
        model.generation_config.eos_token_id = [end_id, pad_id]
        model.generation_config.pad_token_id = pad_id
        source = batches(tokenizer, random.Random(seed + 1), chosen)
        done = train(model, source, chosen, budget_s=budget_s, on_progress=progress or _silent)
        card = MODEL_CARD.format(
            parameters=model.num_parameters(),
            steps=done.steps,
            step_tokens=chosen.rows * chosen.row_tokens,
            seconds=done.seconds,
            seed=seed,
            loss=done.loss,
        )
        save(unfinished, model, tokenizer, card=card)
        unfinished.chmod(0o755)
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _check(out: Path, *, budget_s: float) -> None:
    if out.exists():
        raise FileExistsError(f"{out} exists already")
    if not (0 < budget_s < math.inf):
        raise ValueError(f"{budget_s} is no positive number of seconds")


def _silent(share: float, steps: int, loss: float) -> None:
    """Show no progress."""


class _ProgressLines:
    """Progress for a log: one line every LINE_S seconds."""

    def __init__(self, write: Callable[[str], None], clock_s: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock_s = write, clock_s
        self._due_s = clock_s() + LINE_S

    def show(self, share: float, steps: int, loss: float) -> None:
        if self._clock_s() >= self._due_s:
            self._due_s += LINE_S
            self._write(f"training the demo model: {share:.0%}, step {steps}, loss {loss:.3f}")


def make_with_progress(out: Path, *, budget_s: float = BUDGET_S, seed: int = 0) -> None:
    """Run `make_demo_model` with a bar on standard error, or with lines if that is not a terminal."""
    _check(out, budget_s=budget_s)  # check before anything is drawn
    console = Console(stderr=True)
    disable_progress_bar()  # transformers would draw its own bar over ours
    if console.is_terminal:
        _make_with_bar(out, console, budget_s=budget_s, seed=seed)
    else:
        lines = _ProgressLines(lambda line: print(line, file=sys.stderr, flush=True))
        make_demo_model(out, budget_s=budget_s, seed=seed, progress=lines.show)
    console.print(f"demo model written to {out}")


def _make_with_bar(out: Path, console: Console, *, budget_s: float, seed: int) -> None:
    columns = (
        TextColumn("training the demo model"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %  step {task.fields[steps]}  loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    smooth = math.nan
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("train", total=1.0, steps=0, loss=math.nan)

        def show(share: float, steps: int, loss: float) -> None:
            nonlocal smooth
            smooth = loss if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss
            bar.update(task, completed=share, steps=steps, loss=smooth)

        make_demo_model(out, budget_s=budget_s, seed=seed, progress=show)


def demo_model(
    out: Annotated[Path, typer.Argument(help="Folder to make; it must not exist yet.")],
    budget_s: Annotated[float, typer.Option(help="Seconds of training.")] = BUDGET_S,
    seed: Annotated[int, typer.Option(help="Seed of the texts and the initial weights.")] = 0,
) -> None:
    """Train the small demo model on this machine; nothing is downloaded."""
    # SetupError reports what the operator must change, as in every command.
    try:
        make_with_progress(out, budget_s=budget_s, seed=seed)
    except (OSError, ValueError) as error:
        raise SetupError(f"no demo model: {error}") from error
