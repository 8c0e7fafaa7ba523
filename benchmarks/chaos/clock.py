"""Steps the wall clock of a host: a library that its processes load adds an offset to the kernel's time."""

import os
import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock_shim.cpp")
_NANOSECONDS = 1_000_000_000


class Clocks:
    """The wall clocks of all hosts. `why_not` says why they cannot be stepped here; empty: they can."""

    def __init__(self, folder: Path, hosts: list[str]) -> None:
        self._folder = folder
        self._library = folder / "clock.so"
        self.why_not = _compile(self._library)
        self.offsets_s = dict.fromkeys(hosts, 0.0)
        for host in hosts:
            self._file(host).write_bytes(bytes(8))

    def _file(self, host: str) -> Path:
        return self._folder / f"clock-{host}"

    def environment(self, host: str) -> dict[str, str]:
        """Variables for the processes of a host."""
        if self.why_not:
            return {}
        return {"LD_PRELOAD": str(self._library), "BATON_CHAOS_CLOCK": str(self._file(host))}

    def step(self, host: str, offset_s: float) -> None:
        """Set how far the host's clock is ahead of the machine's."""
        self.offsets_s[host] = offset_s
        file = os.open(self._file(host), os.O_WRONLY)  # not replaced: processes have it mapped
        try:
            os.pwrite(file, int(offset_s * _NANOSECONDS).to_bytes(8, "little", signed=True), 0)
        finally:
            os.close(file)


def _compile(library: Path) -> str:
    """Returns why it could not."""
    candidates = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    compiler = next(filter(None, map(shutil.which, filter(None, candidates))), None)
    if compiler is None:
        return "no C++ compiler was found"
    done = subprocess.run(
        [compiler, "-O2", "-std=c++20", "-w", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"],
        capture_output=True,
        text=True,
    )
    return f"the clock's library does not compile: {done.stderr[-300:]}" if done.returncode else ""
