"""Compiles the kernels once per machine: sources + compiler + processor name the file in the cache."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from baton.files.cache import cache_folder
from engine.native.classes import CpuClass, processor_key

SOURCES = Path(__file__).parent / "src"
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
    """The shared library's file for this class of processors, compiled now if the cache does not have it.

    Raises NativeUnavailable.
    """
    compiler = find_compiler()
    flags = _flags(cpu_class)
    target = _cache_folder() / f"baton-{_key(compiler, flags)}.so"
    if target.is_file():
        return target
    with _locked(target.with_suffix(".lock")):
        if not target.is_file():  # else another worker was faster
            _compile(compiler, flags, target)
    return target


def is_anything_built() -> bool:
    """Whether the cache has kernels of some class and version."""
    return any(cache_folder("native").glob("*.so"))


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
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NativeUnavailable(f"cannot write {folder}: {error.strerror} (set BATON_CACHE_DIR)") from error
    return folder


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (*flags, compiler, _version(compiler), processor_key(), sys.platform):
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
    replaced = os.environ.get("BATON_NATIVE_FLAGS")
    return (*_FLAGS, *(cpu_class.flags if replaced is None else replaced.split()))


@contextmanager
def _locked(path: Path) -> Generator[None]:
    try:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise NativeUnavailable(f"cannot lock {path}: {error.strerror}") from error


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(work) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *flags, "-Wall", "-c", str(source), "-o", str(obj)]
            for source, obj in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as runner:
            list(runner.map(_run, commands))
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
