"""Tokens per expert, against what transformers' own modules send to each."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.core.sampling import SamplingParams
from engine.execution.executor_timing import time_executor
from engine.execution.graphs import DecodeGraphs
from engine.kernels.interface import BatchLayout, Span
from engine.models.expert_counts import ExpertCounts
from engine.models.linear import StepContext
from tests.models import make_model
from tests.unit.engine.driver import Driver, load

MODELS = {
    "mixtral": {},
    "qwen3_moe": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "deepseek_v3": {"num_hidden_layers": 3},
    "gpt_oss": {},
    "olmoe": {},
}
THROUGH_TRANSFORMERS = ("olmoe",)
ANSWER = SamplingParams(max_tokens=9)
LAST = -1


class Peer:
    """Our engine and transformers over one folder."""

    def __init__(self, path: Path, kind: str) -> None:
        from transformers import AutoModelForCausalLM

        make_model(path, kind, with_tokenizer=False, **MODELS[kind])
        self.driver = Driver(load(path))
        self._computes_all_rows = kind in THROUGH_TRANSFORMERS
        self._reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        self._chosen: list[torch.Tensor] = []
        for name, module in self._reference.named_modules():
            if name.endswith("mlp.experts"):
                module.register_forward_pre_hook(self._sent)

    def _sent(self, _, args) -> None:
        self._chosen.append(args[1])

    def routed(self, *sequences, skipped=()) -> np.ndarray:
        """[L, E] over the tokens that steps had to compute: all but the answer's last one, without the first
        so many of each in `skipped`. Our own last layer computes what is asked for."""
        total = 0
        for number, sequence in enumerate(sequences):
            first = skipped[number] if skipped else 0
            self._chosen.clear()
            with torch.inference_mode():
                self._reference(torch.tensor([sequence.tokens[:LAST]]))
            rows = [chosen.reshape(len(sequence.tokens) - 1, -1)[first:] for chosen in self._chosen]
            if not self._computes_all_rows:
                rows[LAST] = rows[LAST][len(sequence.prompt) - 1 - first :]
            experts = self.driver.executor.expert_counts.expert_count
            total = total + np.stack([np.bincount(r.flatten(), minlength=experts) for r in rows])
        return total

    @property
    def counted(self) -> np.ndarray:
        return self.driver.executor.expert_counts.read()


@pytest.fixture(scope="module", params=MODELS)
def peer(request, tmp_path_factory) -> Peer:
    return Peer(tmp_path_factory.mktemp("model"), request.param)


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(5, 512), k=length)


def test_every_computed_token_counts_once_per_layer_and_choice(peer: Peer) -> None:
    """Chunks may have any size, and sequences run alone and in batches with others that decode."""
    before = peer.counted
    sequences = [peer.driver.start(prompt(length), ANSWER) for length in (1, 17, 70, 130)]
    rng = random.Random(1)
    while going := [s for s in sequences if len(s.generated) < ANSWER.max_tokens]:
        chosen = rng.sample(going, rng.randint(1, len(going)))
        peer.driver.step(*((s, 1 if s.is_prefilled else rng.choice((1, 5, 33))) for s in chosen))
    assert (peer.counted - before).tolist() == peer.routed(*sequences).tolist()


def test_tokens_from_the_cache_do_not_count(peer: Peer) -> None:
    first = peer.driver.start(prompt(70), ANSWER)
    peer.driver.finish(first)
    before = peer.counted
    second = peer.driver.start([*prompt(70)[:50], *prompt(20)], ANSWER, like=first)
    peer.driver.finish(second)
    assert second.computed >= 48
    assert (peer.counted - before).tolist() == peer.routed(second, skipped=[48]).tolist()


def test_layers_are_named_as_the_model_has_them(peer: Peer) -> None:
    spec = peer.driver.executor.spec
    named = spec.moe.layers if spec.is_native else tuple(range(spec.layer_count))
    assert peer.driver.executor.expert_counts.layers == named


def test_warming_up_and_timing_leave_no_trace_and_a_dense_model_has_no_counts(tmp_path: Path) -> None:
    executor = load(make_model(tmp_path / "moe", "mixtral", with_tokenizer=False))
    executor.warm_up()
    time_executor(executor, 0.01, uses_cache=False)
    assert executor.expert_counts.read().sum() == 0
    assert load(make_model(tmp_path / "dense", "llama", with_tokenizer=False)).expert_counts is None


def test_padding_is_no_token(tmp_path: Path) -> None:
    """A recorded step of three rows is asked for two."""
    executor = load(make_model(tmp_path, "qwen3_moe", with_tokenizer=False))
    model, kernels, counts = executor._model, executor.kernels, executor.expert_counts
    tokens = torch.tensor([7, 8, 9])
    layout = BatchLayout.of([Span(0, 1, (block,)) for block in range(3)])

    def compute(is_token) -> np.ndarray:
        counts.reset()
        ropes = model.ropes(torch.from_numpy(layout.positions()))
        plan = kernels.plan(layout, ropes, windows=model.windows)
        with torch.inference_mode():
            model.compute(tokens, StepContext(plan, is_token=is_token), torch.arange(3))
        return counts.read()

    def marks(*values: int) -> torch.Tensor:
        return torch.tensor(values)

    alone = [compute(marks(*(int(i == row) for i in range(3)))) for row in range(3)]
    assert [int(one.sum()) for one in alone] == [2 * 2] * 3, "two layers, two experts a token"
    assert compute(marks(1, 1, 0)).tolist() == (alone[0] + alone[1]).tolist()
    assert compute(None).tolist() == sum(alone).tolist()


def test_a_recorded_step_says_which_rows_are_tokens() -> None:
    graphs = DecodeGraphs(None, None, sequences_max=6, blocks_max=1, device=torch.device("cpu"))
    for count in (4, 2, 2, 6, 0, 3):
        graphs._tell_padding(count)
        assert graphs._is_token.tolist() == [1] * count + [0] * (6 - count)


def test_counts_do_not_share_memory_with_what_was_read() -> None:
    counts = ExpertCounts((3, 5), 4, torch.device("cpu"))
    counts.add(1, torch.tensor([[0, 2], [0, 3]]), None)
    first = counts.read()
    counts.add(1, torch.tensor([[0, 2], [0, 3]]), torch.tensor([0, 1]))
    assert first.tolist() == [[0] * 4, [2, 0, 1, 1]]
    assert counts.read().tolist() == [[0] * 4, [3, 0, 1, 2]]
