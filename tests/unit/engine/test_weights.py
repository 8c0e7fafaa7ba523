"""Checkpoints: views of mapped files, digests that tell models apart, one line for every damage."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import SetupError
from engine.loading.checkpoint import Checkpoint
from engine.model_files.resolve import resolve_model
from tests.models import make_model
from tests.unit.engine.driver import load

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "whole", "llama", with_tokenizer=False)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "copy")


def edit(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def test_tensors_are_those_that_safetensors_reads(whole: Path) -> None:
    checkpoint = Checkpoint(whole)
    expected = load_file(whole / "model.safetensors")
    assert checkpoint.names == set(expected)
    for name, tensor in expected.items():
        shape = tuple(tensor.shape)
        assert torch.equal(checkpoint.tensor(name, shape, dtype=torch.float32, device=CPU), tensor)
        rounded = checkpoint.tensor(name, shape, dtype=torch.bfloat16, device=CPU)
        assert torch.equal(rounded, tensor.bfloat16())


def test_nothing_is_copied_when_the_dtype_is_right(whole: Path) -> None:
    first, second = (
        Checkpoint(whole).tensor("lm_head.weight", (512, 64), dtype=torch.float32, device=CPU)
        for _ in range(2)
    )
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(whole) in line]
    ranges = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in mapped]
    for tensor in (first, second):
        assert any(start <= tensor.data_ptr() < end for start, end in ranges)


def resident_bytes(folder: Path) -> int:
    """Bytes of this folder's files that are mapped and in this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return sum(
        int(next(line for line in lines if line.startswith("Rss:")).split()[1]) * 1024
        for line in lines
        if str(folder) in line
    )


def test_what_was_read_is_let_go_of_and_read_again(whole: Path) -> None:
    before = resident_bytes(whole)
    checkpoint = Checkpoint(whole)
    tensor = checkpoint.tensor("lm_head.weight", (512, 64), dtype=torch.float32, device=CPU)
    copy = tensor.clone()
    assert resident_bytes(whole) >= before + tensor.nbytes
    checkpoint.release()
    assert resident_bytes(whole) <= before
    assert torch.equal(tensor, copy)


def test_a_digest_brings_no_page_of_the_files_into_memory(whole: Path) -> None:
    before = resident_bytes(whole)
    checkpoint = Checkpoint(whole)
    assert checkpoint.digest()
    assert resident_bytes(whole) <= before


def test_a_sharded_checkpoint_has_the_same_tensors(whole: Path, tmp_path: Path) -> None:
    make_model(tmp_path, "llama", shard=True, with_tokenizer=False)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    one, many = Checkpoint(whole), Checkpoint(tmp_path)
    assert one.names == many.names
    for name, tensor in load_file(whole / "model.safetensors").items():
        assert torch.equal(many.tensor(name, tuple(tensor.shape), dtype=torch.float32, device=CPU), tensor)


def test_misaligned_tensors_are_read(tmp_path: Path) -> None:
    """The format allows headers of any length."""
    header = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    data = torch.tensor([1.5, -2.0]).numpy().tobytes()
    for padding in range(4):
        padded = header + b" " * padding
        (tmp_path / "model.safetensors").write_bytes(len(padded).to_bytes(8, "little") + padded + data)
        loaded = Checkpoint(tmp_path).tensor("x", (2,), dtype=torch.float32, device=CPU)
        assert loaded.tolist() == [1.5, -2.0]


def test_fingerprints_agree_on_copies_and_differ_on_anything_else(whole: Path, copy: Path) -> None:
    original = load(whole, name="m").fingerprint
    assert load(copy, name="m").fingerprint == original
    assert load(copy, name="m", dtype="bfloat16").fingerprint != original
    assert load(copy, name="m", block_tokens=32).fingerprint != original

    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 20_000.0
    (copy / "config.json").write_text(json.dumps(config))
    assert load(copy, name="m").fingerprint != original


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_fingerprints_see_one_changed_weight_of_a_small_model(whole: Path, copy: Path, name: str) -> None:
    before = Checkpoint(whole).digest()
    assert Checkpoint(copy).digest() == before

    def change(tensors) -> None:
        tensors[name].view(-1)[37] += 1e-3

    edit(copy, change)
    assert Checkpoint(copy).digest() != before


