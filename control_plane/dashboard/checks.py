"""Checks that each feature which is switched on is seen to work. Pure.

Counters are the proof: a feature that never moved a byte is not in use, whatever the configuration says.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from baton.config import Config
from baton.core.messages import Role
from baton.core.operate import ClusterState, ReplicaState
from baton.core.policies import PLACEMENT_POLICIES
from baton.core.transfer_backends import LAST_RESORTS
from baton.telemetry import catalogue as c
from control_plane.dashboard.derive import gained, level, share_of
from control_plane.dashboard.samples import MetricsFrame, by_label
from control_plane.dashboard.text import number, plural, share, size

Verdict = Literal["on", "idle", "off", "bad"]
"""Result of a check. on: seen to work. idle: switched on, with nothing to do yet. off: by configuration. bad:
it should work and does not."""


class Check(msgspec.Struct, frozen=True):
    name: str
    verdict: Verdict
    text: str


def checks(config: Config, state: ClusterState | None, past: MetricsFrame | None) -> list[Check]:
    """Return all checks. `past` is everything remembered, in one frame; None: nothing was collected yet."""
    if state is None or past is None:
        return []
    return [
        *_remote_prefill(config, state, past),
        _transport(config, past),
        *_caches(past),
        _events(past),
        *_store(config, past),
        _predictor(config, past),
        _objectives(config, past),
        _speculation(config, past),
        *_expert_ranks(state),
        *_routers(state, past),
        _encryption(config),
    ]


def _remote_prefill(config: Config, state: ClusterState, past: MetricsFrame) -> Iterator[Check]:
    name = "Remote prefill"
    if not config.router.disaggregate:
        yield Check(name, "off", "router.disaggregate is off: both phases run on one worker")
        return
    serving = {r.role for r in state.replicas if r.state is ReplicaState.RUNNING}
    if level(past, c.DEGRADED.name):
        yield Check(name, "bad", "a pool is empty: both phases run on whichever worker there is")
    elif Role.PREFILL not in serving or Role.DECODE not in serving:
        yield Check(name, "off", "there are no separate pools of prefill and decode workers")
    else:
        split, aggregated = (gained(past, c.PLACEMENTS.name, kind=kind) for kind in ("split", "aggregated"))
        moved = gained(past, c.TRANSFER_BYTES.name)
        if split and moved:
            part = share(share_of(split, split + aggregated))
            yield Check(name, "on", f"{part} of sequences are split; {size(moved)} of KV moved")
        elif split:
            yield Check(
                name, "bad", "sequences are split, but no KV has moved: reads fail, or are not reported"
            )
        elif aggregated:
            yield Check(name, "idle", "every sequence was predicted to do better on one worker")
        else:
            yield Check(name, "idle", "no request yet")


def _transport(config: Config, past: MetricsFrame) -> Check:
    name = "KV transport"
    moved = {b: v for b, v in by_label(past.gained.get(c.TRANSFER_BYTES.name), "backend").items() if v}
    lost = sum(
        gained(past, c.TRANSFER_READS.name, outcome=outcome) for outcome in ("failed", "stale", "corrupt")
    )
    reads = gained(past, c.TRANSFER_READS.name)
    if not moved:
        return Check(name, "idle", "no KV has moved yet")
    text = ", ".join(f"{size(value)} by {backend}" for backend, value in sorted(moved.items()))
    if lost > 0.05 * reads:
        return Check(name, "bad", f"{share(share_of(lost, reads))} of reads failed; {text}")
    preferred = config.transfer.backends[0]
    if moved.keys() <= LAST_RESORTS and preferred not in LAST_RESORTS:
        return Check(name, "bad", f"all KV moves by a last resort, not by {preferred}: {text}")
    return Check(name, "on", text)


def _caches(past: MetricsFrame) -> Iterator[Check]:
    hits, all_tokens = gained(past, c.CACHED_TOKENS.name), gained(past, c.PROMPT_TOKENS.name)
    if hits:
        text = f"{share(share_of(hits, all_tokens))} of prompt tokens were not computed again"
        yield Check("Prefix cache", "on", text)
    else:
        reason = "no prompt has shared a block with an earlier one" if all_tokens else "no request yet"
        yield Check("Prefix cache", "idle", reason)


def _events(past: MetricsFrame) -> Check:
    name = "Cache events"
    stale = [w for w, value in by_label(past.levels.get(c.STALE.name), "worker").items() if value > 0.5]
    if stale:
        return Check(name, "bad", f"routers get no events from {', '.join(sorted(stale))}")
    blocks = level(past, c.INDEXED_BLOCKS.name) or 0.0
    if blocks:
        return Check(name, "on", f"routers know {number(blocks)} cached blocks")
    return Check(name, "idle", "routers know no cached block yet")


def _store(config: Config, past: MetricsFrame) -> Iterator[Check]:
    if not config.store.host_bytes:
        yield Check("KV store", "off", "store.host_bytes is 0: what leaves the KV pools is computed again")
        return
    joined = by_label(past.levels.get(c.STORE_JOINED.name), "worker")
    apart = sorted(worker for worker, value in joined.items() if value < 0.5)
    used = {t: v for t, v in by_label(past.gained.get(c.LOADED_BLOCKS.name), "tier").items() if v}
    written = gained(past, c.WRITTEN_BLOCKS.name)
    if apart:
        yield Check("KV store", "bad", f"workers that do not reach it: {', '.join(apart)}")
    elif used:
        text = ", ".join(f"{number(value)} blocks from {tier}" for tier, value in sorted(used.items()))
        yield Check("KV store", "on", f"{number(written)} blocks written; used: {text}")
    elif written:
        yield Check("KV store", "idle", f"{number(written)} blocks written, none was needed yet")
    else:
        yield Check("KV store", "idle", "nothing was written yet")
    if config.store.ssd_dir:
        wrote = gained(past, c.STORE_PATH_BYTES.name, path="ssd_write")
        errors = gained(past, c.STORE_IO_ERRORS.name)
        if errors:
            yield Check("SSD tier", "bad", f"{number(errors)} reads or writes failed")
        else:
            yield Check("SSD tier", "on" if wrote else "idle", f"{size(wrote)} written")


def _predictor(config: Config, past: MetricsFrame) -> Check:
    name = "Placement by prediction"
    if not PLACEMENT_POLICIES[config.router.policy].predicts:
        return Check(name, "off", f"router.policy is {config.router.policy}")
    if level(past, c.PREDICTOR_FALLBACK.name):
        return Check(name, "bad", "predictions are too far off: placement is by cached prefix")
    errors = past.levels.get(c.PREDICTOR_ERROR.name, {})
    ttft = [value for labels, value in errors.items() if ("what", "ttft") in labels]
    if not ttft:
        return Check(name, "idle", "nothing was predicted yet")
    return Check(name, "on", f"first tokens are {share(sum(ttft) / len(ttft))} off on average")


def _objectives(config: Config, past: MetricsFrame) -> Check:
    name = "Objectives"
    if not config.slo.classes:
        return Check(name, "off", "slo.classes names none: every completed request counts as met")
    counted = by_label(past.gained.get(c.SLO_REQUESTS.name), "slo_class")
    used = sorted(name for name in counted if name in config.slo.classes)
    if used:
        return Check(name, "on", f"requests of {', '.join(used)} are judged by their objectives")
    if counted.get("none"):
        return Check(name, "bad", "classes are configured, but requests choose none and slo.default is empty")
    return Check(name, "idle", "no request yet")


def _speculation(config: Config, past: MetricsFrame) -> Check:
    name = "Speculation"
    if config.engine.speculation == "off":
        return Check(name, "off", "engine.speculation is off")
    drafted, right = gained(past, c.DRAFTED_TOKENS.name), gained(past, c.ACCEPTED_TOKENS.name)
    if not drafted:
        return Check(name, "idle", "no draft tokens yet, or too few were accepted and it turned itself off")
    return Check(
        name, "on", f"{share(share_of(right, drafted))} of {number(drafted)} draft tokens were accepted"
    )


def _expert_ranks(state: ClusterState) -> Iterator[Check]:
    if not state.experts:
        return
    name = "Expert ranks"
    rows = sum(rank.rows for group in state.experts for rank in group.ranks)
    if incomplete := [group.group for group in state.experts if not group.is_ready]:
        yield Check(name, "bad", f"experts without a replica: {', '.join(incomplete)}")
    elif unused := [group.group for group in state.experts if not group.callers]:
        yield Check(name, "bad", f"no worker uses its expert ranks: {', '.join(unused)}")
    elif rows:
        count = sum(len(group.ranks) for group in state.experts)
        yield Check(name, "on", f"{plural(count, 'rank')} computed {number(rows)} rows")
    else:
        yield Check(name, "idle", "no row has reached an expert rank yet")


def _routers(state: ClusterState, past: MetricsFrame) -> Iterator[Check]:
    count = len(state.routers)
    if count < 2:
        return
    followed = level(past, c.PEERS.name) or 0.0
    wanted = count * (count - 1)
    if followed < wanted - 0.5:
        text = f"{plural(count, 'router')}, and not all know each other's load"
        yield Check("Routers share load", "bad", text)
    else:
        yield Check("Routers share load", "on", f"{plural(count, 'router')} know each other's load")


def _encryption(config: Config) -> Check:
    if config.tls.is_on:
        return Check("Mutual TLS", "on", f"between all processes of {config.tls.domain}")
    return Check(
        "Mutual TLS",
        "off",
        "gRPC between processes is plain: use it on one machine or a trusted network only",
    )
