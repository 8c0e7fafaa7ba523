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
