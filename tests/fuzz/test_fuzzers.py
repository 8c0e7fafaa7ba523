"""A short run of every fuzzer, with the same inputs each time. docs/contributing.md has the long ones."""

import importlib
import random

import pytest

from tests.fuzz import harness

FUZZERS = {
    "config_files": 1000,
    "dashboard": 1500,
    "gguf": 1000,
    "kv_server": 150,
    "safetensors": 1500,
    "templates": 150,
    "trace_files": 1500,
    "wire": 3000,
}
"""Inputs of one run, by fuzzer."""


@pytest.mark.parametrize("name", FUZZERS)
def test_damaged_input_is_refused_and_nothing_worse(name):
    fuzzer = importlib.import_module(f"tests.fuzz.{name}").load()
    assert harness.run_plain(fuzzer, seed=7, count=FUZZERS[name], is_timed=False) >= FUZZERS[name]


def test_a_fuzzer_finds_what_is_wrong_and_keeps_the_input(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "FOUND", tmp_path)

    def check(content):
        assert b"\xff\xff" not in content

    with pytest.raises(AssertionError):
        harness.run_plain(harness.Fuzzer("gguf", check), seed=1, count=5000, is_timed=False)
    (kept,) = tmp_path.iterdir()
    assert b"\xff\xff" in kept.read_bytes()


def test_inputs_depend_on_the_seed_alone():
    def drawn(seed):
        rng = random.Random(seed)
        return [harness.mutated(b"some bytes", [b"others"], [b"word"], rng) for _ in range(100)]

    assert drawn(3) == drawn(3) != drawn(4)
