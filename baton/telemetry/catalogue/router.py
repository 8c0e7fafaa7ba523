"""Metrics of the router."""

from baton.telemetry.metric import SHORT_BUCKETS, Metric

REQUESTS = Metric(
    "baton_requests_total",
    "counter",
    "requests",
    "Requests by how they ended: completed, refused (429/503), failed, cancelled, invalid (4xx).",
    ("model", "outcome"),
)
SLO_REQUESTS = Metric(
    "baton_slo_requests_total",
    "counter",
    "requests",
    "Offered requests by how they ended: met, missed_ttft, missed_tpot, missed_both, refused_queue, "
    "refused_slo, refused_capacity, refused_quota, deadline, failed, cancelled. Goodput: met over all others "
    "but cancelled.",
    ("model", "slo_class", "tenant", "outcome"),
)
TTFT = Metric(
    "baton_ttft_seconds",
    "histogram",
    "seconds",
    "Time from accepting a request to sending its first token.",
    ("model",),
)
TPOT = Metric(
    "baton_tpot_seconds",
    "histogram",
    "seconds",
    "Mean time per output token of a sequence after the first.",
    ("model",),
    SHORT_BUCKETS,
)
TTFT_PART = Metric(
    "baton_ttft_part_seconds",
    "histogram",
    "seconds",
    "Parts of the time to first token: route, tokenize, queue, retries, wait, load, prefill, first_hop; "
    "and after it transfer and first_decode.",
    ("model", "part"),
    SHORT_BUCKETS,
)
E2E = Metric(
    "baton_e2e_seconds",
    "histogram",
    "seconds",
    "Time from accepting a request to sending its last token.",
    ("model",),
)
PROMPT_TOKENS = Metric(
    "baton_prompt_tokens_total", "counter", "tokens", "Prompt tokens of accepted requests.", ("model",)
)
CACHED_TOKENS = Metric(
    "baton_cached_prompt_tokens_total",
    "counter",
    "tokens",
    "Prompt tokens found in a prefix cache.",
    ("model",),
)
GENERATED_TOKENS = Metric(
    "baton_generated_tokens_total", "counter", "tokens", "Tokens sent to clients.", ("model",)
)
QUEUED = Metric(
    "baton_router_queued_sequences", "gauge", "sequences", "Sequences that wait for a place.", ("model",)
)
IN_FLIGHT = Metric(
    "baton_router_in_flight_sequences", "gauge", "sequences", "Sequences placed on a worker.", ("worker",)
)
PLACEMENTS = Metric(
    "baton_router_placements_total",
    "counter",
    "sequences",
    "Placements by kind: split (prefill and decode apart), aggregated, fallback (a pool was empty).",
    ("model", "kind"),
)
RETRIES = Metric(
    "baton_router_retries_total",
    "counter",
    "sequences",
    "Sequences placed again, by cause; drained: their worker ended before they did, as the cluster wanted.",
    ("model", "cause"),
)
MIGRATIONS = Metric(
    "baton_router_migrations_total",
    "counter",
    "sequences",
    "Streams that moved from a draining worker to another one. They are no retries.",
    ("model",),
)
REFUSED_RETRIES = Metric(
    "baton_router_refused_retries_total",
    "counter",
    "sequences",
    "Sequences that failed and were not placed again, since too many attempts failed lately.",
    ("model",),
)
HEDGES = Metric(
    "baton_router_hedges_total",
    "counter",
    "sequences",
    "Backup attempts at sequences without a first token: started, and won.",
    ("model", "what"),
)
HEDGE_WASTE = Metric(
    "baton_router_hedge_wasted_tokens_total",
    "counter",
    "tokens",
    "Prompt tokens that the slower of two attempts was to compute, at most.",
    ("model",),
)
BREAKER_OPEN = Metric(
    "baton_router_breaker_open_ratio",
    "gauge",
    "ratio",
    "1 while a worker gets no new sequences since it keeps failing, 0.5 while it is tried again, else 0.",
    ("worker",),
)
BREAKERS_OPENED = Metric(
    "baton_router_breaker_openings_total",
    "counter",
    "events",
    "Times that a worker's circuit breaker opened.",
    ("model",),
)
STALE = Metric(
    "baton_router_stale_ratio",
    "gauge",
    "ratio",
    "1 while a worker that is known has not reported for router.worker_silence_s, or its cached blocks are "
    "not known, else 0.",
    ("worker",),
)
KNOWN_WORKERS = Metric(
    "baton_router_known_workers", "gauge", "workers", "Workers with an open session.", ("model", "role")
)
PEERS = Metric(
    "baton_router_peer_routers", "gauge", "routers", "Other routers whose work counts in placements."
)
INDEX_BYTES = Metric("baton_router_index_bytes", "gauge", "bytes", "Memory of the prefix index.", ("model",))
INDEXED_BLOCKS = Metric(
    "baton_router_indexed_blocks", "gauge", "blocks", "Blocks in the prefix index.", ("worker",)
)
DEGRADED = Metric(
    "baton_router_degraded_ratio",
    "gauge",
    "ratio",
    "1 while a pool is empty, else 0; 0 while all workers sleep.",
    ("model", "pool"),
)
PREDICTOR_ERROR = Metric(
    "baton_predictor_error_ratio",
    "gauge",
    "ratio",
    "Mean of |predicted - actual| / actual of the latest 100 sequences placed there; what: ttft, tpot.",
    ("worker", "what"),
)
PREDICTOR_BIAS = Metric(
    "baton_predictor_bias_ratio",
    "gauge",
    "ratio",
    "Mean of (predicted - actual) / actual, as above: above 0, too much was predicted.",
    ("worker", "what"),
)
PREDICTOR_HELD = Metric(
    "baton_predictor_held_ratio",
    "gauge",
    "ratio",
    "Share of the latest sequences of a service class within what was predicted with 90 %; what: ttft, tpot.",
    ("model", "slo_class", "what"),
)
PREDICTOR_CHANGES = Metric(
    "baton_predictor_changes_events",
    "gauge",
    "events",
    "Times that a worker was seen to have become faster or slower, in the life of its session.",
    ("worker",),
)
PREDICTOR_EXCESS = Metric(
    "baton_predictor_excess_ratio",
    "gauge",
    "ratio",
    "Smoothed error of predicted TTFT beyond what matters, where predictions say no more than a constant; "
    "compared with router.predictor_error_max.",
    ("model",),
)
PREDICTOR_FALLBACK = Metric(
    "baton_predictor_fallback_ratio",
    "gauge",
    "ratio",
    "1 while predictions are too far off and placement is by cached prefix, else 0.",
    ("model",),
)
HANDOVER = Metric(
    "baton_handover_seconds",
    "histogram",
    "seconds",
    "Time from the last KV grant at the decode worker to the sequence in its batch.",
    ("model",),
    SHORT_BUCKETS,
)
SLOW_CLIENTS = Metric(
    "baton_router_dropped_slow_requests_total",
    "counter",
    "requests",
    "Requests whose client read too slowly.",
    ("model",),
)
