"""What `baton doctor` finds out about expert ranks: whether every expert has its replicas, ranks are ready,
workers are connected and rows really travel. A request of its own is the proof."""

import asyncio
import secrets
import time
from collections.abc import Iterator, Sequence

import httpx
import msgspec

from baton.core.experts import ExpertGroupState, lone_rank_text
from baton.core.operate import ClusterState, ReplicaState
from baton.wire.link import LinkBroken
from baton.wire.operate import OperateClient
from commands.findings import Finding
from commands.orders import local_clusters
from control_plane.expert_summary import ready_count

REQUEST_S = 60.0
"""Longest time of the doctor's own request."""

COUNTED_S = 3.0
"""Time within which ranks must have reported the rows of a request that was answered."""

LOOK_S = 0.2
CONTROL_S = 5.0
TOKENS = 4
UNAUTHORIZED = 401


class ExpertTrial(msgspec.Struct, frozen=True):
    """The expert ranks of one model before and after a request."""

    before: tuple[ExpertGroupState, ...]
    after: tuple[ExpertGroupState, ...]
    error: str = ""
    """Why the request was not answered."""
    needs_key: bool = False
    """Whether that is for want of an API key."""


class ExpertsSeen(msgspec.Struct, frozen=True):
    state: ClusterState
    trials: tuple[ExpertTrial, ...]


def look_at_experts(
    url: str, worker_ids: Sequence[str], *, control: str, key: str, verify: bool = True
) -> ExpertsSeen | None:
    """Send one request to each model that has expert ranks. None: the control plane of the router's cluster
    was not found. Raises LinkBroken if `control` does not answer."""
    return asyncio.run(_look(url, worker_ids, control=control, key=key, verify=verify))


async def _look(
    url: str, worker_ids: Sequence[str], *, control: str, key: str, verify: bool
) -> ExpertsSeen | None:
    found = await _cluster(worker_ids, control)
    if found is None:
        return None
    address, state = found
    client = OperateClient(address)
    try:
        models = sorted({group.model for group in state.experts})
        trials = [await _try(client, url, model, key, verify) for model in models]
    finally:
        await client.close()
    return ExpertsSeen(state, tuple(trials))


async def _cluster(worker_ids: Sequence[str], control: str) -> tuple[str, ClusterState] | None:
    """The control plane that is named, or that of this machine's cluster with these workers."""
    if control:
        return control, await _state(control)
    for address, _ in sorted(set(local_clusters())):
        try:
            state = await _state(address)
        except LinkBroken:
            continue
        if any(replica.worker_id in worker_ids for replica in state.replicas):
            return address, state
    return None


async def _state(address: str) -> ClusterState:
    client = OperateClient(address)
    try:
        async with asyncio.timeout(CONTROL_S):
            return await client.state()
    except TimeoutError:
        raise LinkBroken(f"{address}: no answer within {CONTROL_S:g} s") from None
    finally:
        await client.close()


async def _try(client: OperateClient, url: str, model: str, key: str, verify: bool) -> ExpertTrial:
    before = _of_model(await client.state(), model)
    error, needs_key = await _ask(url, model, key, verify)
    ends_s = time.monotonic() + COUNTED_S
    while True:
        after = _of_model(await client.state(), model)
        if error or any(rows_between(before, after).values()) or time.monotonic() > ends_s:
            return ExpertTrial(before, after, error, needs_key)
        await asyncio.sleep(LOOK_S)


def _of_model(state: ClusterState, model: str) -> tuple[ExpertGroupState, ...]:
    return tuple(group for group in state.experts if group.model == model)


