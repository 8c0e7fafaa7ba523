"""Runs the tests of the C++ kernels under the sanitizers of addresses and of undefined behaviour.

`make sanitize`, or `python -m tests.sanitize [pytest's arguments]`. It needs GCC with libasan and libubsan,
builds into a cache of its own, and takes about a minute. A finding ends the run with the sanitizer's report.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from engine.native.build import find_compiler

LIBRARIES = ("libasan.so", "libubsan.so")
FLAGS = (
    *("-march=native", "-O1", "-g", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
)
TESTS = (
    "tests/unit/engine/native",
    "tests/unit/engine/parallel",
    "tests/unit/engine/test_kernels.py",
    "tests/unit/engine/test_remote_experts.py",
)


def environment(cache: Path) -> dict[str, str]:
    """The environment of a process whose kernels are sanitized. The interpreter is not built so, hence the
    libraries must be loaded before it begins."""
    compiler = find_compiler()
    found = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in LIBRARIES
    ]
    return {
        **os.environ,
        "BATON_CACHE_DIR": str(cache),
        "BATON_NATIVE_FLAGS": " ".join(FLAGS),
        "LD_PRELOAD": " ".join(one.stdout.strip() for one in found),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps what it has until it ends
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def main(arguments: list[str]) -> int:
    cache = Path(tempfile.gettempdir()) / f"baton-sanitize-{os.getuid()}"
    command = [sys.executable, "-m", "pytest", "-q", "-x", *(arguments or TESTS)]
    return subprocess.run(command, env=environment(cache)).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
