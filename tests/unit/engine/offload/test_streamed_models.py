"""Models with streamed layers compute the same bits as without."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.core.messages import INFO_NOTE, AdapterRef
from baton.core.sampling import SamplingParams
from baton.core.shape import Shape
from engine.execution.executor import Executor
from engine.loading import offloading as offloading_module
from engine.model_files.adapter_files import digest_adapter
from engine.offload.file_images import FileImages, read_at
from engine.offload.images import OffloadFailed
from engine.offload.streaming import StreamedLayers
from tests.adapters import make_adapter
from tests.gguf_files import write_gguf
from tests.models import make_model
from tests.thread_ranks import ThreadGroup, run_ranks
from tests.unit.engine.driver import Driver, load
from tests.unit.engine.test_divided_models import MODELS
from tests.unit.engine.test_families import prompt

GENERATED = SamplingParams(max_tokens=6)


@pytest.fixture
def opened() -> Iterator[list[Executor]]:
    executors: list[Executor] = []
    yield executors
    for executor in executors:
        executor.close()


def layers_of(name: str, layer_count: int = 4) -> dict[str, Any]:
    """Arguments of `make_model`."""
    kind, changes = MODELS[name]
    layers = {} if kind == "gemma3" else {"num_hidden_layers": layer_count}
    return {"kind": kind, "with_tokenizer": False, **changes, **layers}


def logits(executor: Executor) -> torch.Tensor:
    return torch.cat(list(executor.logits_of(prompt(70), chunk_tokens=33)))


def tokens(executor: Executor) -> list[list[int]]:
    """Prompts in chunks, the middle ones of which have no row that is wanted, and decodes."""
    driver = Driver(executor)
    running = [driver.start(prompt(length), GENERATED) for length in (36, 130)]
    driver.finish(*running, chunk=33)
    return [one.generated for one in running]


def check_streams(executor: Executor, *, steps: int, layers: int) -> None:
    """Each of so many steps read each of so many layers, at least."""
    offloading = executor.offloading
    assert offloading is not None
    assert offloading.streamed is not None
    assert offloading.cost is not None
    assert offloading.cost.layer_count == layers
    assert offloading.streamed.bytes_read >= steps * offloading.cost.byte_count
    told = f"{INFO_NOTE}offload: {layers} of "
    assert any(note.startswith(told) for note in executor.notes)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, "native") for name in MODELS),
        *((name, "torch") for name in ("llama", "mixtral", "deepseek-v2")),
    ],
)
def test_every_family_computes_the_same_bits(
    tmp_path: Path, opened: list[Executor], name: str, kernels: str
) -> None:
    folder = make_model(tmp_path, **layers_of(name))
    opened += [load(folder, kernels=kernels, offload=offload) for offload in ("0", "all")]
    resident, streamed = opened
    assert torch.equal(logits(streamed), logits(resident))
    assert tokens(streamed) == tokens(resident)
    check_streams(streamed, steps=7, layers=resident.spec.layer_count)
    assert resident.fingerprint == streamed.fingerprint


@pytest.mark.parametrize("offload", ["3", "all"])
@pytest.mark.parametrize("model", [{"quantization": kind} for kind in ("int8", "int4")], ids=str)
@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_weights_that_are_rounded_at_load(
    tmp_path: Path, opened: list[Executor], name: str, model: dict[str, Any], offload: str
) -> None:
    folder = make_model(tmp_path, **layers_of(name))
    opened += [load(folder, **model), load(folder, **model, offload=offload)]
    assert torch.equal(logits(opened[1]), logits(opened[0]))
    assert tokens(opened[1]) == tokens(opened[0])
    check_streams(opened[1], steps=7, layers=3 if offload == "3" else 4)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("1", ""),
        ("tp2", " of each rank"),
        ("cp2", " of each rank"),
        ("tp2pp2", " of each rank of the first stage"),
    ],
)
def test_the_note_says_whose_layers_are_streamed(shape: str, words: str) -> None:
    assert offloading_module._whose(Shape.parse(shape)) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(1.2345, "1,234 ms"), (0.0123, "12 ms"), (0.0042, "4.2 ms"), (2e-5, "0.02 ms")]
)
def test_times_of_small_models_are_not_rounded_to_nothing(seconds: float, words: str) -> None:
    assert offloading_module._milliseconds(seconds) == words


def test_a_gguf_file(tmp_path: Path, opened: list[Executor]) -> None:
    folder = make_model(tmp_path / "llama", "llama", num_hidden_layers=4)
    file = write_gguf(folder, tmp_path / "model.gguf")
    opened += [load(file), load(file, offload="3")]
    assert torch.equal(logits(opened[1]), logits(opened[0]))
    check_streams(opened[1], steps=3, layers=3)


def test_bfloat16(tmp_path: Path, opened: list[Executor]) -> None:
    folder = make_model(tmp_path, **layers_of("mixtral"))
    opened += [load(folder, dtype="bfloat16", offload=offload) for offload in ("0", "all")]
    assert torch.equal(logits(opened[1]), logits(opened[0]))
    check_streams(opened[1], steps=3, layers=4)


def test_adapters(tmp_path: Path, opened: list[Executor]) -> None:
    """Their weights stay in memory."""
    folder = make_model(tmp_path / "llama", **layers_of("llama"))
    adapter = make_adapter(folder, tmp_path / "adapter", seed=3)
    ref = AdapterRef("a", str(adapter), digest_adapter(adapter))
    generated: list[list[int]] = []
    for offload in ("0", "all"):
        opened.append(executor := load(folder, offload=offload))
        executor.install_adapter(executor.read_adapter(ref))
        driver = Driver(executor)
        running = [driver.start(prompt(50), GENERATED, adapter=key) for key in (ref.key, "")]
        driver.finish(*running)
        generated += [one.generated for one in running]
    assert generated[:2] == generated[2:]
    assert generated[0] != generated[1], "the adapter changes nothing"


def test_tensor_ranks(tmp_path: Path, opened: list[Executor]) -> None:
    """Each streams its own part."""
    folder = make_model(tmp_path, **layers_of("mixtral"))

    def generate(group: ThreadGroup, offload: str) -> tuple[list[list[int]], int]:
        executor = load(folder, group=group, kv_bytes=2**21, offload=offload)
        found = tokens(executor)
        if offload == "all":
            check_streams(executor, steps=7, layers=4)
        assert executor.offloading is not None
        cost = executor.offloading.cost
        executor.close()
        return found, cost.byte_count if cost is not None else 0

    resident = run_ranks(2, lambda group: generate(group, "0"))
    streamed = run_ranks(2, lambda group: generate(group, "all"))
    assert [found for found, _ in streamed] == [found for found, _ in resident]
    opened.append(load(folder, offload="all"))
    whole = opened[0].offloading
    assert whole is not None
    assert whole.cost is not None
    assert all(part < 0.6 * whole.cost.byte_count for _, part in streamed)


@pytest.mark.parametrize("shape", ["tp2", "pp2"])
def test_ranks_as_processes(tmp_path: Path, opened: list[Executor], shape: str) -> None:
    folder = make_model(tmp_path, **layers_of("llama", 6))
    config = ModelConfig(path=str(folder), offload="all", offload_folder=str(tmp_path / "layers"))
    engine = EngineConfig(kv_bytes=2**21, block_tokens=16, threads=1, shape=shape, rank_timeout_s=60.0)
    opened += [load(folder), Executor.load(config, engine)]
    assert tokens(opened[1]) == tokens(opened[0])
    check_streams(opened[1], steps=7, layers=6 if shape == "tp2" else 3)
    assert list((tmp_path / "layers").iterdir()) == []


def test_a_stage_that_streams_nothing_says_so(tmp_path: Path, opened: list[Executor]) -> None:
    folder = make_model(tmp_path, **layers_of("llama"))
    engine = EngineConfig(kv_bytes=2**21, block_tokens=16, threads=1, shape="pp2", rank_timeout_s=60.0)
    opened.append(Executor.load(ModelConfig(path=str(folder), offload="3"), engine))
    notes = [note for note in opened[0].notes if "offload" in note]
    assert notes == [
        "model.offload=3 streams nothing here: of the model's streamed layers at most 2 are among this "
        "rank's 2, and 2 are in memory at any time; stream more layers, or use fewer stages"
    ]
    opened.append(load(folder))
    assert not any("offload" in note for note in opened[1].notes)


@pytest.mark.parametrize(
    ("offload", "reason"),
    [("9", "the model has 4 layers"), ("2", "saves no memory")],
)
def test_numbers_of_layers_that_cannot_be(tmp_path: Path, offload: str, reason: str) -> None:
    folder = make_model(tmp_path, **layers_of("llama"))
    with pytest.raises(SetupError, match=reason):
        load(folder, offload=offload)


def test_auto_keeps_to_the_memory_that_weights_may_take(tmp_path: Path, opened: list[Executor]) -> None:
    folder = make_model(tmp_path, **layers_of("llama", 8))
    opened.append(load(folder, offload="all"))
    whole = opened[0].offloading
    assert whole is not None
    assert whole.cost is not None
    table = opened[0].spec.vocab_size * opened[0].spec.hidden_size * 4
    bound = int(whole.cost.byte_count * 0.8) + 2 * table
    opened.append(load(folder, offload="auto", weights_bytes_max=bound))
    check_streams(opened[1], steps=0, layers=5)
    assert logits(opened[1]).equal(logits(opened[0]))
    with pytest.raises(SetupError, match=r"model.weights_bytes_max leaves .*engine.shape"):
        load(folder, weights_bytes_max=bound)
    with pytest.raises(SetupError, match=r"with 8 of 8 layers streamed"):
        load(folder, offload="auto", weights_bytes_max=whole.cost.byte_count // 4)


def test_a_step_fails_when_the_disk_does(
    tmp_path: Path, opened: list[Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_broken = False

    def read(file: int, memory: memoryview, offset: int) -> int:
        return 0 if is_broken else read_at(file, memory, offset)

    def images(folder: Path, **rest: Any) -> FileImages:
        return FileImages(folder, read=read, **rest)

    monkeypatch.setattr(offloading_module, "FileImages", images)
    folder = make_model(tmp_path, **layers_of("llama"))
    opened.append(load(folder, offload="all"))
    tokens(opened[0])
    is_broken = True
    with pytest.raises(OffloadFailed, match="the file ends at byte"):
        tokens(opened[0])


def test_a_disk_that_is_too_slow_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path, **layers_of("llama"))

    def measured(_: StreamedLayers) -> float:
        return 1e4

    monkeypatch.setattr(StreamedLayers, "_measured", measured)
    with pytest.raises(
        SetupError, match=r"reading the 4 streamed layers takes at least .* s a step at 0 MB/s"
    ):
        load(folder, offload="all")
