"""Kernels compiled ahead: which library is taken, what it may use, and that it computes the same bits."""

import ctypes
import os
import platform
import re
import subprocess
import sys

import pytest

from baton.files.cache import cache_folder
from engine.native import __main__ as command
from engine.native import build as build_module
from engine.native import library as library_module
from engine.native.ahead import AheadClass, ahead_classes
from engine.native.build import (
    SOURCES,
    NativeUnavailable,
    build,
    build_here,
    compile_ahead,
    find_ahead,
    find_compiler,
    is_anything_built,
)
from engine.native.classes import CLASSES, candidates, processor_flags

X86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have plain loops only")
PLAIN = next(one for one in CLASSES if one.name == "generic")
AHEAD_PLAIN = next(one for one in ahead_classes() if one.name == "generic")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A source of one function, an installation and a cache of the test's own."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int baton_start() { return 0; }\n')
    monkeypatch.setattr(build_module, "SOURCES", sources)
    monkeypatch.setattr(build_module, "AHEAD_FOLDER", tmp_path / "compiled")
    monkeypatch.setattr(build_module, "ahead_classes", lambda: (AHEAD_PLAIN,))
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("BATON_NATIVE_FLAGS", raising=False)
    return tmp_path


@pytest.fixture
def compiled(small, monkeypatch):
    """The same with kernels compiled ahead, and no compiler from then on."""
    assert compile_ahead(small / "compiled", lambda line: None)
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    return small


def test_what_was_compiled_ahead_needs_neither_compiler_nor_cache(compiled):
    file = build(PLAIN)
    assert file.parent == compiled / "compiled"
    assert ctypes.CDLL(str(file)).baton_start() == 0
    assert not (compiled / "cache").exists()
    assert is_anything_built()


def test_it_comes_before_the_cache(small):
    here = build_here(PLAIN)
    assert here.parent == small / "cache/native"
    assert build(PLAIN) == here
    compile_ahead(small / "compiled", lambda line: None)
    assert build(PLAIN).parent == small / "compiled"


def test_other_sources_or_flags_do_not_find_it(compiled, monkeypatch):
    assert find_ahead(PLAIN)
    with monkeypatch.context() as patch:
        changed = AheadClass("generic", frozenset(), ("-O1",))
        patch.setattr(build_module, "ahead_classes", lambda: (changed,))
        assert not find_ahead(PLAIN)
    assert find_ahead(PLAIN)
    (compiled / "src/one.cpp").write_text('extern "C" int baton_start() { return 1; }\n')
    assert not find_ahead(PLAIN)


def test_a_processor_that_lacks_a_flag_does_not_load_it(compiled, monkeypatch):
    asking = AheadClass("generic", frozenset({"an_instruction"}), AHEAD_PLAIN.flags)
    monkeypatch.setattr(build_module, "ahead_classes", lambda: (asking,))
    assert not find_ahead(PLAIN)
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler"):
        build(PLAIN)
    monkeypatch.setattr(build_module, "processor_flags", lambda: frozenset({"an_instruction", "another"}))
    assert find_ahead(PLAIN)


def test_flags_that_are_asked_for_are_compiled(compiled, monkeypatch):
    monkeypatch.setenv("BATON_NATIVE_FLAGS", "")
    assert not find_ahead(PLAIN)
    monkeypatch.delenv("CXX")
    assert build(PLAIN).parent == compiled / "cache/native"


def test_a_file_that_cannot_be_loaded_is_compiled_here(compiled, monkeypatch, caplog):
    build(PLAIN).write_bytes(b"of another machine")
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler"):
        library_module._load(PLAIN)
    monkeypatch.delenv("CXX")
    with pytest.raises(AttributeError, match="baton_features"):  # loaded: the test's library has no more
        library_module._load(PLAIN)
    assert "cannot be loaded, and are compiled here" in caplog.text
    assert list((compiled / "cache/native").glob("*.so"))


def test_a_class_that_the_compiler_does_not_know_is_said_and_the_others_are_there(small, monkeypatch):
    strange = AheadClass("strange", frozenset(), ("-march=no-such-processor",))
    monkeypatch.setattr(build_module, "ahead_classes", lambda: (strange, AHEAD_PLAIN))
    lines = []
    assert not compile_ahead(small / "compiled", lines.append)
    assert [line.partition(":")[0] for line in sorted(lines)] == ["generic", "strange"]
    assert any("could not compile" in line and "no-such-processor" in line for line in lines)
    assert [path.name.split("-")[1] for path in (small / "compiled").iterdir()] == ["generic"]


