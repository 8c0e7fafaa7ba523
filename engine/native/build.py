"""Finds or makes the kernels' library: compiled ahead for a class, in this machine's cache, or compiled now.

In the cache, sources, compiler, flags and processor name a file. Of those compiled ahead, which lie in the
installation, it is class, sources and flags: none is loaded that other sources made.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from pathlib import Path

from baton.files.cache import cache_folder
from engine.native.ahead import AheadClass, ahead_classes
from engine.native.classes import CLASSES, CpuClass, processor_flags, processor_key

SOURCES = Path(__file__).parent / "src"
AHEAD_FOLDER = Path(__file__).parent / "compiled"
"""Libraries that `python -m engine.native --ahead` made for this installation."""
_FLAGS_VARIABLE = "BATON_NATIVE_FLAGS"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
"""No -ffast-math: it would let the compiler reorder sums, which batch invariance forbids. Contraction is off
for the same reason: whether a product and a sum become one instruction must not depend on the loop around."""
_COMPILE_TIMEOUT_S = 300.0
_LOG_LINES = 40


class NativeUnavailable(Exception):
    """The native kernels cannot run here. The message is one line that says why; `log` is what the
    compiler said, if it was asked."""

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.log = log


def build(cpu_class: CpuClass) -> Path:
    """The shared library's file for this class of processors: one compiled ahead, or this machine's own.

    Raises NativeUnavailable.
    """
    return find_ahead(cpu_class) or build_here(cpu_class)


def find_ahead(cpu_class: CpuClass) -> Path | None:
    """The library of this class that was compiled ahead from the present sources, if there is one and this
    processor has all that it may use. `BATON_NATIVE_FLAGS` asks for other flags than its."""
    if _FLAGS_VARIABLE in os.environ or not AHEAD_FOLDER.is_dir():
        return None
    here = processor_flags()
    for one in ahead_classes():
        if one.name == cpu_class.name and one.needs <= here:
            file = AHEAD_FOLDER / _ahead_name(one)
            return file if file.is_file() else None
    return None


def build_here(cpu_class: CpuClass) -> Path:
    """The library that this machine compiled for itself, compiled now if the cache does not have it.

    Raises NativeUnavailable.
    """
    compiler = find_compiler()
    flags = _flags(cpu_class)
    target = _cache_folder() / f"baton-{_key(compiler, flags)}.so"
    if target.is_file():
        return target
    with _locked(target.with_suffix(".lock")):
        if not target.is_file():  # else another worker was faster
            with ThreadPoolExecutor(os.cpu_count() or 1) as runner:
                _compile(compiler, flags, target, runner)
    return target


def compile_ahead(folder: Path, say: Callable[[str], None]) -> bool:
    """Compile every class for all its processors into the folder, all cores at work, and say a line of each.
    False: the compiler cannot compile some of them.

    Raises NativeUnavailable: there is no compiler, or the folder cannot be made or written.
    """
    compiler, began_s, is_complete = find_compiler(), time.monotonic(), True
    _make_folder(folder, "choose another folder")
    if not os.access(folder, os.W_OK):
        raise NativeUnavailable(f"cannot write {folder} (choose another folder)")
    classes = ahead_classes()
    with ThreadPoolExecutor(os.cpu_count() or 1) as runner, ThreadPoolExecutor(len(classes)) as libraries:
        started = {
            libraries.submit(
                _compile, compiler, (*_FLAGS, *one.flags), folder / _ahead_name(one), runner
            ): one
            for one in classes
        }
        try:
            for done in as_completed(started):
                name, after_s = started[done].name, time.monotonic() - began_s
                try:
                    done.result()
                    say(f"{name}: compiled after {after_s:.0f} s")
                except NativeUnavailable as error:
                    is_complete = False
                    say("\n".join(filter(None, (f"{name}: {error}", error.log))))
        except BaseException:  # Ctrl-C: nothing more is begun
            runner.shutdown(wait=False, cancel_futures=True)
            raise
    return is_complete


def is_anything_built() -> bool:
    """Whether there are kernels of some class: in the cache, or compiled ahead for this processor."""
    is_cached = any(cache_folder("native").glob("*.so"))
    return is_cached or any(find_ahead(one) for one in CLASSES)


def find_compiler() -> str:
    """$CXX or the first of c++, g++, clang++. Raises NativeUnavailable."""
    asked = os.environ.get("CXX", "").strip()
    for name in (asked,) if asked else _COMPILERS:
        if path := shutil.which(name):
            return path
    raise NativeUnavailable(
        f"no C++ compiler: {'$CXX is ' + asked if asked else 'none of ' + ', '.join(_COMPILERS)}, not found"
    )


def _cache_folder() -> Path:
    folder = cache_folder("native")
    _make_folder(folder, "set BATON_CACHE_DIR")
    return folder


def _make_folder(folder: Path, otherwise: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NativeUnavailable(f"cannot write {folder}: {error.strerror} ({otherwise})") from error


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    return _digest(*flags, compiler, _version(compiler), processor_key(), sys.platform)


def _ahead_name(one: AheadClass) -> str:
    key = _digest(*_FLAGS, *one.flags, platform.machine(), sys.platform)
    return f"baton-{one.name}-{key}.so"


def _digest(*parts: str) -> str:
    """Names the sources and these parts."""
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{compiler} --version failed: {error}") from error
    return done.stdout


def _flags(cpu_class: CpuClass) -> tuple[str, ...]:
    """`BATON_NATIVE_FLAGS` replaces what the class asks for."""
    replaced = os.environ.get(_FLAGS_VARIABLE)
    return (*_FLAGS, *(cpu_class.flags if replaced is None else replaced.split()))


@contextmanager
def _locked(path: Path) -> Generator[None]:
    try:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise NativeUnavailable(f"cannot lock {path}: {error.strerror}") from error


def _compile(compiler: str, flags: tuple[str, ...], target: Path, runner: Executor) -> None:
    """The largest sources are begun first: one of them begun last would keep a single core busy."""
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: path.stat().st_size, reverse=True)
        objects = [Path(work) / f"{source.stem}.o" for source in sources]
        compilations = [
            runner.submit(_run, [compiler, *flags, "-Wall", "-c", str(source), "-o", str(obj)])
            for source, obj in zip(sources, objects, strict=True)
        ]
        try:
            for one in compilations:
                one.result()
        finally:  # after a failure nothing more is begun, and nobody writes into the folder that is removed
            wait([one for one in compilations if not one.cancel()])
        linked = Path(work) / target.name
        _run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(linked)])
        linked.replace(target)  # atomic: a reader sees all of it or none


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        log = "\n".join(done.stderr.splitlines()[:_LOG_LINES])
        raise NativeUnavailable(f"{command[0]} could not compile the kernels (status {done.returncode})", log)