async def _ask(url: str, model: str, key: str, verify: bool) -> tuple[str, bool]:
    """Why a request was not answered, empty if it was, and whether that is for want of an API key."""
    prompt = f"Rows travel to experts and back ({secrets.token_hex(8)})."
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx.AsyncClient(timeout=REQUEST_S, verify=verify) as http:
            answer = await http.post(f"{url.rstrip('/')}/v1/completions", json=body, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__, False
    if answer.is_success:
        return "", False
    return f"status {answer.status_code}", answer.status_code == UNAUTHORIZED


# --- findings ---------------------------------------------------------------------------------------


def diagnose_experts(seen: ExpertsSeen | None, *, is_in_use: bool) -> Iterator[Finding]:
    """The findings. This function is pure. `is_in_use` says whether a worker reports that it sends rows to
    expert ranks."""
    if seen is None:
        if is_in_use:
            yield Finding("note", "expert ranks were not looked at: name the control plane with --control")
        return
    for trial in seen.trials:
        for group in trial.after:
            yield from _replicas(group)
            yield from _ranks(group)
            yield from _callers(group, seen.state)
        yield from _rows(trial)


def _replicas(group: ExpertGroupState) -> Iterator[Finding]:
    name = f"experts, {group.group}"
    total = group.layer_count * group.expert_count
    slots = sum(rank.slots for rank in group.ranks)
    single = f"{group.single:,} of {total:,} experts have only one replica"
    if not total:
        yield Finding("bad", f"{name}: no rank has said yet how many experts the model has")
    elif group.missing or not group.is_ready:
        why = "; the ranks that are there have no memory for them" if group.lacks_memory else ""
        text = f"{group.missing:,} of {total:,} experts have no replica, and rows for them wait{why}"
        yield Finding("bad", f"{name}: {text}")
    elif group.single and slots >= 2 * group.expert_count:
        yield Finding("note", f"{name}: {single}, though there is room for two of each")
    elif group.single:
        yield Finding("ok", f"{name}: every expert has a replica; {single}, as there is no room for more")
    else:
        yield Finding("ok", f"{name}: every expert has at least {group.replicas_min} replicas")


def _ranks(group: ExpertGroupState) -> Iterator[Finding]:
    name, ready = f"experts, {group.group}", ready_count(group)
    text = f"{name}: {ready} of {group.wanted_ranks} expert ranks ready"
    if not ready:
        yield Finding("bad", text)
    elif ready < group.wanted_ranks:
        others = ", ".join(f"{r.name} {r.phase}" for r in group.ranks if r.phase != "ready") or "none started"
        yield Finding("note", f"{text}: {others}")
    else:
        yield Finding("ok", text)
    if group.wanted_ranks == 1:
        yield Finding("note", f"experts: {lone_rank_text(group.group, '')}")


def _callers(group: ExpertGroupState, state: ClusterState) -> Iterator[Finding]:
    name = f"experts, {group.group}"
    serving = sum(
        r.state is ReplicaState.RUNNING and (r.model, r.role) == (group.model, group.role)
        for r in state.replicas
    )
    if not group.callers:
        level = "bad" if serving else "note"
        yield Finding(level, f"{name}: no worker is connected to the map of epoch {group.epoch}")
    elif group.callers < serving:
        text = f"of {serving} workers only {group.callers} are connected to its map"
        yield Finding("bad", f"{name}: {text}")
    else:
        callers = "1 caller follows" if group.callers == 1 else f"{group.callers} callers follow"
        yield Finding("ok", f"{name}: {callers} the map of epoch {group.epoch}")


def _rows(trial: ExpertTrial) -> Iterator[Finding]:
    if trial.needs_key:
        yield Finding("note", "experts: no test request without an API key: --key or OPENAI_API_KEY")
        return
    if trial.error:
        yield Finding("bad", f"experts: the test request was not answered: {trial.error}")
        return
    risen = rows_between(trial.before, trial.after)
    if not any(risen.values()):
        yield Finding("bad", "experts: a request was answered, and no expert rank has computed a row for it")
        return
    for group in trial.after:
        rows = risen[group.group]
        if rows:
            yield Finding("ok", f"experts, {group.group}: rows travel, {rows:,} were computed for a request")
        else:
            so_far = sum(rank.rows for rank in group.ranks)
            text = f"no row for the request, which another pool served; {so_far:,} so far"
            yield Finding("note", f"experts, {group.group}: {text}")
        idle = [rank.name for rank in group.ranks if rank.phase == "ready" and rank.held and not rank.rows]
        if rows and idle:
            yield Finding("note", f"experts, {group.group}: ranks without a row so far: {', '.join(idle)}")


def rows_between(before: Sequence[ExpertGroupState], after: Sequence[ExpertGroupState]) -> dict[str, int]:
    """Rows that the ranks of each group computed between two looks. A rank that started meanwhile counts from
    zero."""
    known = {rank.rank_id: rank.rows for group in before for rank in group.ranks}
    return {
        group.group: sum(max(0, rank.rows - known.get(rank.rank_id, 0)) for rank in group.ranks)
        for group in after
    }
