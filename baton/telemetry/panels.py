"""Grafana's dashboards: the panels of each, from the catalogue. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from baton.telemetry import catalogue as cat
from baton.telemetry.metric import Metric
from baton.telemetry.promql import Promql

WINDOW = "$__rate_interval"
NAMESPACE = 'namespace=~"$namespace"'
"""Matcher that also holds for series without a namespace while all are chosen."""

Q = Promql(NAMESPACE)


@dataclass(frozen=True, slots=True)
class Query:
    expression: str
    legend: str = ""
    quiet: str = ""
    """Reason for an empty result in a healthy cluster. Empty: there is always a result once requests were
    served."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    """Grafana's name of the unit."""
    queries: tuple[Query, ...]
    description: str = ""
    is_stacked: bool = False
    is_share: bool = False
    """Whether values are between 0 and 1."""


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    rows: tuple[Row, ...]

    def queries(self) -> Iterator[tuple[Panel, Query]]:
        for row in self.rows:
            for panel in row.panels:
                for query in panel.queries:
                    yield panel, query


def counted(metric: Metric, title: str, *by: str, quiet: str = "") -> Panel:
    """Return a panel of a counter, per second."""
    units = {"bytes": "Bps", "requests": "reqps"}
    legend = " ".join(f"{{{{{name}}}}}" for name in by) or title
    query = Query(Q.rate(metric, WINDOW, *by), legend, quiet)
    return Panel(title, units.get(metric.unit, "cps"), (query,), metric.help, is_stacked=len(by) > 1)


def measured(metric: Metric, title: str, how: str, *by: str, quiet: str = "") -> Panel:
    """Return a panel of a gauge."""
    units = {"bytes": "bytes", "ratio": "percentunit", "seconds": "s"}
    legend = " ".join(f"{{{{{name}}}}}" for name in by) or title
    query = Query(Q.gauge(metric, how, *by), legend, quiet)
    return Panel(title, units.get(metric.unit, "short"), (query,), metric.help)


def percentiles(metric: Metric, title: str, *by: str, quiet: str = "") -> Panel:
    names = "".join(f" {{{{{name}}}}}" for name in by)
    queries = tuple(
        Query(Q.quantile(metric, q, WINDOW, *by), f"p{q * 100:g}{names}", quiet) for q in (0.5, 0.9, 0.99)
    )
    return Panel(title, "s", queries, metric.help)


def share(title: str, part: str, whole: str, legend: str, *, description: str = "", quiet: str = "") -> Panel:
    query = Query(f"{part} / {whole}", legend, quiet)
    return Panel(title, "percentunit", (query,), description, is_share=True)


UNTIL_REFUSED = "until a request is refused or misses its objectives"
UNTIL_FAILED = "until something fails"
UNLESS_STREAMED = "unless layers are streamed (model.offload)"
UNTIL_PRESSED = "until blocks run short"
WITH_CONTEXT_RANKS = "without context ranks"
WITH_AUTOSCALER = "where autoscale.mode is off"
WITH_SSD = "without an SSD tier"
WITH_PEERS = "without a second store node"
WITH_STORE = "without a store, or before it is asked"
WITH_EXPERTS = "while no model with experts is served"
WITH_EXPERT_RANKS = "without expert ranks"
BUSIEST = 8


