"""Every metric Baton exports. Code, documentation, dashboards and alerts derive from this list."""

from baton.telemetry.metric import SHORT_BUCKETS, Metric

# --- router -----------------------------------------------------------------------------------------

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
    "baton_ttft_seconds", "histogram", "seconds", "Request accepted to first token sent.", ("model",)
)
TPOT = Metric(
    "baton_tpot_seconds",
    "histogram",
    "seconds",
    "Mean time per output token of a sequence, the first excluded.",
    ("model",),
    SHORT_BUCKETS,
)
TTFT_PART = Metric(
    "baton_ttft_part_seconds",
    "histogram",
    "seconds",
    "Where the time to first token went: route, tokenize, queue, retries, wait, load, prefill, first_hop; "
    "and after it transfer and first_decode.",
    ("model", "part"),
    SHORT_BUCKETS,
)
E2E = Metric("baton_e2e_seconds", "histogram", "seconds", "Request accepted to last token sent.", ("model",))
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
QUEUED = Metric("baton_router_queued_sequences", "gauge", "sequences", "Waiting for a place.", ("model",))
IN_FLIGHT = Metric(
    "baton_router_in_flight_sequences", "gauge", "sequences", "Placed on a worker.", ("worker",)
)
PLACEMENTS = Metric(
    "baton_router_placements_total",
    "counter",
    "sequences",
    "Placements by kind: split (prefill and decode apart), whole, fallback (a pool was empty).",
    ("model", "kind"),
)
RETRIES = Metric(
    "baton_router_retries_total",
    "counter",
    "sequences",
    "Sequences placed again, by cause.",
    ("model", "cause"),
)
REFUSED_RETRIES = Metric(
    "baton_router_refused_retries_total",
    "counter",
    "sequences",
    "Failed, and not placed again since too many attempts failed lately.",
    ("model",),
)
HEDGES = Metric(
    "baton_router_hedges_total",
    "counter",
    "sequences",
    "Second attempts at sequences without a first token: started, and won.",
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
    "Smoothed error of all predictions beyond what matters; compared with router.predictor_error_max.",
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
    "Last grant arrived at the decode worker to sequence in its batch.",
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

# --- worker -----------------------------------------------------------------------------------------

STEP = Metric("baton_step_seconds", "histogram", "seconds", "One engine step.", ("worker",), SHORT_BUCKETS)
STEP_TOKENS = Metric(
    "baton_step_tokens_total", "counter", "tokens", "Tokens computed, by kind of work.", ("worker", "kind")
)
FREE_BLOCKS = Metric(
    "baton_kv_free_blocks", "gauge", "blocks", "Blocks nobody holds (cached ones included).", ("worker",)
)
HELD_BLOCKS = Metric(
    "baton_kv_held_blocks", "gauge", "blocks", "Blocks held by sequences, leases or reads.", ("worker",)
)
BLOCK_BYTES = Metric("baton_kv_block_bytes", "gauge", "bytes", "Size of one block, all layers.", ("worker",))
QUARANTINED_BLOCKS = Metric(
    "baton_kv_quarantined_blocks", "gauge", "blocks", "Blocks an abandoned read may write.", ("worker",)
)
LEASED = Metric(
    "baton_prefill_leased_sequences", "gauge", "sequences", "KV waiting to be taken.", ("worker",)
)
RUNNING = Metric("baton_running_sequences", "gauge", "sequences", "In the running batch.", ("worker",))
WAITING = Metric("baton_waiting_sequences", "gauge", "sequences", "Accepted, not started.", ("worker",))
PREEMPTIONS = Metric(
    "baton_preemptions_total", "counter", "sequences", "Sequences put back for want of blocks.", ("worker",)
)
SWAPS = Metric(
    "baton_swaps_total",
    "counter",
    "sequences",
    "Of the preempted ones, those whose KV went to host memory.",
    ("worker",),
)
DRAFTED_TOKENS = Metric(
    "baton_drafted_tokens_total", "counter", "tokens", "Guesses verified (speculation).", ("worker",)
)
RIGHT_GUESSES = Metric(
    "baton_accepted_tokens_total", "counter", "tokens", "Guesses that were right.", ("worker",)
)
PREFIX_HIT_TOKENS = Metric(
    "baton_prefix_hit_tokens_total", "counter", "tokens", "Prompt tokens not computed.", ("worker",)
)
LEASES_EXPIRED = Metric(
    "baton_leases_expired_total", "counter", "sequences", "Leases that ended unread.", ("worker",)
)
TRANSFER_BYTES = Metric(
    "baton_transfer_bytes_total", "counter", "bytes", "KV bytes read from peers.", ("worker", "backend")
)
TRANSFER_READS = Metric(
    "baton_transfer_reads_total",
    "counter",
    "events",
    "Reads from peers by outcome: ok, failed, stale, corrupt (bytes differ from their checksum).",
    ("worker", "outcome"),
)
TRANSFER = Metric(
    "baton_transfer_seconds", "histogram", "seconds", "One read from a peer.", ("worker",), SHORT_BUCKETS
)
EXPERT_TOKENS = Metric(
    "baton_moe_expert_tokens_total",
    "counter",
    "tokens",
    "Tokens computed by each expert of a mixture, summed over layers: a token counts in every layer once for "
    "each expert that it is sent to. Experts that all tokens pass are none of these.",
    ("worker", "expert"),
)
EXPERT_BALANCE = Metric(
    "baton_moe_expert_balance_ratio",
    "gauge",
    "ratio",
    "Tokens per expert of a layer, the mean over the most, lately: 1 is even, 1/E is all to one of E; "
    "layers: mean (over layers), worst (of the layer with the least). Not said of few tokens.",
    ("worker", "layers"),
)

# --- worker: the store ------------------------------------------------------------------------------

STORE_JOINED = Metric(
    "baton_store_joined_ratio",
    "gauge",
    "ratio",
    "1 while the worker has a session with a store.",
    ("worker",),
)
OFFERED_BLOCKS = Metric(
    "baton_store_offered_blocks_total", "counter", "blocks", "Full blocks offered.", ("worker",)
)
WRITTEN_BLOCKS = Metric(
    "baton_store_written_blocks_total", "counter", "blocks", "Blocks copied into the store.", ("worker",)
)
SKIPPED_BLOCKS = Metric(
    "baton_store_skipped_blocks_total",
    "counter",
    "blocks",
    "Full blocks that were not offered or not written: too many at once, or reused before their turn.",
    ("worker",),
)
LOADED_BLOCKS = Metric(
    "baton_store_used_blocks_total",
    "counter",
    "blocks",
    "Blocks of prompts that came from the store, by where it had them: host, ssd, peer.",
    ("worker", "tier"),
)
RECOMPUTED_BLOCKS = Metric(
    "baton_store_recomputed_blocks_total",
    "counter",
    "blocks",
    "Blocks of prompts that were computed: absent, faster (to compute), late, failed, corrupt.",
    ("worker", "reason"),
)
LOADS_STARTED = Metric(
    "baton_store_started_loads_total", "counter", "events", "Loads that sequences asked for.", ("worker",)
)
STORE_COPY = Metric(
    "baton_store_copy_seconds",
    "histogram",
    "seconds",
    "One copy of some blocks between KV pool and store, by direction: in (to the store), out.",
    ("worker", "direction"),
    SHORT_BUCKETS,
)
STORE_COPIED_BLOCKS = Metric(
    "baton_store_copied_blocks_total",
    "counter",
    "blocks",
    "Blocks copied between KV pool and store, by direction.",
    ("worker", "direction"),
)

# --- control plane ----------------------------------------------------------------------------------

REPLICAS = Metric(
    "baton_replica_workers", "gauge", "workers", "Replicas by role and state.", ("model", "role", "state")
)
AUTOSCALE_LOOKS = Metric(
    "baton_autoscale_looks_total",
    "counter",
    "events",
    "Intervals at whose end the autoscaler decided (also that nothing changes), or was blind: a router was "
    "silent.",
    ("model", "outcome"),
)
AUTOSCALE_DECISIONS = Metric(
    "baton_autoscale_decisions_total",
    "counter",
    "events",
    "Changes that the autoscaler ordered, advised (autoscale.mode=advise), or was refused.",
    ("model", "kind"),
)
AUTOSCALE_NEEDED = Metric(
    "baton_autoscale_needed_workers",
    "gauge",
    "workers",
    "Workers that the forecast takes, by role.",
    ("model", "role"),
)
AUTOSCALE_WANTED = Metric(
    "baton_autoscale_wanted_workers",
    "gauge",
    "workers",
    "The same with hysteresis, bounds and budgets applied.",
    ("model", "role"),
)
AUTOSCALE_CORRECTION = Metric(
    "baton_autoscale_correction_ratio",
    "gauge",
    "ratio",
    "Factor on the forecast, learnt from objectives that were missed.",
    ("model", "role"),
)
RESTARTS = Metric(
    "baton_replica_restarts_total", "counter", "events", "Replicas started anew.", ("replica", "cause")
)
STORE_NODES = Metric("baton_directory_nodes", "gauge", "nodes", "Store nodes whose lease runs.")
DIRECTORY_ENTRIES = Metric(
    "baton_directory_listed_blocks",
    "gauge",
    "blocks",
    "Blocks that the control plane's directory lists, once per node that has them.",
)
DIRECTORY_DROPPED = Metric(
    "baton_directory_dropped_blocks_total",
    "counter",
    "blocks",
    "Entries that the control plane's directory dropped for want of room.",
)

# --- store node -------------------------------------------------------------------------------------

STORE_BLOCKS = Metric("baton_store_blocks", "gauge", "blocks", "Blocks that can be found.", ("tier",))
STORE_BYTES = Metric("baton_store_used_bytes", "gauge", "bytes", "Taken of a tier.", ("tier",))
STORE_LIMIT_BYTES = Metric(
    "baton_store_limit_bytes", "gauge", "bytes", "What a tier may take, by configuration.", ("tier",)
)
STORE_PINNED = Metric(
    "baton_store_pinned_blocks", "gauge", "blocks", "Held for loads and writes under way.", ("tier",)
)
STORE_HITS = Metric(
    "baton_store_hit_blocks_total",
    "counter",
    "blocks",
    "Blocks asked for and found, by where: host, ssd, peer.",
    ("tier",),
)
STORE_MISSES = Metric(
    "baton_store_miss_blocks_total", "counter", "blocks", "Blocks asked for and found nowhere."
)
STORE_STORED = Metric("baton_store_stored_blocks_total", "counter", "blocks", "Blocks written.", ("tier",))
STORE_DROPPED = Metric(
    "baton_store_dropped_blocks_total",
    "counter",
    "blocks",
    "Blocks that left a tier: evicted, expired, quota, corrupt, io_error, cleared, replaced.",
    ("tier", "reason"),
)
STORE_REFUSED = Metric(
    "baton_store_refused_blocks_total",
    "counter",
    "blocks",
    "Blocks offered by workers and not taken, by reason; known ones are here already.",
    ("reason",),
)
STORE_LOADED = Metric(
    "baton_store_loaded_blocks_total",
    "counter",
    "blocks",
    "Blocks made ready for workers, by where they came from.",
    ("tier",),
)
STORE_LOADED_BYTES = Metric(
    "baton_store_loaded_bytes_total",
    "counter",
    "bytes",
    "Bytes made ready for workers, by where they came from.",
    ("tier",),
)
STORE_LOAD = Metric(
    "baton_store_load_seconds",
    "histogram",
    "seconds",
    "From a worker's asking for blocks to the last of them being ready.",
    (),
    SHORT_BUCKETS,
)
STORE_LOADS_FAILED = Metric(
    "baton_store_failed_loads_total", "counter", "events", "Loads that did not come whole.", ("reason",)
)
STORE_PATH_BYTES = Metric(
    "baton_store_path_bytes_total",
    "counter",
    "bytes",
    "Bytes moved by path: ssd_read, ssd_write, peer_read.",
    ("path",),
)
STORE_PATH = Metric(
    "baton_store_path_seconds", "histogram", "seconds", "One operation on a path.", ("path",), SHORT_BUCKETS
)
STORE_BANDWIDTH = Metric(
    "baton_store_path_bandwidth_bytes",
    "gauge",
    "bytes",
    "Bytes per second of a path while it is busy, smoothed.",
    ("path",),
)
STORE_CORRUPT = Metric(
    "baton_store_corrupt_blocks_total",
    "counter",
    "blocks",
    "Blocks whose checksum did not hold, by the tier of the copy.",
    ("tier",),
)
STORE_IO_ERRORS = Metric(
    "baton_store_ssd_errors_total", "counter", "events", "Failed operations: read, write, full.", ("kind",)
)
STORE_PEER_BYTES = Metric(
    "baton_store_peer_bytes_total",
    "counter",
    "bytes",
    "Fetched from peers, kept of these as copies, and served to peers.",
    ("kind",),
)
STORE_SESSIONS = Metric(
    "baton_store_open_sessions", "gauge", "sessions", "Sessions with workers and peers.", ("kind",)
)

CATALOGUE: tuple[Metric, ...] = tuple(v for v in list(globals().values()) if isinstance(v, Metric))
