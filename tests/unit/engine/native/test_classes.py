"""Classes of kernels: which one is chosen, and that each computes what the others' tests say."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.core.geometry import KVGeometry
from baton.core.messages import INFO_NOTE
from engine.kernels import beside_torch
from engine.kernels.beside_torch import SLOW_BELOW, note_of, share_of_torch
from engine.kernels.native import NativeKernels
from engine.kernels.weights import DenseMatrix
from engine.kv.pool import KVPool
from engine.native import classes
from engine.native.build import NativeUnavailable, find_compiler
from engine.native.classes import CLASSES, candidates, processor_flags
from engine.native.library import features, library

HERE = Path(__file__).parent
ZEN4 = {
    "avx2",
    "fma",
    "f16c",
    "bmi2",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_bf16",
    "avx512vbmi",
}
ZEN4 |= {"avx512_vnni"}
RAPIDS = ZEN4 | {"amx_tile", "amx_bf16", "amx_int8"}
CASCADE = ZEN4 - {"avx512_bf16", "avx512vbmi"}
HASWELL = {"avx2", "fma", "f16c", "bmi2"}


def small_kernels():
    pool = KVPool(KVGeometry(1, 1, 8, 4, "bfloat16"), kv_bytes=2**16, device=torch.device("cpu"))
    return NativeKernels(pool, threads=1)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (RAPIDS, ["amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "generic"]),
        (ZEN4, ["avx512_bf16", "avx512_vnni", "avx512", "avx2", "generic"]),
        (CASCADE, ["avx512_vnni", "avx512", "avx2", "generic"]),
        (CASCADE - {"avx512_vnni"}, ["avx512", "avx2", "generic"]),
        (HASWELL, ["avx2", "generic"]),
        (set(), ["generic"]),
    ],
)
def test_the_fastest_class_of_the_processor_comes_first(monkeypatch, flags, expected):
    monkeypatch.delenv("BATON_CPU_CLASS", raising=False)
    monkeypatch.setattr(classes, "processor_flags", lambda: frozenset(flags))
    assert [one.name for one in candidates()] == expected


def test_a_class_may_be_forced(monkeypatch):
    monkeypatch.setattr(classes, "processor_flags", lambda: frozenset(ZEN4))
    for name in ("avx2", "amx-emulated", "generic"):
        monkeypatch.setenv("BATON_CPU_CLASS", name)
        assert [one.name for one in candidates()] == [name]


@pytest.mark.parametrize(
    ("asked", "said"), [("amx", "no amx_bf16, amx_int8, amx_tile"), ("sse", "choose one of amx, avx512_bf16")]
)
def test_a_class_that_cannot_run_is_refused(monkeypatch, asked, said):
    monkeypatch.setattr(classes, "processor_flags", lambda: frozenset(ZEN4))
    monkeypatch.setenv("BATON_CPU_CLASS", asked)
    library.cache_clear()
    try:
        with pytest.raises(NativeUnavailable, match=said):
            library()
    finally:
        library.cache_clear()


def test_without_tiles_from_the_system_the_next_class_is_taken(monkeypatch, caplog):
    from engine.native import library as library_module

    others = [one for one in candidates() if one.name != "amx"]
    refusing = [classes.CpuClass("amx", frozenset(), ()), *others]
    monkeypatch.setattr(library_module, "candidates", lambda: refusing)
    load = library_module._load

    def refuse(one):
        if one.name == "amx":
            raise NativeUnavailable("the operating system gives this process no AMX tiles")
        return load(one)

    monkeypatch.setattr(library_module, "_load", refuse)
    library.cache_clear()
    try:
        assert features() == refusing[1].name
        assert "no AMX tiles; trying" in caplog.text
    finally:
        library.cache_clear()


RUNNABLE = [one.name for one in CLASSES if one.needs <= processor_flags() and one != candidates()[0]]
"""All others are tested on the class that this machine takes."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RUNNABLE)
def test_other_classes_keep_every_promise(name):
    """Products beside float64, and bits in any company, by the kernels of another class."""
    if os.environ.get("BATON_CPU_CLASS") or os.environ.get("BATON_NATIVE_FLAGS"):
        pytest.skip("this is a run of one class")
    tests = ("test_products.py", "test_bytes.py", "test_attention.py", "test_classes.py")
    chosen = "quantised or bitwise or experts or definition or alone or chain or dense"
    if name == "generic":  # the whole attention without vector instructions of any processor
        chosen += " or plain or rotation or int8_is_rounded"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen]
        + [str(HERE / one) for one in tests],
        env={**os.environ, "BATON_CPU_CLASS": name},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def chain_of_tiles(x, weight):
    """The SDM's TDPBF16PS over tiles of 32 inputs, in float32: x [rows, k], weight [n, k]."""
    rows, inputs = x.shape
    total = np.zeros((rows, weight.shape[0]), np.float32)
    for start in range(0, inputs, 32):
        even, odd = np.zeros_like(total), np.zeros_like(total)
        for k in range(start, min(inputs, start + 32), 2):
            even = fused(x[:, k], weight[:, k], even)
            if k + 1 < inputs:
                odd = fused(x[:, k + 1], weight[:, k + 1], odd)
        total = total + (even + odd)
    return total


