"""`baton doctor` checks that every part is present, compatible, and really in use.

Counters are the proof: a feature that is switched on and has never moved a byte is not in use.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import msgspec
from rich.text import Text

from baton.core.errors import SetupError
from baton.core.messages import INFO_NOTE, Role
from baton.core.transfer_backends import BACKENDS, LAST_RESORTS
from baton.files.terminal import new_console
from baton.telemetry.machine import scheduling_note
from baton.wire.client import worker_status
from baton.wire.link import LinkBroken
from baton.wire.services import WorkerStatusReply
from baton.wire.transport import secure
from commands.doctor_experts import diagnose_experts, look_at_experts
from commands.findings import Finding, Level
from commands.settings import load_config

BACKENDS_OF_CHOICE = {
    name for name, facts in BACKENDS.items() if not (facts.is_last_resort or facts.is_same_host_only)
}

HTTP_S = 5.0

MARKS: dict[Level, tuple[str, str]] = {"ok": ("✓", "green"), "note": ("·", "yellow"), "bad": ("✗", "red")}


class ListedWorker(msgspec.Struct, frozen=True):
    id: str
    address: str
    stale: bool
    indexed_blocks: int


class RouterHealth(msgspec.Struct, frozen=True):
    """The fields that only a Baton router's /health has."""

    status: str
    workers: dict[Role, list[ListedWorker]]


class KnownWorker(msgspec.Struct, frozen=True):
    """A worker as the router lists it, with the status that the worker itself reports (None: it does not
    answer)."""

    worker_id: str
    role: Role
    address: str
    is_stale: bool
    indexed_blocks: int
    status: WorkerStatusReply | None
    model: str = ""


def examine(url: str, *, control: str = "", key: str = "", verify: bool = True) -> int:
    """Print the findings and return the exit status: 1 if a finding is bad. `control` is the address of the
    control plane, which knows the expert ranks; empty: this machine's. `key` is an API key for a test request
    where there are expert ranks. `verify`: check the router's certificate. Raises SetupError if there is no
    router at `url`."""
    config = load_config()
    secure(config.tls, config.access)
    health = _health(url, verify=verify)
    workers = asyncio.run(_ask_workers(health))
    experts = _experts(url, workers, control=control, key=key, verify=verify)
    findings = [*diagnose(health, workers), *experts, *_machine()]
    console = new_console()
    for finding in findings:
        mark, style = MARKS[finding.level]
        console.print(Text(mark, style), Text(finding.text), soft_wrap=True)
    return int(any(finding.level == "bad" for finding in findings))


def _health(url: str, *, verify: bool) -> dict[str, Any]:
    try:
        health = httpx.get(f"{url.rstrip('/')}/health", timeout=HTTP_S, verify=verify).json()
        msgspec.convert(health, RouterHealth)
    except msgspec.ValidationError:
        raise SetupError(f"no Baton router at {url}: its /health is not that of a router") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise SetupError(f"no Baton router at {url}: {error}") from None
    return health


async def _ask_workers(health: Mapping[str, Any]) -> list[KnownWorker]:
    listed = [(Role(role), entry) for role, entries in health["workers"].items() for entry in entries]
    statuses = await asyncio.gather(*(_status(entry["address"]) for _, entry in listed))
    return [
        KnownWorker(
            worker_id=entry["id"],
            role=role,
            address=entry["address"],
            is_stale=entry["stale"],
            indexed_blocks=entry["indexed_blocks"],
            status=status,
            model=entry.get("model", ""),
        )
        for (role, entry), status in zip(listed, statuses, strict=True)
    ]


async def _status(address: str) -> WorkerStatusReply | None:
    try:
        return await worker_status(address)
    except LinkBroken:
        return None


def diagnose(health: Mapping[str, Any], workers: Sequence[KnownWorker]) -> Iterator[Finding]:
    """The findings. This function is pure."""
    yield from _router(health)
    models = _models(health)
    for name, status in models.items():
        mine = [w for w in workers if w.model == name] if len(models) > 1 else workers
        of = f"{name}: " if len(models) > 1 else ""
        if status != "asleep":
            yield from _of(of, _pools(mine, is_served=status in ("ok", "degraded")))
        yield from _of(of, _compatibility(mine))
    yield from _remote_prefill(workers)
    yield from _context_ranks(workers)
    yield from _caches(workers)
    yield from _store(workers)


def _experts(
    url: str, workers: Sequence[KnownWorker], *, control: str, key: str, verify: bool = True
) -> list[Finding]:
    ids = [worker.worker_id for worker in workers]
    is_in_use = "experts.dispatched_rows" in _sums(workers)
    try:
        seen = look_at_experts(url, ids, control=control, key=key, verify=verify)
    except LinkBroken as error:
        level: Level = "bad" if is_in_use else "note"
        return [Finding(level, f"expert ranks were not looked at, no answer of the control plane: {error}")]
    return list(diagnose_experts(seen, is_in_use=is_in_use))


