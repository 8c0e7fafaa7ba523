"""Metrics of the control plane."""

from baton.telemetry.metric import Metric

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
    "Workers that the forecast needs, by role.",
    ("model", "role"),
)
AUTOSCALE_WANTED = Metric(
    "baton_autoscale_wanted_workers",
    "gauge",
    "workers",
    "Workers that the forecast needs, after hysteresis, bounds and budgets.",
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
    "baton_replica_restarts_total", "counter", "events", "Replicas restarted.", ("replica", "cause")
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

# --- control plane: expert ranks --------------------------------------------------------------------

EXPERT_RANKS = Metric(
    "baton_expert_ranks",
    "gauge",
    "ranks",
    "Expert ranks of a group by phase: starting, ready, draining, lost.",
    ("group", "phase"),
)
EXPERT_WANTED_RANKS = Metric(
    "baton_expert_wanted_ranks", "gauge", "ranks", "Expert ranks that a group should have.", ("group",)
)
EXPERT_REPLICAS_MIN = Metric(
    "baton_expert_min_replicas",
    "gauge",
    "replicas",
    "Ranks that hold the expert which fewest hold; 0: rows for some expert wait.",
    ("group",),
)
MISSING_EXPERTS = Metric(
    "baton_expert_missing_experts",
    "gauge",
    "experts",
    "Experts of all layers that no rank holds.",
    ("group",),
)
SINGLE_EXPERTS = Metric(
    "baton_expert_single_experts",
    "gauge",
    "experts",
    "Experts of all layers that one rank holds alone: its loss stops their rows until they are loaded again.",
    ("group",),
)
EXPERT_RANK_BALANCE = Metric(
    "baton_expert_rank_balance_ratio",
    "gauge",
    "ratio",
    "The mean load of a group's ranks over the busiest rank's: 1 is even, 1/R is all on one of R; layers: "
    "mean (over layers), worst (of the layer with the least).",
    ("group", "layers"),
)
EXPERT_EPOCH = Metric(
    "baton_expert_map_epoch", "gauge", "epoch", "Epoch of the map of a group's experts.", ("group",)
)
EXPERT_CALLERS = Metric(
    "baton_expert_caller_sessions",
    "gauge",
    "sessions",
    "Processes of workers that follow the map of a group's experts.",
    ("group",),
)
EXPERT_MIGRATIONS = Metric(
    "baton_expert_migrations_total",
    "counter",
    "events",
    "Experts that ranks loaded beyond the first placement of their group.",
    ("group",),
)
EXPERT_MIGRATED_BYTES = Metric(
    "baton_expert_migrated_bytes_total", "counter", "bytes", "Bytes of these experts.", ("group",)
)
EXPERT_RANK_LOSSES = Metric(
    "baton_expert_rank_losses_total",
    "counter",
    "events",
    "Expert ranks that ended, or did not answer, without an order.",
    ("group",),
)
EXPERT_REBALANCES = Metric(
    "baton_expert_rebalances_total",
    "counter",
    "events",
    "Placements of experts that were decided.",
    ("group",),
)
EXPERT_RANK_ROWS = Metric(
    "baton_expert_rank_rows_total",
    "counter",
    "rows",
    "Rows that an expert rank computed, as it reports them; a row that goes to two experts counts twice.",
    ("group", "rank"),
)
EXPERT_RANK_BUSY = Metric(
    "baton_expert_rank_busy_seconds_total",
    "counter",
    "seconds",
    "Time that an expert rank spent computing.",
    ("group", "rank"),
)