def fused(x, y, sum_):
    """x y + sum rounded once: a product of two bfloat16 is exact in float64, their sum nearly always."""
    return (np.multiply.outer(x.astype(np.float64), y.astype(np.float64)) + sum_).astype(np.float32)


def test_the_chain_of_tiles_is_the_manuals():
    if not features().startswith("amx"):
        pytest.skip("for kernels that use tiles")
    generator = torch.Generator().manual_seed(1)
    kernels = small_kernels()
    for inputs in (64, 77, 576):
        weight = torch.randn((96, inputs), generator=generator).bfloat16()
        x = torch.randn((40, inputs), generator=generator).bfloat16()
        found = kernels.logits(x, kernels.pack(DenseMatrix(weight))).numpy()
        expected = chain_of_tiles(x.float().numpy(), weight.float().numpy())
        assert np.array_equal(found, expected)


def test_tiles_take_denormals_for_zero():
    if not features().startswith("amx"):
        pytest.skip("for kernels that use tiles")
    kernels = small_kernels()
    tiny = torch.full((1, 32), 2.0**-130, dtype=torch.bfloat16)
    large = torch.full((64, 32), 2.0**100, dtype=torch.bfloat16)
    assert not kernels.logits(tiny, kernels.pack(DenseMatrix(large))).any()


def test_the_code_for_tiles_compiles_for_the_processors_that_have_them(tmp_path):
    source = classes.__file__.replace("classes.py", "src/multiply.cpp")
    flags = ["-std=c++17", "-O1", "-march=sapphirerapids", "-DBATON_AMX=1"]
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    if subprocess.run([find_compiler(), *flags, "-c", str(probe), "-o", str(tmp_path / "p.o")]).returncode:
        pytest.skip("a compiler that does not know AMX, or another architecture")
    assembly = tmp_path / "multiply.s"
    subprocess.run([find_compiler(), *flags, "-S", source, "-o", str(assembly)], check=True, timeout=300)
    for instruction in ("tdpbf16ps", "tdpbusd", "tileloadd", "tilestored", "ldtilecfg", "tilerelease"):
        assert instruction in assembly.read_text()


def test_the_worker_says_how_products_compare_with_torchs():
    slow, fast = note_of("avx2", SLOW_BELOW - 0.01), note_of("avx2", SLOW_BELOW)
    assert not slow.startswith(INFO_NOTE)
    assert "engine.kernels=torch" in slow
    assert fast.startswith(INFO_NOTE)
    assert "1.50 times" in note_of("amx", 1.5)
    assert share_of_torch(small_kernels()) > 0


@pytest.mark.parametrize(
    ("shares", "told", "warns"),
    [((0.5, 0.95), "0.95", False), ((0.5, 0.7, 0.6), "0.70", True), ((0.9,), "0.90", False)],
)
def test_a_worker_measures_again_before_it_warns(monkeypatch, shares, told, warns):
    left = list(shares)
    monkeypatch.setattr(beside_torch, "share_of_torch", lambda _: left.pop(0))
    (note,) = beside_torch.notes_beside_torch(small_kernels())
    assert not left
    assert f"{told} times" in note
    assert note.startswith(INFO_NOTE) is not warns


@pytest.mark.parametrize(("torch_s", "rounds"), [(0.06, 1), (0.03, beside_torch.ROUNDS)])
def test_one_round_is_enough_where_torch_is_far_behind(torch_s, rounds):
    clock, looks = [0.0], [0]

    def now():
        """Each round looks five times, of which the second ends our call and the fourth torch's."""
        looks[0] += 1
        clock[0] += {3: 0.01, 0: torch_s}.get(looks[0] % 5, 0.0)
        return clock[0]

    share = share_of_torch(small_kernels(), now=now)
    assert share == pytest.approx(torch_s / 0.01)
    assert looks[0] == 1 + 5 * rounds
