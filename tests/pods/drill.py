"""The drill: all pods start and are ready, and each is deleted in turn while a replay runs."""

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.pods.life import Ended, Pod, Say
from tests.pods.manifests import PodPlan, Release, endpoints
from tests.pods.podman import Folders, PodmanError, podman
from tests.pods.service import OutsideService

READY_S = 400
"""All pods of a release, on a machine that others use, too."""
RATE, REQUESTS, UNDER_WAY = 3.0, 150, 15
"""Requests per second, in all, and before a pod is deleted."""


@dataclass
class Finding:
    """What deleting one pod did. `broken` are requests that did not end as they should."""

    pod: str
    ended: Ended
    ready_again_s: float | None
    requests: int = 0
    broken: list[str] = field(default_factory=list[str])
    longest_pause_s: float = 0.0


@dataclass
class Run:
    """A release that runs, and how to reach it from outside. `ca` is a file of the router's certificate."""

    release: Release
    pods: dict[str, Pod]
    service: OutsideService
    folder: Path
    api_key: str
    token: str
    ca: Path | None
    say: Say

    @property
    def url(self) -> str:
        return f"{'https' if self.ca else 'http'}://localhost:{self.service.port}"

    def one(self, component: str) -> Pod:
        return next(p for p in self.pods.values() if p.plan.component == component)


@asynccontextmanager
async def running(
    release: Release,
    folder: Path,
    *,
    label: str,
    network: str,
    api_key: str,
    token: str,
    ca: Path | None,
    say: Say,
    only: Sequence[str] = (),
) -> AsyncGenerator[Run]:
    """Start the pods of these components (all, if none is named), side by side. All are removed in the
    end."""
    pods: dict[str, Pod] = {}

    def ready() -> frozenset[str]:
        return frozenset(name for name, pod in pods.items() if pod.is_ready.is_set())

    folders = Folders(folder)
    for plan in release.pods:
        if not plan.is_test and (not only or plan.component in only):
            pods[plan.name] = Pod(plan, release, folders, network, label, ready, say)

    def routers() -> list[tuple[str, int]]:
        behind = endpoints(release, "baton-router")
        return [(plan.address, port) for plan, port in behind if plan.name in ready()]

    service = OutsideService(routers)
    await service.start()
    try:
        await asyncio.gather(*(pod.start() for pod in pods.values()))
        yield Run(release, pods, service, folder, api_key, token, ca, say)
    finally:
        await service.close()
        await asyncio.gather(*(pod.remove() for pod in pods.values()))


async def all_ready(run: Run, *, but: Sequence[str] = ()) -> float:
    """Wait until every pod is ready, except those of the components `but`; return how long that took. Raises
    TimeoutError, which names those that are not."""
    began = time.monotonic()
    waited = {n: p for n, p in run.pods.items() if p.plan.component not in but}
    try:
        async with asyncio.timeout(READY_S):
            await asyncio.gather(*(pod.is_ready.wait() for pod in waited.values()))
    except TimeoutError:
        late = [name for name, pod in waited.items() if not pod.is_ready.is_set()]
        raise TimeoutError(f"not ready after {READY_S} s: {', '.join(late)}") from None
    return time.monotonic() - began


async def helm_test(run: Run) -> None:
    """Run the chart's test. Raises PodmanError with what it prints if it fails."""
    plan = next(p for p in run.release.pods if p.is_test)
    some = next(iter(run.pods.values()))
    pod = Pod(plan, run.release, some.folders, some.network, some.label, some.ready_names, run.say)
    try:
        done = await pod.run_to_end()
    finally:
        await pod.remove()
    run.say(f"helm test: status {done.status}\n{done.out}{done.err}")
    if done.status:
        raise PodmanError(f"{plan.name} ends with status {done.status}")


SIGN_IN = """
import httpx, sys
browser = {"Accept": "text/html", "Origin": "http://127.0.0.1:8070"}
with httpx.Client(base_url=browser["Origin"], timeout=30, headers=browser) as http:
    stranger = http.get("/")
    assert stranger.status_code in (302, 303, 307), stranger.status_code
    wrong = http.post("/login", data={"token": "wrong"})
    assert wrong.status_code == 403, wrong.status_code
    right = http.post("/login", data={"token": sys.argv[1]})
    assert right.status_code in (302, 303), right.status_code
    for path in ("/", "/workers"):
        page = http.get(path)
        assert page.status_code == 200 and "Sign in" not in page.text, (path, page.status_code)
        print(path, len(page.text), "bytes")
"""


async def sign_in_to_dashboard(run: Run) -> None:
    """Sign in from within the control plane's pod, which is where `kubectl port-forward` leads. Raises
    PodmanError if that fails."""
    control = run.one("control")
    name = control.container("control")
    async with asyncio.timeout(120):
        while (done := await podman("exec", name, "python", "-c", SIGN_IN, run.token, check=False)).status:
            if "ConnectError" not in done.err:
                raise PodmanError(f"dashboard: {done.err[-800:]}")
            await asyncio.sleep(2)
    run.say(f"dashboard: signed in to; {done.out.strip()}")


