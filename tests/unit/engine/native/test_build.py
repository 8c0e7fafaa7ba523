import ctypes
import os
import stat
import threading

import pytest

from engine.native import build as build_module
from engine.native.build import NativeUnavailable, build, is_anything_built
from engine.native.classes import CLASSES, candidates
from engine.native.library import features, library, set_threads


@pytest.fixture(autouse=True)
def nothing_ahead(monkeypatch, tmp_path):
    """The tests here are of the cache: what was compiled ahead in this checkout does not come before it."""
    monkeypatch.setattr(build_module, "AHEAD_FOLDER", tmp_path / "none")


def summed(task_count):
    sums = (ctypes.c_int64 * 8)()
    library().baton_sum_tasks(ctypes.c_int64(task_count), sums)
    return sum(sums)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_task_runs_exactly_once(threads):
    set_threads(threads)
    try:
        for count in (0, 1, 2, 7, 1000, *range(3, 300)):
            assert summed(count) == count * (count + 1) // 2
    finally:
        set_threads(1)


def test_threads_may_change_while_others_compute():
    stop = threading.Event()
    wrong = []

    def compute():
        while not stop.is_set():
            if summed(200) != 20100:
                wrong.append(1)

    callers = [threading.Thread(target=compute) for _ in range(2)]
    for caller in callers:
        caller.start()
    for count in (2, 3, 1) * 200:  # a helper that sleeps through its end is seen once in some hundreds
        set_threads(count)
    stop.set()
    for caller in callers:
        caller.join()
    set_threads(1)
    assert not wrong


def test_a_forked_child_computes_alone():
    set_threads(2)
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if summed(100) == 5050 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert summed(100) == 5050
    finally:
        set_threads(1)


def test_the_library_names_its_code_path():
    assert features() in [one.name for one in CLASSES]


def test_a_second_build_finds_the_first():
    first = build(candidates()[0])
    written = first.stat().st_mtime_ns
    assert build(candidates()[0]) == first
    assert first.stat().st_mtime_ns == written


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler.*/nonexistent"):
        build(candidates()[0])


def test_a_failing_compiler_shows_its_log_and_leaves_nothing(monkeypatch, tmp_path):
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo v1 && exit 0\necho broken >&2\nexit 1\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    with pytest.raises(NativeUnavailable, match="could not compile") as caught:
        build(candidates()[0])
    assert "broken" in caught.value.log
    assert not list((tmp_path / "native").glob("*.so"))


def test_changed_sources_get_a_new_name(monkeypatch, tmp_path):
    before = build_module._key(build_module.find_compiler(), ())
    (tmp_path / "a.cpp").write_text("int x;")
    monkeypatch.setattr(build_module, "SOURCES", tmp_path)
    assert build_module._key(build_module.find_compiler(), ()) != before


def test_an_empty_cache_gets_a_library_with_the_flags_that_were_asked_for(monkeypatch, tmp_path):
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return WANTED; }\n')
    (sources / "two.cpp").write_text('extern "C" int two() { return 2 * 3; }\n')
    monkeypatch.setattr(build_module, "SOURCES", sources)
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("BATON_NATIVE_FLAGS", "-O1 -DWANTED=7")
    made = build(candidates()[0])
    loaded = ctypes.CDLL(str(made))
    assert (loaded.one(), loaded.two()) == (7, 6)
    assert [path.suffix for path in made.parent.iterdir() if path.suffix != ".lock"] == [".so"]
    monkeypatch.setenv("BATON_NATIVE_FLAGS", "-O1 -DWANTED=8")
    assert ctypes.CDLL(str(build(candidates()[0]))).one() == 8


def test_a_first_start_is_known_by_its_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    assert not is_anything_built()
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "baton-0.lock").touch()
    assert not is_anything_built()
    (tmp_path / "native" / "baton-0.so").touch()
    assert is_anything_built()
