"""`engine.kernels` and what becomes of it."""

import logging

import pytest
import torch

from baton.config import EngineConfig
from baton.core.errors import SetupError
from baton.core.geometry import KVGeometry
from baton.core.messages import INFO_NOTE
from engine.kernels.choose import make_kernels
from engine.kernels.native import NativeKernels
from engine.kernels.torch_ref import TorchKernels
from engine.kv.pool import KVPool


def chosen(kernels, dtype="bfloat16", notes=None):
    pool = KVPool(KVGeometry(1, 1, 8, 4, dtype), kv_bytes=2**16, device=torch.device("cpu"))
    tell = (lambda note: None) if notes is None else notes.append
    return make_kernels(EngineConfig(kernels=kernels, threads=1), pool, tell=tell)


@pytest.mark.parametrize("asked", ["auto", "native"])
def test_native_on_the_cpu(asked, caplog):
    caplog.set_level(logging.INFO)
    notes = []
    assert isinstance(chosen(asked, notes=notes), NativeKernels)
    (note,) = notes
    assert note.startswith(INFO_NOTE + "kernels: native (")
    assert "kernels: native" in caplog.text
    assert "threads: 1" in caplog.text


def test_torch_when_asked_for():
    notes = []
    assert isinstance(chosen("torch", notes=notes), TorchKernels)
    assert notes == [INFO_NOTE + "kernels: torch, as asked for"]


@pytest.fixture
def without_compiler(monkeypatch):
    from engine.kernels import native
    from engine.native import library

    monkeypatch.setenv("CXX", "/nonexistent/c++")
    library.library.cache_clear()
    native._functions.cache_clear()
    yield
    library.library.cache_clear()
    native._functions.cache_clear()


def test_auto_falls_back_to_torch_and_says_why(without_compiler, caplog):
    notes = []
    assert isinstance(chosen("auto", notes=notes), TorchKernels)
    (note,) = notes
    assert note.startswith("kernels: torch, slower, because")
    assert "/nonexistent/c++" in note
    assert "slower, because" in caplog.text
    assert "/nonexistent/c++" in caplog.text


def test_native_asked_for_and_not_to_be_had(without_compiler):
    with pytest.raises(SetupError, match=r"engine.kernels=native.*/nonexistent"):
        chosen("native")


def test_native_has_no_float16(caplog):
    assert isinstance(chosen("auto", "float16"), TorchKernels)
    with pytest.raises(SetupError, match="bfloat16 and float32"):
        chosen("native", "float16")
