"""Metrics of a worker."""

from baton.telemetry.metric import SHORT_BUCKETS, Metric

STEP = Metric(
    "baton_step_seconds", "histogram", "seconds", "Duration of an engine step.", ("worker",), SHORT_BUCKETS
)
STEP_TOKENS = Metric(
    "baton_step_tokens_total", "counter", "tokens", "Tokens computed, by kind of work.", ("worker", "kind")
)
CONTEXT_RANK_TOKENS = Metric(
    "baton_context_rank_tokens_total",
    "counter",
    "tokens",
    "Tokens computed by context ranks beside the leader.",
    ("worker",),
)
RANKS = Metric(
    "baton_worker_ranks",
    "gauge",
    "ranks",
    "Ranks of the worker: processes, each with a device or cores of its own.",
    ("worker",),
)
FREE_BLOCKS = Metric(
    "baton_kv_free_blocks",
    "gauge",
    "blocks",
    "Blocks without a reference, cached ones included.",
    ("worker",),
)
HELD_BLOCKS = Metric(
    "baton_kv_held_blocks", "gauge", "blocks", "Blocks held by sequences, leases or reads.", ("worker",)
)
BLOCK_BYTES = Metric("baton_kv_block_bytes", "gauge", "bytes", "Size of one block, all layers.", ("worker",))
QUARANTINED_BLOCKS = Metric(
    "baton_kv_quarantined_blocks",
    "gauge",
    "blocks",
    "Blocks that an abandoned read may still write into.",
    ("worker",),
)
LEASED = Metric(
    "baton_prefill_leased_sequences",
    "gauge",
    "sequences",
    "Sequences whose KV waits for its reader.",
    ("worker",),
)
RUNNING = Metric(
    "baton_running_sequences", "gauge", "sequences", "Sequences in the running batch.", ("worker",)
)
WAITING = Metric(
    "baton_waiting_sequences", "gauge", "sequences", "Sequences accepted and not started.", ("worker",)
)
REPLAYED_STEPS = Metric(
    "baton_replayed_steps_total",
    "counter",
    "steps",
    "Engine steps whose kernels were replayed from a recording.",
    ("worker",),
)
PREEMPTIONS = Metric(
    "baton_preemptions_total", "counter", "sequences", "Sequences preempted for want of blocks.", ("worker",)
)
SWAPS = Metric(
    "baton_swaps_total",
    "counter",
    "sequences",
    "Preempted sequences whose KV went to host memory.",
    ("worker",),
)
STREAMED_BYTES = Metric(
    "baton_streamed_weight_bytes_total",
    "counter",
    "bytes",
    "Weights of streamed layers (model.offload) that the worker's leading rank read.",
    ("worker",),
)
STREAMED_WAIT = Metric(
    "baton_streamed_weight_wait_seconds_total",
    "counter",
    "seconds",
    "Time for which steps waited for weights of streamed layers to be read.",
    ("worker",),
)
DRAFTED_TOKENS = Metric(
    "baton_drafted_tokens_total", "counter", "tokens", "Draft tokens verified by speculation.", ("worker",)
)
ACCEPTED_TOKENS = Metric(
    "baton_accepted_tokens_total", "counter", "tokens", "Draft tokens accepted.", ("worker",)
)
PREFIX_HIT_TOKENS = Metric(
    "baton_prefix_hit_tokens_total",
    "counter",
    "tokens",
    "Prompt tokens that the prefix cache spared.",
    ("worker",),
)
LEASES_EXPIRED = Metric(
    "baton_leases_expired_total", "counter", "sequences", "Leases that expired unread.", ("worker",)
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
    "baton_transfer_seconds",
    "histogram",
    "seconds",
    "Duration of one read from a peer.",
    ("worker",),
    SHORT_BUCKETS,
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

# --- worker: expert ranks ---------------------------------------------------------------------------

EXPERT_DISPATCHED_ROWS = Metric(
    "baton_expert_dispatched_rows_total",
    "counter",
    "rows",
    "Rows that the worker's leading rank sent to expert ranks, each counted once for every rank it goes to.",
    ("worker",),
)
EXPERT_DISPATCHED_PAIRS = Metric(
    "baton_expert_dispatched_pairs_total",
    "counter",
    "pairs",
    "Results that the worker's leading rank asked expert ranks for: a row and one of its experts.",
    ("worker",),
)
EXPERT_DISPATCHED_BYTES = Metric(
    "baton_expert_dispatched_bytes_total",
    "counter",
    "bytes",
    "Bytes of these rows.",
    ("worker",),
)
EXPERT_COMBINED_BYTES = Metric(
    "baton_expert_combined_bytes_total",
    "counter",
    "bytes",
    "Bytes of results that expert ranks sent back to the worker's leading rank.",
    ("worker",),
)
EXPERT_REROUTED_PAIRS = Metric(
    "baton_expert_rerouted_pairs_total",
    "counter",
    "pairs",
    "Results that were asked of another replica, since the first rank failed.",
    ("worker",),
)
EXPERT_WAIT = Metric(
    "baton_expert_wait_seconds",
    "histogram",
    "seconds",
    "Time of a step for which the worker's leading rank waited for expert ranks and did nothing else.",
    ("worker",),
    SHORT_BUCKETS,
)
EXPERT_SUSPECTED_RANKS = Metric(
    "baton_expert_suspected_ranks_total",
    "counter",
    "ranks",
    "Expert ranks that did not answer the worker in time, and got no more rows from it.",
    ("worker",),
)

PARKED = Metric(
    "baton_parked_workers",
    "gauge",
    "workers",
    "1 while the worker is parked: no expert rank has what its rows need, and it takes nothing new.",
    ("worker",),
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
    "baton_store_offered_blocks_total", "counter", "blocks", "Full blocks offered to the store.", ("worker",)
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
