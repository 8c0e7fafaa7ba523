"""Experts are copied from the memory of other ranks, with the same bits, and else read from the files."""

import ctypes
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton.config import ModelConfig
from baton.config.experts import ExpertsConfig
from baton.core.errors import PeerFailure, SetupError
from engine.experts.copies import fetch_image
from engine.experts.memory import ExpertMemory, RankFull
from engine.kernels.native_matrices import _sections
from tests.expert_ranks import LocalExperts
from tests.models import Kind, make_model
from tests.unit.engine.test_divided_models import GENERATED
from tests.unit.engine.test_families import prompt
from tests.unit.engine.test_remote_experts import connected

PROMPTS = [prompt(36), prompt(70)]


def made(tmp_path: Path, kind: Kind = "qwen3_moe", **fields: Any) -> Path:
    return make_model(tmp_path / "model", kind, with_tokenizer=False, **fields)


def sections(experts: LocalExperts, name: str, expert: int) -> list[bytes]:
    """What kernels read of an expert."""
    held = experts.ranks[name]._held[expert]
    found = [one for matrix in (held.gate_up, held.down) for one in _sections(matrix)]
    return [ctypes.string_at(start, size) for start, size in found if size]


def copied(experts: LocalExperts) -> list[bool]:
    """Have b load all that a has, as copies; returns which of them were."""
    found = [experts.ranks["b"].load_expert(n, experts.refs["a"]) for n in experts.everything()]
    experts.map = {"b": experts.everything()}
    return found


@pytest.mark.parametrize(
    ("fields", "model"),
    [
        ({}, {}),
        ({"dtype": "bfloat16"}, {}),
        ({"dtype": "bfloat16"}, {"quantization": "int8"}),
    ],
)
def test_a_copy_has_the_bits_of_the_original_and_needs_no_files(
    tmp_path: Path, fields: dict[str, Any], model: dict[str, Any]
) -> None:
    """The files are gone when the copies are made."""
    folder = made(tmp_path, **fields)
    experts = LocalExperts(folder, model=ModelConfig(path=str(folder), **model))
    try:
        experts.announce({"a": experts.everything()})
        first = [connected(experts, folder, **model).generate(tokens, GENERATED) for tokens in PROMPTS]
        hidden = tmp_path / "elsewhere"
        shutil.copytree(folder, hidden)
        for file in folder.glob("*.safetensors"):
            file.unlink()
        experts.ranks["b"]._bank.load = None  # nothing can be read
        assert all(copied(experts))
        for expert in experts.everything():
            assert sections(experts, "a", expert) == sections(experts, "b", expert)
        experts.ranks["a"].close()
        experts.tell()
        folder.joinpath("model.safetensors").symlink_to(hidden / "model.safetensors")
        second = [connected(experts, folder, **model).generate(tokens, GENERATED) for tokens in PROMPTS]
        assert second == first
    finally:
        experts.close()


def test_experts_of_another_form_than_the_first_are_read_from_the_files(tmp_path: Path) -> None:
    """Some matrices of four bits have zeros of their own, for which an image of the others has no place."""
    folder, rounded = made(tmp_path, dtype="bfloat16"), {"quantization": "int4"}
    experts = LocalExperts(folder, model=ModelConfig(path=str(folder), **rounded))
    try:
        experts.announce({"a": experts.everything()})
        bank = experts.ranks["a"]._bank
        alike = [bank.kind_of(experts.ranks["a"]._held[n]) == bank.image_kind for n in experts.everything()]
        first = [connected(experts, folder, **rounded).generate(tokens, GENERATED) for tokens in PROMPTS]
        assert copied(experts) == alike
        experts.tell()
        second = [connected(experts, folder, **rounded).generate(tokens, GENERATED) for tokens in PROMPTS]
        assert second == first
    finally:
        experts.close()


