"""LoRA adapters against transformers with the adapter merged into the base's weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from baton.core.errors import SetupError
from baton.core.messages import AdapterRef
from baton.core.sampling import SamplingParams
from engine.model_files.adapter_files import _matches, digest_adapter, read_adapter
from tests.adapters import ALL, make_adapter, merge
from tests.models import make_model
from tests.unit.engine.driver import Driver, load

COUNT = 8
PARAMS = SamplingParams(max_tokens=COUNT)
PROMPTS = [
    list(range(start, start + length)) for start, length in ((5, 40), (50, 1), (7, 23), (90, 70), (11, 12))
]


def install(executor: Any, ref: AdapterRef) -> None:
    executor.adapters.install(executor.adapters.read(ref))


def _ref(folder: Path, name: str = "a") -> AdapterRef:
    return AdapterRef(name, str(folder), digest_adapter(folder))


def _expected(folder: Path, prompt: list[int]) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    model.generation_config.eos_token_id = None
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, pad_token_id=0)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_mixed_batch_generates_what_merged_models_do(tmp_path: Path, kind: Any) -> None:
    """Three adapters of different ranks and targets and the base, in chunks, in the same steps."""
    base = make_model(tmp_path / "base", kind)
    adapters = [
        make_adapter(base, tmp_path / "all", seed=1, rank=8),
        make_adapter(
            base, tmp_path / "attention", seed=2, rank=3, targets=("q_proj", "v_proj"), use_rslora=True
        ),
        make_adapter(
            base,
            tmp_path / "patterns",
            seed=3,
            rank=4,
            targets=("k_proj", "up_proj", "down_proj"),
            ranks={"up_proj": 40},
            alpha_pattern={"mlp.up_proj": 5, "0.self_attn.k_proj": 8},
        ),
    ]
    alphas = [{}, {}, {"up_proj": 5}]
    executor = load(base)
    keys = [""]
    merged = [base]
    for index, adapter in enumerate(adapters):
        ref = _ref(adapter, f"a{index}")
        install(executor, ref)
        keys.append(ref.key)
        merged.append(merge(base, adapter, tmp_path / f"merged{index}", alphas=alphas[index]))
    _rescale_first_k(adapters[2], merged[3], base)
    driver = Driver(executor)
    running = [driver.start(p, PARAMS, adapter=keys[i % 4]) for i, p in enumerate(PROMPTS)]
    driver.finish(*running, chunk=16)
    expected = [_expected(merged[i % 4], p) for i, p in enumerate(PROMPTS)]
    assert [r.generated for r in running] == expected
    assert len({tuple(_expected(folder, PROMPTS[0])) for folder in merged}) == 4


def _rescale_first_k(adapter: Path, merged: Path, base: Path) -> None:
    """`merge` knows alphas by the module's last name only; the pattern names one layer's k."""
    name = "model.layers.0.self_attn.k_proj.weight"
    lora, plain = load_file(adapter / "adapter_model.safetensors"), load_file(base / "model.safetensors")
    pair = [lora[f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight"] for side in "BA"]
    weights = load_file(merged / "model.safetensors")
    weights[name] = plain[name] + 8 / 4 * (pair[0] @ pair[1])
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["int8", "w8a8"])
def test_adapter_on_a_quantised_base(tmp_path: Path, kind: str) -> None:
    base = make_model(tmp_path / "base", "llama")
    ref = _ref(make_adapter(base, tmp_path / "a", seed=1, strength=0.5))
    executor = load(base, quantization=kind)
    install(executor, ref)
    driver = Driver(executor)
    plain, adapted = driver.start(PROMPTS[0], PARAMS), driver.start(PROMPTS[0], PARAMS, adapter=ref.key)
    driver.finish(plain, adapted, chunk=16)
    assert plain.generated != adapted.generated
    assert plain.generated == Driver(load(base, quantization=kind)).generate(PROMPTS[0], PARAMS)


def test_dropped_adapters_make_room_and_slots_do_not_mix(tmp_path: Path) -> None:
    """One with few targets takes the slot of one with many: nothing of the old one may remain."""
    base = make_model(tmp_path / "base", "llama")
    wide = _ref(make_adapter(base, tmp_path / "wide", seed=1), "wide")
    narrow = _ref(make_adapter(base, tmp_path / "narrow", seed=2, targets=("o_proj",)), "narrow")
    executor = load(base)
    driver = Driver(executor)

    def generate(ref: AdapterRef) -> list[int]:
        install(executor, ref)
        sequence = driver.start(PROMPTS[2], PARAMS, adapter=ref.key)
        driver.finish(sequence)
        executor.adapters.drop(ref.key)
        return sequence.generated

    first = generate(narrow)
    assert generate(wide) != first
    assert generate(narrow) == first
    assert first == _expected(merge(base, tmp_path / "narrow", tmp_path / "merged"), PROMPTS[2])
    assert not executor.adapters.keys


def test_an_adapter_that_is_installed_twice_takes_one_slot(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", "llama")
    executor = load(base)
    ref = _ref(make_adapter(base, tmp_path / "a", seed=1, rank=1))
    for _ in range(2):
        install(executor, ref)
    executor.adapters.drop(ref.key)
    assert not executor.adapters.keys


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"bias": "all"}, "bias=all is not supported"),
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"r": 5}, "has rank 4, adapter_config.json says 5"),
        ({"lora_alpha": "8"}, "which is no number"),
        ({"alpha_pattern": {"(": 1}}, "no regular expression"),
    ],
)
def test_what_an_adapter_may_not_be_is_said(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    base = make_model(tmp_path / "base", "llama", with_tokenizer=False, num_hidden_layers=1)
    adapter = make_adapter(base, tmp_path / "a", seed=1, **config)
    with pytest.raises(SetupError, match=message):
        read_adapter(adapter, rank_max=64)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", "llama", with_tokenizer=False)
    other = make_model(tmp_path / "other", "llama", with_tokenizer=False, intermediate_size=96)
    executor = load(base)
    good = make_adapter(base, tmp_path / "good", seed=1)
    cases = {
        "above engine.adapter_rank_max=64": _ref(make_adapter(base, tmp_path / "big", seed=1, rank=65)),
        "is for another model": _ref(make_adapter(other, tmp_path / "foreign", seed=1)),
        "lm_head, which this model does not have or cannot adapt": _ref(
            make_adapter(base, tmp_path / "head", seed=1, targets=("lm_head",))
        ),
        "have changed": AdapterRef("a", str(good), "0" * 64),
        "does not exist": AdapterRef("a", str(tmp_path / "nowhere"), ""),
        "no adapter_config.json": AdapterRef("a", str(base), ""),
    }
    for message, ref in cases.items():
        with pytest.raises(SetupError, match=message):
            install(executor, ref)
    assert not executor.adapters.keys


def test_damaged_and_foreign_tensors_are_refused(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", "llama", with_tokenizer=False, num_hidden_layers=1)
    adapter = make_adapter(base, tmp_path / "a", seed=1)
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, weights)
    with pytest.raises(SetupError, match=r"lm_head\.weight is not a LoRA matrix"):
        read_adapter(adapter, rank_max=64)
    alone = {k: v for k, v in tensors.items() if not k.endswith("q_proj.lora_B.weight")}
    save_file(alone, weights)
    with pytest.raises(SetupError, match="has no lora_B"):
        read_adapter(adapter, rank_max=64)
    save_file(tensors, weights)
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(SetupError, match="truncated"):
        read_adapter(adapter, rank_max=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, dtype: torch.dtype, bad: float) -> None:
    base = make_model(tmp_path / "base", "llama", with_tokenizer=False, num_hidden_layers=1)
    adapter = make_adapter(base, tmp_path / "a", seed=1)
    weights = adapter / "adapter_model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(weights).items()}
    save_file(tensors, weights)
    executor = load(base)
    install(executor, _ref(adapter))
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    tensors[name][-1, -1] = bad
    save_file(tensors, weights)
    with pytest.raises(SetupError, match=r"mlp\.up_proj\.lora_B\.weight has numbers that are not finite"):
        install(executor, _ref(adapter, "b"))


def test_numbers_that_overflow_with_their_scale_are_refused(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", "llama", with_tokenizer=False, num_hidden_layers=1)
    adapter = make_adapter(base, tmp_path / "a", seed=1, targets=("o_proj",), lora_alpha=1e300)
    with pytest.raises(SetupError, match=r"o_proj overflow torch\.float32"):
        install(load(base), _ref(adapter))


def test_the_digest_covers_both_files(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", "llama", with_tokenizer=False, num_hidden_layers=1)
    adapter = make_adapter(base, tmp_path / "a", seed=1)
    first = digest_adapter(adapter)
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 9}))
    second = digest_adapter(adapter)
    weights = adapter / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert len({first, second, digest_adapter(adapter)}) == 3


FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@pytest.mark.parametrize(
    ("kind", "targets"), [("phi3", FUSED), ("qwen3_moe", ("q_proj", "o_proj")), ("gemma2", ALL)]
)
def test_other_families_take_adapters(tmp_path: Path, kind: Any, targets: tuple[str, ...]) -> None:
    base = make_model(tmp_path / "base", kind, with_tokenizer=False)
    adapter = make_adapter(base, tmp_path / "a", seed=5, targets=targets)
    executor = load(base)
    install(executor, _ref(adapter))
    driver = Driver(executor)
    sequences = [driver.start(PROMPTS[0], PARAMS, adapter=key) for key in (_ref(adapter).key, "")]
    driver.finish(*sequences, chunk=16)
    folders = (merge(base, adapter, tmp_path / "merged"), base)
    assert [s.generated for s in sequences] == [_expected(folder, PROMPTS[0]) for folder in folders]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_beside_a_sequence_changes_no_bit_of_it(tmp_path: Path, dtype: str) -> None:
    """Native kernels promise it of the base; adapters keep the promise, seen in exact logprobs."""
    base = make_model(tmp_path / "base", "llama", with_tokenizer=False)
    refs = [_ref(make_adapter(base, tmp_path / f"a{n}", seed=n, rank=2 + 3 * n), f"a{n}") for n in range(3)]
    executor = load(base, dtype=dtype)
    if not executor.kernels.is_batch_invariant:
        pytest.skip("these kernels promise nothing")
    for ref in refs:
        install(executor, ref)
    keys = ["", *(ref.key for ref in refs)]
    alone = [_with_logprobs(executor, [(PROMPTS[i], key)], chunk=100)[0] for i, key in enumerate(keys)]
    together = _with_logprobs(executor, [(PROMPTS[i], key) for i, key in enumerate(keys)], chunk=7)
    assert together == alone


def _with_logprobs(executor: Any, work: list[tuple[list[int], str]], *, chunk: int) -> list[list[Any]]:
    """Tokens and exact logprobs of each, all run together; no two have one adapter."""
    driver = Driver(executor)
    params = SamplingParams(max_tokens=COUNT, logprobs=2)
    found: dict[str, list[Any]] = {key: [] for _, key in work}
    running = [driver.start(prompt, params, adapter=key) for prompt, key in work]
    execute = executor.execute

    def watched(plan: Any) -> Any:
        result = execute(plan)
        for item, one in zip(plan.items, result.results, strict=True):
            found[item.adapter] += [*one.tokens, *one.logprobs]
        return result

    executor.execute = watched
    try:
        driver.finish(*running, chunk=chunk)
    finally:
        executor.execute = execute
    return list(found.values())


def test_adapter_goes_on_where_another_engine_prefilled(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", "llama", with_tokenizer=False)
    ref = _ref(make_adapter(base, tmp_path / "a", seed=1))
    prefill, decode = load(base), load(base)
    for executor in (prefill, decode):
        install(executor, ref)
    first, second = Driver(prefill), Driver(decode)
    sequence = first.start(PROMPTS[0], PARAMS, adapter=ref.key)
    first.step((sequence, 100))
    decode.kernels.scatter_blocks(sequence.blocks, prefill.kernels.gather_blocks(sequence.blocks))
    second.free = [block for block in second.free if block not in sequence.blocks]
    second.finish(sequence)
    assert sequence.generated == _expected(merge(base, tmp_path / "a", tmp_path / "merged"), PROMPTS[0])


@pytest.mark.parametrize("pattern", ["([a-z]+)+!", "a*b*c*d*e", "(x){3}"])
def test_a_pattern_that_may_take_for_ever_is_refused(pattern, tmp_path):
    with pytest.raises(SetupError, match="repeats too much"):
        _matches(pattern, "model.layers.0.self_attn.q_proj", tmp_path)