def test_the_command_compiles_for_this_processor_or_for_all(small, monkeypatch, capsys):
    monkeypatch.setattr(command, "candidates", lambda: (PLAIN,))
    assert command.main([]) == 0
    assert "of class generic" in capsys.readouterr().out
    assert list((small / "cache/native").glob("*.so"))
    assert command.main(["--ahead", str(small / "elsewhere")]) == 0
    assert re.fullmatch(r"generic: compiled after \d+ s\n", capsys.readouterr().out)
    assert len(list((small / "elsewhere").glob("baton-generic-*.so"))) == 1


def test_the_command_says_what_is_missing(small, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("BATON_CPU_CLASS", "generic")
    for arguments in ([], ["--ahead", str(small / "elsewhere")]):
        assert command.main(arguments) == 1
        assert "no C++ compiler" in capsys.readouterr().err
    monkeypatch.delenv("CXX")
    assert command.main(["--ahead", "/proc/nowhere"]) == 1
    assert "cannot write /proc/nowhere" in capsys.readouterr().err
    monkeypatch.setenv("BATON_CPU_CLASS", "sse")
    assert command.main([]) == 1
    assert "choose one of" in capsys.readouterr().err


@X86_64
def test_every_class_but_the_emulated_one_is_compiled_ahead():
    assert [one.name for one in ahead_classes()] == [one.name for one in CLASSES if not one.is_emulated]
    for one, ahead in zip(CLASSES, ahead_classes(), strict=False):
        assert one.needs <= ahead.needs
        assert not any("native" in flag for flag in ahead.flags)


def test_machines_of_other_kinds_have_plain_loops(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert ahead_classes() == (AheadClass("generic", frozenset(), ()),)


@X86_64
@pytest.mark.parametrize("one", ahead_classes(), ids=lambda one: one.name)
def test_flags_choose_the_code_of_the_class(one):
    shown = preprocessed(one.flags, str(SOURCES / "runtime.cpp"))
    assert re.search(r'baton_features\(\) \{\s*(?:#.*\s*)*return "([^"]+)";', shown)[1] == one.name
    if one.name == "amx":  # as on every known processor of the class
        assert "#define BATON_SCALED 1" in preprocessed((*one.flags, "-dD"), str(SOURCES / "dot_tile.h"))


MACROS = {
    "abm": "LZCNT",
    "bmi1": "BMI",
    "lahf_lm": "LAHF_SAHF",
    "pni": "SSE3",
    "cx16": "GCC_HAVE_SYNC_COMPARE_AND_SWAP_16",
}
"""Names of the compiler that are not those of /proc/cpuinfo, without underscores around and within."""
BESIDE = ("BIGGEST_ALIGNMENT", "FLT_EVAL_METHOD", "FP_FAST", "tune_", "BATON_")
"""Macros that are no instructions."""


@X86_64
@pytest.mark.parametrize("one", ahead_classes(), ids=lambda one: one.name)
def test_the_compiler_may_use_nothing_that_the_processor_is_not_asked_for(one):
    plain = preprocessed(("-march=x86-64", "-dM"), "/dev/null")
    macros = set(preprocessed((*one.flags, "-dM"), "/dev/null").splitlines()) - set(plain.splitlines())
    names = {line.split()[1].strip("_") for line in macros}
    used = {name for name in names if not name.startswith(BESIDE)} - {"CRC32"}  # a part of SSE4.2
    asked = {MACROS.get(flag, flag.upper().replace("AVX512_", "AVX512")) for flag in one.needs}
    assert used <= asked


def preprocessed(flags, file):
    command = [find_compiler(), "-std=c++17", *flags, "-E", "-x", "c++", file]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("the compiler does not know the class")
    return done.stdout


@pytest.mark.timeout(900)
def test_ahead_and_here_the_same_bits_are_computed(monkeypatch):
    """The library is kept in the cache, as all are that tests compile: only the first run takes a minute."""
    if os.environ.get("BATON_CPU_CLASS") or os.environ.get("BATON_NATIVE_FLAGS"):
        pytest.skip("this is a run of one class")
    best = candidates()[0]
    mine = [one for one in ahead_classes() if one.name == best.name and one.needs <= processor_flags()]
    if not mine:
        pytest.skip("this processor compiles for itself alone")
    folder = cache_folder("native") / "ahead"
    monkeypatch.setattr(build_module, "ahead_classes", lambda: tuple(mine))
    if not (folder / build_module._ahead_name(mine[0])).is_file():
        assert compile_ahead(folder, lambda line: None)
    assert bits(folder) == bits(folder / "none").replace("here", "ahead")


def bits(folder):
    command = [sys.executable, "-m", "tests.unit.engine.native.bits", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