def test_a_copy_of_a_copy_is_the_original(tmp_path: Path) -> None:
    experts = LocalExperts(made(tmp_path), ("a", "b", "c"))
    try:
        assert not experts.ranks["a"].load_expert(3)
        assert experts.ranks["b"].load_expert(3, experts.refs["a"])
        assert experts.ranks["c"].load_expert(3, experts.refs["b"])
        assert sections(experts, "a", 3) == sections(experts, "c", 3)
    finally:
        experts.close()


@pytest.mark.parametrize("why", ["not held", "wrong secret", "nobody there", "files only", "biases"])
def test_what_cannot_be_copied_is_read_from_the_files(tmp_path: Path, why: str) -> None:
    kind: Kind = "gpt_oss" if why == "biases" else "qwen3_moe"
    config = ExpertsConfig(copies="files" if why == "files only" else "peers")
    experts = LocalExperts(made(tmp_path, kind), config=config)
    try:
        if why != "not held":
            experts.ranks["a"].load_expert(1)
        ref = experts.refs["a"]
        if why == "wrong secret":
            ref = msgspec.structs.replace(ref, secret="another")
        if why == "nobody there":
            experts.ranks["a"].close()
        assert not experts.ranks["b"].load_expert(1, ref)
        assert experts.ranks["b"].held == (1,)
    finally:
        experts.close()


def test_an_image_of_another_kind_is_refused(tmp_path: Path) -> None:
    experts = LocalExperts(made(tmp_path))
    try:
        experts.ranks["a"].load_expert(1)
        size = experts.ranks["a"]._bank.image_bytes
        with pytest.raises(PeerFailure, match="not avx9000"):
            fetch_image(experts.refs["a"], 1, "avx9000", size, bytes_per_s=1e9, caller="b")
        kind = experts.ranks["a"]._bank.image_kind
        with pytest.raises(PeerFailure, match="bytes"):
            fetch_image(experts.refs["a"], 1, kind, size + 1, bytes_per_s=1e9, caller="b")
    finally:
        experts.close()


def test_a_copy_keeps_to_its_bytes_per_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = LocalExperts(made(tmp_path))
    waits: list[float] = []
    try:
        experts.ranks["a"].load_expert(1)
        bank = experts.ranks["a"]._bank
        monkeypatch.setattr("engine.experts.copies.CHUNK_BYTES", max(1, bank.image_bytes // 8))
        monkeypatch.setattr("engine.experts.copies.sleep", waits.append)
        fetch_image(experts.refs["a"], 1, bank.image_kind, bank.image_bytes, bytes_per_s=1.0, caller="b")
    finally:
        monkeypatch.undo()
        experts.close()
    paced = [wait for wait in waits if wait > bank.image_bytes / 16]
    assert len(paced) >= 6  # every chunk but the first waits for the bytes before it


def test_a_rank_without_memory_says_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    experts = LocalExperts(made(tmp_path), ("a",))
    try:
        rank = experts.ranks["a"]
        rank._memory = ExpertMemory(
            2.5 * rank.expert_bytes, expert_bytes=rank.expert_bytes, device=torch.device("cpu")
        )
        rank.load_expert(0)
        rank.load_expert(1)
        with pytest.raises(RankFull, match=r"experts\.memory_bytes"):
            rank.load_expert(2)
        assert rank.held == (0, 1)
        rank.drop_expert(0)
        rank.load_expert(2)
    finally:
        experts.close()


def test_the_machine_s_memory_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [10_000]
    monkeypatch.setattr(ExpertMemory, "_left", lambda self: left[0])
    memory = ExpertMemory(0.0, expert_bytes=1000, device=torch.device("cpu"))
    assert memory.slots_max(2, 64) == 4  # two of ten are for exchanges
    assert memory.slots_max(1, 4) == 4
    assert memory.slots_max(64, 64) == 1
    memory.check(100)
    left[0] = 999
    with pytest.raises(SetupError, match="too little for another expert"):
        memory.check(0)
