"""Every family gives the tokens of transformers (CPU, float32) on a GPU, with recorded steps and without,
in whatever company its sequences are computed."""

import random

import pytest
import torch

from tests.models import make_model
from tests.unit.engine.driver import Driver, load
from tests.unit.engine.test_families import GENERATED, MODELS, PROMPT_LENGTHS, Family, prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ALL = {"llama": ("llama", {}), "qwen2": ("qwen2", {}), "qwen3": ("qwen3", {}), **MODELS}


@pytest.mark.parametrize("name", ALL)
def test_tokens_equal_transformers(name, tmp_path) -> None:
    kind, changes = ALL[name]
    family = Family(make_model(tmp_path, kind, with_tokenizer=False, **changes))
    driver, rng = Driver(load(family.path, device="cuda")), random.Random(3)
    sequences = [driver.start(prompt(length), GENERATED) for length in PROMPT_LENGTHS]
    while going := [s for s in sequences if len(s.generated) < GENERATED.max_tokens]:
        chosen = rng.sample(going, rng.randint(1, len(going)))
        driver.step(*((s, 1 if s.is_prefilled else rng.choice((1, 5, 33, 100))) for s in chosen))
    for sequence in sequences:
        assert sequence.generated == family.expected(tuple(sequence.prompt))
    assert driver.executor.recorder.replayed_count > 0