def _goodput() -> Row:
    offered = Q.rate(cat.SLO_REQUESTS, WINDOW, outcome="!=cancelled")
    met = Q.rate(cat.SLO_REQUESTS, WINDOW, outcome="met")
    by_class = (
        Q.rate(cat.SLO_REQUESTS, WINDOW, "slo_class", outcome="met"),
        Q.rate(cat.SLO_REQUESTS, WINDOW, "slo_class", outcome="!=cancelled"),
    )
    by_model = (
        Q.rate(cat.SLO_REQUESTS, WINDOW, "model", outcome="met"),
        Q.rate(cat.SLO_REQUESTS, WINDOW, "model", outcome="!=cancelled"),
    )
    by_tenant = (
        Q.rate(cat.SLO_REQUESTS, WINDOW, "tenant", outcome="met"),
        Q.rate(cat.SLO_REQUESTS, WINDOW, "tenant", outcome="!=cancelled"),
    )
    refused = Q.rate(cat.SLO_REQUESTS, WINDOW, outcome="=~refused_.+")
    missed = Q.rate(cat.SLO_REQUESTS, WINDOW, "outcome", outcome="!~met|cancelled")
    return Row(
        "Goodput",
        (
            Panel(
                "Goodput and offered load",
                "reqps",
                (
                    Query(offered, "offered"),
                    Query(met, "goodput"),
                    Query(refused, "refused", UNTIL_REFUSED),
                ),
                cat.SLO_REQUESTS.help,
            ),
            share("Attainment by class", *by_class, "{{slo_class}}", description=cat.SLO_REQUESTS.help),
            share("Attainment by model", *by_model, "{{model}}", description=cat.SLO_REQUESTS.help),
            share("Attainment by tenant", *by_tenant, "{{tenant}}", description=cat.SLO_REQUESTS.help),
            Panel("Why not met", "reqps", (Query(missed, "{{outcome}}", UNTIL_REFUSED),), is_stacked=True),
            counted(cat.REQUESTS, "Requests by outcome", "model", "outcome"),
            measured(cat.QUEUED, "Waiting for a place", "sum", "model"),
        ),
    )


def _latency() -> Row:
    latency_breakdown = Query(Q.mean(cat.TTFT_PART, WINDOW, "part"), "{{part}}")
    return Row(
        "Latency",
        (
            percentiles(cat.TTFT, "Time to first token"),
            percentiles(cat.TPOT, "Time per output token"),
            percentiles(cat.E2E, "Whole request"),
            Panel(
                "Where the first token's time goes",
                "s",
                (latency_breakdown,),
                cat.TTFT_PART.help,
                is_stacked=True,
            ),
            percentiles(cat.HANDOVER, "Hand-over to decode"),
            counted(cat.PLACEMENTS, "Placements by kind", "kind"),
        ),
    )


def _volume() -> Row:
    cached = (Q.rate(cat.CACHED_TOKENS, WINDOW), Q.rate(cat.PROMPT_TOKENS, WINDOW))
    return Row(
        "Volume",
        (
            counted(cat.PROMPT_TOKENS, "Prompt tokens", "model"),
            counted(cat.GENERATED_TOKENS, "Generated tokens", "model"),
            share("Prompts from cache", *cached, "cached", description=cat.CACHED_TOKENS.help),
        ),
    )


def _pools() -> Row:
    return Row(
        "Pools",
        (
            measured(cat.REPLICAS, "Replicas", "sum", "model", "role", "state"),
            measured(cat.AUTOSCALE_NEEDED, "Forecast takes", "max", "model", "role", quiet=WITH_AUTOSCALER),
            measured(cat.AUTOSCALE_WANTED, "Autoscaler wants", "max", "model", "role", quiet=WITH_AUTOSCALER),
            measured(
                cat.AUTOSCALE_CORRECTION, "Its correction", "max", "model", "role", quiet=WITH_AUTOSCALER
            ),
            counted(cat.AUTOSCALE_DECISIONS, "Its orders", "kind", quiet=WITH_AUTOSCALER),
            counted(cat.AUTOSCALE_LOOKS, "Its looks", "outcome", quiet=WITH_AUTOSCALER),
            measured(cat.RANKS, "Ranks of workers", "sum", "worker"),
            measured(cat.KNOWN_WORKERS, "Workers that routers know", "max", "model", "role"),
            measured(cat.DEGRADED, "Pool is empty", "max", "model", "pool"),
            measured(cat.IN_FLIGHT, "In flight", "sum", "worker"),
            measured(cat.PEERS, "Other routers that a router knows", "min"),
            counted(cat.RESTARTS, "Replicas started anew", "replica", "cause", quiet=UNTIL_FAILED),
        ),
    )


