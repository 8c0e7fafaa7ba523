"""A real cluster for tests: `baton serve` in a process of its own, and access to the state of its parts."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from baton.wire.client import worker_status
from baton.wire.link import LinkBroken
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
START_S = 120.0


def eventually(what: str, holds: Callable[[], Any], *, timeout_s: float, every_s: float = 0.05) -> Any:
    """Wait until `holds()` is true and return it; fails with its last value and `what`.

    It polls, because other processes cannot notify the test when their state changes.
    """
    pause = threading.Event()
    ends_s = time.monotonic() + timeout_s
    while True:
        value = holds()
        if value:
            return value
        assert time.monotonic() < ends_s, f"not within {timeout_s} s: {what}; last: {value!r}"
        pause.wait(every_s)


class _Loop:
    """One event loop in a thread of its own for all our gRPC calls, because grpc.aio does not support loops
    that come and go in one process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)


@functools.cache
def loop() -> _Loop:
    return _Loop()


@dataclass
class Worker:
    worker_id: str
    role: str
    address: str
    accounts: dict[str, float] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return int(self.accounts["pid"])

    @property
    def held(self) -> dict[str, float]:
        """Everything that must be zero when no request is around."""
        names = (
            *("held_blocks", "quarantined_blocks", "running_count", "waiting_count"),
            *("lease_count", "receiver_count", "reads_in_flight"),
        )
        return {name: self.accounts[name] for name in names if self.accounts[name]}


def bytes_read(accounts: dict[str, float]) -> float:
    """Bytes of KV that came from another worker, by any backend."""
    return sum(value for name, value in accounts.items() if name.endswith(".bytes_read"))


class Cluster:
    def __init__(
        self,
        model: Path | None,
        *,
        models: Path | None = None,
        prefill: int | str = 1,
        decode: int | str = 1,
        both: int | str = 0,
        **settings: Any,
    ):
        """`models` is a file that names several models, in place of `model`; requests then name one. Workers
        of several ranks are asked for as on the command line: "1xtp2"."""
        settings.setdefault("store__host_bytes", 64 * 2**20)
        # Predictions are tested elsewhere. Few steps are timed, so that a worker starts a second earlier.
        settings.setdefault("engine__self_timing_s", 0.1)
        settings.setdefault("dashboard__enabled", False)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = "" if model is None else model.name
        served = ["--models", str(models)] if model is None else ["--model", str(model)]
        command = [sys.executable, "-m", "baton", "serve", *served, "--port", str(self.port)]
        command += ["--prefill", str(prefill), "--decode", str(decode), "--aggregated", str(both)]
        # Otherwise prompts as short as those of the tests would mostly stay on one worker.
        for name, value in {"transfer__checksums": True, "router__any_role": False, **settings}.items():
            command += ["--set", f"{name.replace('__', '.')}={value}"]
        self.log: list[str] = []
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line.rstrip())

    def __enter__(self) -> "Cluster":
        try:
            eventually("cluster ready", self._ready, timeout_s=START_S)
        except BaseException:
            self.kill()
            raise
        return self

    def _ready(self) -> bool:
        assert self.process.poll() is None, "\n".join(self.log[-40:])
        return any(line.startswith("Baton is ready") for line in self.log)

    def workers(self) -> list[Worker]:
        """The workers that the router has a session with, and their accounts."""
        found = []
        for role, listed in self.http.get("/health").json()["workers"].items():
            for w in listed:
                worker = Worker(w["id"], role, w["address"])
                with contextlib.suppress(LinkBroken):
                    worker.accounts = loop().run(worker_status(worker.address)).accounts
                    found.append(worker)
        return sorted(found, key=lambda w: w.worker_id)

    @staticmethod
    def accounts(worker: Worker) -> dict[str, float]:
        """The accounts as they are now, by a single call, to catch short-lived values."""
        with contextlib.suppress(LinkBroken):
            worker.accounts = loop().run(worker_status(worker.address)).accounts
        return worker.accounts

    def worker(self, role: str) -> Worker:
        return next(w for w in self.workers() if w.role == role)

    def health(self) -> dict[str, Any]:
        return self.http.get("/health").json()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the router's series of that name with these labels."""
        wanted = [f'{k}="{v}"' for k, v in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in self.http.get("/metrics").text.splitlines()
            if line.split("{")[0].split(" ")[0] == name and all(w in line for w in wanted)
        )

    def assert_idle(self, *, timeout_s: float = 15.0) -> None:
        """Nothing is held anywhere: no blocks, leases, receivers, reads or in-flight counters."""

        def idle() -> bool:
            self.last = {w.worker_id: w.held for w in self.workers()}
            health = self.health()
            self.last["router"] = {k: n for k, n in health["sequences"].items() if n}
            for workers in health["workers"].values():
                for w in workers:
                    self.last[f"in flight to {w['id']}"] = {"count": w["in_flight"]} if w["in_flight"] else {}
            return not any(self.last.values())

        try:
            eventually("everything given back", idle, timeout_s=timeout_s)
        except AssertionError:
            raise AssertionError(f"still held: {self.last}") from None

    def await_workers(self, *, prefill: int, decode: int, timeout_s: float = 60.0) -> None:
        def all_there() -> bool:
            roles = [w.role for w in self.workers()]
            return roles.count("prefill") == prefill and roles.count("decode") == decode

        try:
            eventually(f"{prefill} prefill and {decode} decode workers", all_there, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *self.log[-40:]])) from None

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **fields}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, prompt: Any, **fields: Any):
        """Yields the JSON of each SSE event of a streamed completion, "[DONE]" excluded."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "stream": True, **fields}
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            done = False
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    if line == "data: [DONE]":
                        done = True
                    else:
                        yield json.loads(line[6:])
            assert done, "the stream ended without [DONE]"

    def stop(self) -> None:
        """Send Ctrl-C, as a person would; nothing may stay behind."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        finally:
            self.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert alive == [], f"left behind: {alive}"
        self._reader.join(5)
        assert not [line for line in self.log if "*** SIG" in line], "a process was ended by a signal"

    def kill(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            for p in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    os.kill(p.pid, signal.SIGKILL)
            self.process.wait(10)
        self._reader.join(5)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()
            print("\n".join(self.log[-60:]))