async def deleted_under_load(run: Run, plan: PodPlan) -> Finding:
    """Start a replay, delete the pod, and start it anew, as its controller would at once."""
    run.say(f"{plan.name}: deleted under a replay")
    pod, records = run.pods[plan.name], run.folder / f"{plan.name}.jsonl"
    replay = asyncio.create_task(_replay(run, records))
    asking = asyncio.create_task(run.service.after_connections(UNDER_WAY))
    await asyncio.wait([asking, replay], return_when=asyncio.FIRST_COMPLETED)
    asking.cancel()
    ended = await pod.delete()
    began = time.monotonic()
    await pod.start()
    try:
        async with asyncio.timeout(READY_S):
            await pod.is_ready.wait()
        again_s = time.monotonic() - began
    except TimeoutError:
        again_s = None
    await replay
    finding = Finding(plan.name, ended, again_s)
    for line in records.read_text().splitlines():
        record = json.loads(line)
        if "outcome" not in record:
            continue
        finding.requests += 1
        if record["outcome"] != "completed":
            finding.broken.append(
                f"{record['outcome']} {record.get('error')} {record.get('detail', '')}"[:160]
            )
        instants = record.get("token_instants_s") or []
        pauses = [b - a for a, b in itertools.pairwise(instants)]
        finding.longest_pause_s = max([finding.longest_pause_s, *pauses])
    run.say(f"{finding}")
    return finding


async def _replay(run: Run, records: Path) -> None:
    """Conversations of a production trace's statistics, shortened for a tiny model."""
    trace = ("synth:mooncake-conversation", "--limit", REQUESTS, "--rate", RATE, "--sessions", "open")
    lengths = ("--length-scale", "1/64", "--output-scale", "1/2", "--first-token", 10)
    where = ("--url", run.url, "--api-key", run.api_key, "--timeout", 240, "--records", records)
    variables = {**os.environ, **({"SSL_CERT_FILE": str(run.ca)} if run.ca else {})}
    with records.with_suffix(".log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "baton", "replay"),
            *(str(part) for part in (*trace, *lengths, *where)),
            stdout=log,
            stderr=log,
            env=variables,
        )
        try:
            await asyncio.wait_for(process.wait(), 600)
        finally:
            if process.returncode is None:
                process.kill()


def faults(run: Run, findings: Sequence[Finding]) -> list[str]:
    """What must not be. A router that is alone ends its own streams; nothing else may."""
    routers = sum(1 for p in run.pods.values() if p.plan.component == "router")
    found: list[str] = []
    for finding in findings:
        component = run.pods[finding.pod].plan.component
        if finding.ended.was_killed:
            found.append(f"{finding.pod}: ended by SIGKILL: {finding.ended.statuses}")
        if finding.ready_again_s is None:
            found.append(f"{finding.pod}: its successor is not ready after {READY_S} s")
        if not finding.requests:
            found.append(f"{finding.pod}: nothing was asked while it was deleted")
        if finding.broken and not (component == "router" and routers == 1):
            found.append(f"{finding.pod}: {len(finding.broken)} broken: {finding.broken[:3]}")
    for name, pod in run.pods.items():
        if pod.killed:
            found.append(f"{name}: killed, perhaps for its memory: {pod.killed}")
        if not pod.is_ready.is_set():
            found.append(f"{name}: not ready in the end")
    return found


def table(findings: Sequence[Finding], run: Run) -> str:
    rows = ["pod | ended in | statuses | ready again | requests | broken | longest pause", "---|" * 6 + "---"]
    for f in findings:
        again = "never" if f.ready_again_s is None else f"{f.ready_again_s:.1f} s"
        statuses = " ".join(f"{n}={s}" for n, s in f.ended.statuses.items())
        rows.append(
            f"{f.pod} | {f.ended.took_s:.1f} s | {statuses} | {again} | {f.requests} | {len(f.broken)}"
            f" | {f.longest_pause_s:.1f} s"
        )
    restarts = [f"{n}: {r}" for n, p in run.pods.items() for r in p.restarts]
    return "\n".join([*rows, *(["", "restarts:", *restarts] if restarts else [])])


def in_turn(run: Run) -> list[PodPlan]:
    """One pod of each component, and of each role of workers; Ray's head and Redis last."""
    order: Sequence[Callable[[PodPlan], bool]] = [
        lambda p: p.component == "router",
        lambda p: p.component == "control",
        lambda p: p.labels.get("baton.dev/role") == "prefill",
        lambda p: p.labels.get("baton.dev/role") == "decode",
        lambda p: p.component == "experts",
        lambda p: p.component == "store",
        lambda p: p.component == "redis",
        lambda p: p.component == "ray-head",
    ]
    plans = [pod.plan for pod in run.pods.values()]
    return [plan for test in order for plan in [next((p for p in plans if test(p)), None)] if plan]