def _engine() -> Row:
    right = (Q.rate(cat.ACCEPTED_TOKENS, WINDOW, "worker"), Q.rate(cat.DRAFTED_TOKENS, WINDOW, "worker"))
    return Row(
        "Engine",
        (
            percentiles(cat.STEP, "Step", "worker"),
            counted(cat.STEP_TOKENS, "Tokens computed", "worker", "kind"),
            counted(cat.CONTEXT_RANK_TOKENS, "Of these by context ranks", "worker", quiet=WITH_CONTEXT_RANKS),
            counted(cat.REPLAYED_STEPS, "Steps replayed", "worker", quiet="where steps are not recorded"),
            measured(cat.RUNNING, "Running", "sum", "worker"),
            measured(cat.WAITING, "Accepted, not started", "sum", "worker"),
            counted(cat.DRAFTED_TOKENS, "Draft tokens", "worker"),
            share("Draft tokens accepted", *right, "{{worker}}", quiet="while nothing is drafted"),
            counted(cat.PREEMPTIONS, "Preempted", "worker", quiet=UNTIL_PRESSED),
            counted(cat.SWAPS, "Of these swapped", "worker", quiet=UNTIL_PRESSED),
            counted(cat.PREFIX_HIT_TOKENS, "Prompt tokens not computed", "worker"),
            counted(cat.STREAMED_BYTES, "Weights read for steps", "worker", quiet=UNLESS_STREAMED),
            counted(cat.STREAMED_WAIT, "Waiting for weights", "worker", quiet=UNLESS_STREAMED),
        ),
    )


def _blocks() -> Row:
    return Row(
        "KV blocks and transfers",
        (
            measured(cat.FREE_BLOCKS, "Free blocks", "sum", "worker"),
            measured(cat.HELD_BLOCKS, "Held blocks", "sum", "worker"),
            measured(cat.BLOCK_BYTES, "Bytes of a block", "max", "worker"),
            measured(cat.QUARANTINED_BLOCKS, "Quarantined blocks", "sum", "worker"),
            measured(cat.LEASED, "Sequences under lease", "sum", "worker"),
            counted(cat.LEASES_EXPIRED, "Leases that ended unread", "worker", quiet=UNTIL_FAILED),
            counted(cat.TRANSFER_BYTES, "KV read from peers", "worker", "backend"),
            counted(cat.TRANSFER_READS, "Reads from peers", "worker", "outcome"),
            percentiles(cat.TRANSFER, "One read", "worker"),
        ),
    )


def _tiers() -> Row:
    used = Q.gauge(cat.STORE_BYTES, "sum", "tier"), Q.gauge(cat.STORE_LIMIT_BYTES, "sum", "tier")
    hits, misses = Q.rate(cat.STORE_HITS, WINDOW), Q.rate(cat.STORE_MISSES, WINDOW)
    return Row(
        "Tiers",
        (
            share("Filled", *used, "{{tier}}", description=cat.STORE_BYTES.help, quiet=WITH_STORE),
            measured(cat.STORE_BYTES, "Used", "sum", "tier", quiet=WITH_STORE),
            measured(cat.STORE_LIMIT_BYTES, "May be used", "sum", "tier", quiet=WITH_STORE),
            measured(cat.STORE_BLOCKS, "Blocks", "sum", "tier", quiet=WITH_STORE),
            measured(cat.STORE_PINNED, "Pinned", "sum", "tier", quiet=WITH_STORE),
            share("Found of what was asked for", hits, f"({hits} + {misses})", "found", quiet=WITH_STORE),
            counted(cat.STORE_HITS, "Found", "tier", quiet=WITH_STORE),
            counted(cat.STORE_MISSES, "Found nowhere", quiet=WITH_STORE),
            counted(cat.STORE_STORED, "Written", "tier", quiet=WITH_STORE),
            counted(cat.STORE_DROPPED, "Dropped", "tier", "reason", quiet=UNTIL_PRESSED),
            counted(cat.STORE_REFUSED, "Offered and not taken", "reason", quiet=UNTIL_PRESSED),
            counted(cat.STORE_LOADED, "Made ready for workers", "tier", quiet=WITH_STORE),
            counted(cat.STORE_LOADED_BYTES, "Bytes made ready", "tier", quiet=WITH_STORE),
            percentiles(cat.STORE_LOAD, "Load", quiet=WITH_STORE),
            counted(cat.STORE_LOADS_FAILED, "Loads that did not come whole", "reason", quiet=UNTIL_FAILED),
        ),
    )