def _machine() -> Iterator[Finding]:
    """Findings about the machine that this command runs on, which need not be the cluster's."""
    if (note := scheduling_note()) is not None:
        yield Finding("note", f"this machine: {note}")


def _router(health: Mapping[str, Any]) -> Iterator[Finding]:
    level = _level(health.get("status"))
    models = _models(health)
    yield Finding(level, f"router: {health.get('status')}, model {' and '.join(models)}")
    if len(models) > 1:
        for name, status in models.items():
            yield Finding(_level(status), f"model {name}: {status}")
    yield from _peers(health)
    directory = health.get("directory", "none")
    if directory == "none":
        yield Finding("note", "directory: none; the workers are named on the command line")
    else:
        text = f"directory: {directory}"
        yield Finding("ok", text) if directory == "current" else Finding("bad", text)


def _models(health: Mapping[str, Any]) -> dict[str, str]:
    """The status of each model, by name."""
    models: Mapping[str, Any] = health.get("models") or {str(health.get("model")): health}
    return {name: str(one.get("status")) for name, one in models.items()}


def _of(model: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    for finding in findings:
        yield Finding(finding.level, f"{model}{finding.text}")


def _level(status: object) -> Level:
    levels: dict[str, Level] = {"ok": "ok", "degraded": "note", "asleep": "note"}
    return levels.get(str(status), "bad")


def _peers(health: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about other routers that report their load to this one. A lone router has none. This router
    cannot know of a router that it has not heard from."""
    count = int(health.get("peers", 0))
    if count:
        others = "another router" if count == 1 else f"{count} other routers"
        yield Finding("ok", f"peers: {others} known; load and budgets count all routers")
    else:
        yield Finding(
            "note",
            "peers: none known; correct for a single router. With several, this one does not know their load",
        )


def _pools(workers: Sequence[KnownWorker], *, is_served: bool) -> Iterator[Finding]:
    """`is_served` says whether the router can place requests."""
    for role in Role:
        count = sum(w.role is role for w in workers)
        if count:
            mine = [w for w in workers if w.role is role]
            yield Finding("ok", f"{count} {role} worker{'s' * (count > 1)}{_ranks(mine)}")
    can_prefill = any(w.role.prefills for w in workers)
    can_decode = any(w.role.decodes for w in workers)
    if not can_prefill:
        yield _missing("prefill", "decode", falls_back=is_served and can_decode)
    if not can_decode:
        yield _missing("decode", "prefill", falls_back=is_served and can_prefill)
    for worker in workers:
        if worker.status is None:
            yield Finding("bad", f"{worker.worker_id} at {worker.address} does not answer")
        elif worker.is_stale:
            yield Finding("bad", f"{worker.worker_id} has not reported for a while")
        elif worker.status.is_draining:
            yield Finding("note", f"{worker.worker_id} is draining")


def _ranks(workers: Sequence[KnownWorker]) -> str:
    """Text on the ranks of workers, empty if each of them is one process."""
    counts = [int(w.status.accounts.get("rank_count", 1)) for w in workers if w.status is not None]
    if all(count == 1 for count in counts):
        return ""
    kinds = sorted(set(counts))
    each = " each" if len(counts) > 1 and len(kinds) == 1 else ""
    return f", of {' and '.join(map(str, kinds))} ranks{each}"


def _missing(role: str, other: str, *, falls_back: bool) -> Finding:
    if falls_back:
        return Finding("note", f"no {role} worker: everything is served on the {other} pool, degraded")
    return Finding("bad", f"no worker can {role}")


def _compatibility(workers: Sequence[KnownWorker]) -> Iterator[Finding]:
    by_fingerprint: dict[str, list[str]] = {}
    for worker in workers:
        if worker.status is not None:
            by_fingerprint.setdefault(worker.status.fingerprint, []).append(worker.worker_id)
    if len(by_fingerprint) == 1:
        yield Finding("ok", f"one KV fingerprint: {next(iter(by_fingerprint))}")
    elif by_fingerprint:
        groups = "; ".join(f"{name}: {', '.join(ids)}" for name, ids in sorted(by_fingerprint.items()))
        yield Finding("bad", f"KV cannot move between all workers, their fingerprints differ: {groups}")


def _remote_prefill(workers: Sequence[KnownWorker]) -> Iterator[Finding]:
    yield from _notes(workers)
    roles = {w.role for w in workers}
    if (
        not roles & {Role.PREFILL, Role.AGGREGATED}
        or not roles & {Role.DECODE, Role.AGGREGATED}
        or roles == {Role.AGGREGATED}
    ):
        yield Finding("note", "no separate pools: KV does not have to move")
        return
    bytes_by_backend: dict[str, int] = {}
    for name, value in _sums(workers).items():
        if name.startswith("transfer.") and name.endswith(".bytes_read"):
            bytes_by_backend[name.split(".")[1]] = int(value)
    moved = {backend: count for backend, count in bytes_by_backend.items() if count}
    if moved:
        texts = ", ".join(f"{count / 2**20:.1f} MiB by {backend}" for backend, count in sorted(moved.items()))
        yield Finding("ok", f"remote prefill is in use: {texts}")
        better = [name for name in bytes_by_backend if name in BACKENDS_OF_CHOICE]
        if better and moved.keys() <= LAST_RESORTS:
            yield Finding("note", f"{better[0]} is there, but all KV moved over {', '.join(moved)}")
    elif _prefilled(workers):
        if any(count for name, count in _sums(workers).items() if name.endswith(".reads_failed")):
            yield Finding("bad", "prompts were computed on the prefill pool, but no KV has moved: reads fail")
        else:
            yield Finding(
                "note", "no KV has moved: the router predicted every request to be faster on one worker"
            )
    else:
        yield Finding("note", "no KV has moved yet: send a request of at least one block of tokens")


def _notes(workers: Sequence[KnownWorker]) -> Iterator[Finding]:
    """The notes that the workers report, each one once."""
    by_note: dict[str, list[str]] = {}
    for worker in workers:
        for note in worker.status.notes if worker.status else ():
            by_note.setdefault(note, []).append(worker.worker_id)
    for note, ids in by_note.items():
        who = "all workers" if len(ids) == len(workers) else ", ".join(ids)
        level: Level = "ok" if note.startswith(INFO_NOTE) else "note"
        yield Finding(level, f"{who}: {note.removeprefix(INFO_NOTE)}")


def _prefilled(workers: Sequence[KnownWorker]) -> bool:
    pool = [w for w in workers if w.role is Role.PREFILL]
    return _sums(pool).get("step_tokens.prefill", 0) > 0


def _context_ranks(workers: Sequence[KnownWorker]) -> Iterator[Finding]:
    several = [w for w in workers if w.status and w.status.accounts.get("context_rank_count", 1) > 1]
    sums = _sums(several)
    if count := int(sums.get("context_rank_tokens", 0)):
        yield Finding("ok", f"context ranks are in use: {count} tokens were computed beside the leaders")
    elif sums.get("step_tokens.prefill", 0):
        yield Finding("note", "no step was divided over context ranks: prompts were short so far")


def _caches(workers: Sequence[KnownWorker]) -> Iterator[Finding]:
    if not _sums(workers).get("step_tokens.prefill", 0):
        return
    indexed = sum(w.indexed_blocks for w in workers)
    if indexed:
        yield Finding("ok", f"block events arrive: the router knows {indexed} cached blocks")
    else:
        yield Finding("note", "the router knows no cached block: prompts were shorter than a block so far")
    hits = int(_sums(workers).get("prefix_hit_tokens", 0))
    if hits:
        yield Finding("ok", f"prefix caches are in use: {hits} prompt tokens were not computed again")
    else:
        yield Finding("note", "no cache hit yet: no prompt has shared a block with an earlier one")


def _store(workers: Sequence[KnownWorker]) -> Iterator[Finding]:
    """Findings about the KV store. Workers without a store give the reason in their notes."""
    joined = [w for w in workers if w.status is not None and w.status.accounts.get("store.joined")]
    if not joined:
        yield Finding("note", "no KV store: blocks that leave the KV pools are computed again when needed")
        return
    if len(joined) < len(workers):
        yield Finding("note", f"{len(joined)} of {len(workers)} workers have a KV store")
    sums = _sums(joined)
    written, loaded = int(sums.get("store.written_blocks", 0)), _by_reason(sums, "store.loaded_blocks.")
    if loaded:
        blocks = ", ".join(f"{count} from {tier}" for tier, count in loaded.items())
        yield Finding("ok", f"the KV store is in use: {written} blocks written; blocks loaded: {blocks}")
    elif written:
        yield Finding("note", f"the KV store has {written} blocks of these workers; none has been loaded yet")
    elif sums.get("step_tokens.prefill", 0):
        yield Finding("note", "nothing was written to the KV store: prompts were shorter than a block so far")
    yield from _store_troubles(sums)


def _store_troubles(sums: Mapping[str, float]) -> Iterator[Finding]:
    computed = _by_reason(sums, "store.recomputed_blocks.")
    if corrupt := computed.get("corrupt", 0):
        yield Finding("bad", f"{corrupt} blocks came damaged from the KV store and were computed again")
    if in_vain := computed.get("late", 0) + computed.get("failed", 0):
        yield Finding("note", f"{in_vain} blocks did not arrive from the KV store in time and were computed")


def _by_reason(sums: Mapping[str, float], prefix: str) -> dict[str, int]:
    found = {name.removeprefix(prefix): int(n) for name, n in sorted(sums.items()) if name.startswith(prefix)}
    return {name: count for name, count in found.items() if count}


def _sums(workers: Sequence[KnownWorker]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for worker in workers:
        for name, value in (worker.status.accounts if worker.status else {}).items():
            sums[name] = sums.get(name, 0.0) + value
    return sums