def test_the_digest_of_a_large_tensor_samples_all_of_it(tmp_path: Path) -> None:
    digests = set()
    for position in range(0, 2**20, 2**17):
        values = torch.zeros(2**20)
        values[position : position + 2**17] = 1.0
        save_file({"x": values}, tmp_path / "model.safetensors")
        digests.add(Checkpoint(tmp_path).digest())
    assert len(digests) == 8


def refused(folder: Path) -> str:
    with pytest.raises(SetupError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_files(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    assert "no model.safetensors" in refused(copy)
    index = copy / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "model-00002-of-00002.safetensors"}}')
    assert "names model-00002-of-00002.safetensors, which is not in" in refused(copy)
    index.write_text('{"weight_map": {"x": "../elsewhere.safetensors"}}')
    assert "names elsewhere.safetensors, which is not in" in refused(copy)
    for text in ("{", "[]", "{}", '{"weight_map": 3}'):
        index.write_text(text)
        assert "is not a safetensors index" in refused(copy)


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1, -5000])
def test_truncated_files(copy: Path, keep: int) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "truncated" in refused(copy)


def test_garbage_instead_of_a_header(copy: Path) -> None:
    file = copy / "model.safetensors"
    for header in (b"not json", b"[1, 2]", b'{"x": 3}', b'{"x": {"dtype": "F32", "shape": [2]}}'):
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        assert "is not a safetensors file" in refused(copy)
    lies = b'{"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}'
    file.write_bytes(len(lies).to_bytes(8, "little") + lies + bytes(8))
    assert "shape (3,) of F32 is not 8 bytes" in refused(copy)


def test_missing_wrong_and_quantised_tensors(copy: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit(copy, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    assert f"{name} has shape [127, 64], config.json asks for [128, 64]" in refused(copy)
    edit(copy, lambda tensors: tensors.update({name: torch.zeros(128, 64, dtype=torch.int8)}))
    assert f"{name} is I8" in refused(copy)
    edit(copy, lambda tensors: tensors.pop(name))
    assert f"has no tensor {name}" in refused(copy)


def test_a_pool_too_small_for_one_block_names_the_numbers(whole: Path) -> None:
    with pytest.raises(SetupError, match=r"kv_bytes=1000 holds no KV block.* 16 tokens has 8192 bytes"):
        load(whole, kv_bytes=1000)


def test_a_pool_larger_than_memory_is_refused(whole: Path) -> None:
    with pytest.raises(SetupError, match=r"does not fit: cpu has \d+ bytes free"):
        load(whole, kv_bytes=2**50)


def test_more_context_than_the_model_has_is_refused(whole: Path) -> None:
    assert load(whole, context_tokens_max=100).max_model_tokens == 100
    assert load(whole).max_model_tokens == 8192
    assert load(whole, kv_bytes=10 * 8192).max_model_tokens == 160
    with pytest.raises(SetupError, match=r"context_tokens_max=8193"):
        load(whole, context_tokens_max=8193)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta"])
def test_devices_that_do_not_exist(whole: Path, device: str) -> None:
    with pytest.raises(SetupError, match=device):
        load(whole, device=device)


def test_names_of_models(whole: Path, monkeypatch) -> None:
    assert resolve_model(str(whole)) == whole
    assert load(whole).model_name == "whole"
    assert load(whole, name="chat").model_name == "chat"
    with pytest.raises(SetupError, match="no model given"):
        resolve_model("")
    for missing in ("/nowhere/at/all", "./nowhere", "~/nowhere", "a/b/c", "nowhere"):
        with pytest.raises(SetupError, match="does not exist"):
            resolve_model(missing)
    with pytest.raises(SetupError, match="is a file"):
        resolve_model(str(whole / "config.json"))


def test_hub_errors_are_one_line(monkeypatch) -> None:
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    response = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co/a/b"))
    for error, says in (
        (LocalEntryNotFoundError("offline\nmore"), "cannot be reached"),
        (RepositoryNotFoundError("404: no such thing\n\nmore", response=response), "no such thing"),
    ):

        def fail(*args, error=error, **options):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(SetupError, match=says) as caught:
            resolve_model("some/model")
        assert "\n" not in str(caught.value)
    with pytest.raises(SetupError):
        resolve_model("some model/with spaces")