def _paths() -> Row:
    return Row(
        "Paths and peers",
        (
            counted(cat.STORE_PATH_BYTES, "Bytes moved", "path", quiet=WITH_SSD),
            percentiles(cat.STORE_PATH, "One operation", "path", quiet=WITH_SSD),
            measured(cat.STORE_BANDWIDTH, "Speed while busy", "avg", "path", quiet=WITH_SSD),
            counted(cat.STORE_PEER_BYTES, "To and from peers", "kind", quiet=WITH_PEERS),
            measured(cat.STORE_SESSIONS, "Sessions", "sum", "kind", quiet=WITH_STORE),
            counted(cat.STORE_CORRUPT, "Checksums that did not hold", "tier", quiet=UNTIL_FAILED),
            counted(cat.STORE_IO_ERRORS, "Failed disk operations", "kind", quiet=UNTIL_FAILED),
        ),
    )


def _store_use() -> Row:
    return Row(
        "What workers make of it",
        (
            measured(cat.STORE_JOINED, "Has a session", "min", "worker"),
            counted(cat.OFFERED_BLOCKS, "Offered", "worker"),
            counted(cat.WRITTEN_BLOCKS, "Copied into the store", "worker"),
            counted(cat.SKIPPED_BLOCKS, "Not offered or not written", "worker"),
            counted(cat.LOADED_BLOCKS, "Used from the store", "worker", "tier", quiet=WITH_STORE),
            counted(cat.RECOMPUTED_BLOCKS, "Computed instead", "worker", "reason", quiet=WITH_STORE),
            counted(cat.LOADS_STARTED, "Loads asked for", "worker"),
            percentiles(cat.STORE_COPY, "One copy", "direction", quiet=WITH_STORE),
            counted(cat.STORE_COPIED_BLOCKS, "Copied", "worker", "direction", quiet=WITH_STORE),
        ),
    )


def _directory() -> Row:
    return Row(
        "Directory",
        (
            measured(cat.STORE_NODES, "Store nodes", "max", quiet="with the directory in Redis"),
            measured(cat.DIRECTORY_ENTRIES, "Listed blocks", "max", quiet="with the directory in Redis"),
            counted(cat.DIRECTORY_DROPPED, "Dropped for want of room", quiet=UNTIL_PRESSED),
        ),
    )


def _placement() -> Row:
    placed = "before enough sequences were placed by prediction"
    return Row(
        "Predictions",
        (
            measured(cat.PREDICTOR_ERROR, "Error", "max", "worker", "what", quiet=placed),
            measured(cat.PREDICTOR_BIAS, "Bias", "avg", "worker", "what", quiet=placed),
            measured(cat.PREDICTOR_HELD, "Within the 90 %", "min", "slo_class", "what", quiet=placed),
            measured(cat.PREDICTOR_EXCESS, "Error beyond what matters", "max", "model"),
            measured(cat.PREDICTOR_FALLBACK, "Not trusted", "max", "model"),
            measured(cat.PREDICTOR_CHANGES, "Changes of speed", "max", "worker"),
            measured(cat.STALE, "Hears nothing new", "max", "worker"),
            measured(cat.INDEXED_BLOCKS, "Indexed blocks", "max", "worker"),
            measured(cat.INDEX_BYTES, "Prefix index", "sum"),
        ),
    )


def _failures() -> Row:
    return Row(
        "Retries, breakers, hedges",
        (
            counted(cat.RETRIES, "Placed again", "cause", quiet=UNTIL_FAILED),
            counted(cat.REFUSED_RETRIES, "Not placed again"),
            counted(
                cat.MIGRATIONS, "Moved from draining workers", quiet="until a worker drains under streams"
            ),
            measured(cat.BREAKER_OPEN, "Breaker open", "max", "worker"),
            counted(cat.BREAKERS_OPENED, "Breakers opened"),
            counted(cat.HEDGES, "Second attempts", "what"),
            counted(cat.HEDGE_WASTE, "Computed twice, at most"),
            counted(cat.SLOW_CLIENTS, "Slow clients dropped", quiet="until a client reads too slowly"),
        ),
    )


def _experts() -> Row:
    by_expert = Q.rate(cat.EXPERT_TOKENS, WINDOW, "worker", "expert")
    over_mean = f"max by (worker) ({by_expert}) / avg by (worker) ({by_expert})"
    routed = Query(over_mean, "{{worker}}", WITH_EXPERTS)
    busiest = Query(f"topk({BUSIEST}, {by_expert})", "{{worker}} expert {{expert}}", WITH_EXPERTS)
    few = f"{WITH_EXPERTS}, or with few tokens lately"
    return Row(
        "Experts",
        (
            measured(cat.EXPERT_BALANCE, "Balance", "max", "worker", "layers", quiet=few),
            Panel("Busiest expert over the mean", "short", (routed,), cat.EXPERT_TOKENS.help),
            Panel(f"Busiest {BUSIEST} experts", "cps", (busiest,), cat.EXPERT_TOKENS.help),
        ),
    )


def _expert_groups() -> Row:
    quiet = WITH_EXPERT_RANKS
    return Row(
        "Groups of expert ranks",
        (
            measured(cat.EXPERT_RANKS, "Ranks by phase", "sum", "group", "phase", quiet=quiet),
            measured(cat.EXPERT_WANTED_RANKS, "Wanted ranks", "max", "group", quiet=quiet),
            measured(cat.EXPERT_REPLICAS_MIN, "Fewest replicas of an expert", "min", "group", quiet=quiet),
            measured(cat.MISSING_EXPERTS, "Experts without a replica", "max", "group", quiet=quiet),
            measured(cat.SINGLE_EXPERTS, "Experts with one replica", "max", "group", quiet=quiet),
            measured(cat.EXPERT_RANK_BALANCE, "Balance of ranks", "min", "group", "layers", quiet=quiet),
            counted(cat.EXPERT_MIGRATIONS, "Experts that migrate", "group", quiet=quiet),
            counted(cat.EXPERT_MIGRATED_BYTES, "Bytes that migrate", "group", quiet=quiet),
            counted(cat.EXPERT_REBALANCES, "Placements decided", "group", quiet=quiet),
            counted(cat.EXPERT_RANK_LOSSES, "Ranks lost", "group", quiet=quiet),
            measured(cat.EXPERT_EPOCH, "Epoch of the map", "max", "group", quiet=quiet),
            measured(cat.EXPERT_CALLERS, "Callers", "max", "group", quiet=quiet),
        ),
    )


def _expert_rows() -> Row:
    quiet = WITH_EXPERT_RANKS
    rerouted = Q.rate(cat.EXPERT_REROUTED_PAIRS, WINDOW, "worker")
    dispatched = Q.rate(cat.EXPERT_DISPATCHED_PAIRS, WINDOW, "worker")
    again = cat.EXPERT_REROUTED_PAIRS.help
    return Row(
        "Rows for expert ranks",
        (
            counted(cat.EXPERT_RANK_ROWS, "Rows computed", "group", "rank", quiet=quiet),
            counted(cat.EXPERT_RANK_BUSY, "Time spent computing", "group", "rank", quiet=quiet),
            counted(cat.EXPERT_DISPATCHED_ROWS, "Rows sent", "worker", quiet=quiet),
            counted(cat.EXPERT_DISPATCHED_PAIRS, "Results asked for", "worker", quiet=quiet),
            counted(cat.EXPERT_DISPATCHED_BYTES, "Bytes sent", "worker", quiet=quiet),
            counted(cat.EXPERT_COMBINED_BYTES, "Bytes that came back", "worker", quiet=quiet),
            percentiles(cat.EXPERT_WAIT, "Waiting for rows", "worker", quiet=quiet),
            share("Asked for again", rerouted, dispatched, "{{worker}}", description=again, quiet=quiet),
            counted(cat.EXPERT_SUSPECTED_RANKS, "Ranks suspected", "worker", quiet=quiet),
            measured(cat.PARKED, "Parked", "max", "worker"),
        ),
    )


DASHBOARDS = (
    Dashboard("baton-overview", "Baton: overview", (_goodput(), _latency(), _volume(), _pools())),
    Dashboard("baton-workers", "Baton: workers and KV", (_engine(), _blocks(), _experts())),
    Dashboard("baton-experts", "Baton: expert ranks", (_expert_groups(), _expert_rows())),
    Dashboard("baton-store", "Baton: KV store", (_tiers(), _paths(), _store_use(), _directory())),
    Dashboard("baton-placement", "Baton: placement", (_placement(), _failures())),
)
