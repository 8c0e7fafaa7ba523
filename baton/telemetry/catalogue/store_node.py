"""Metrics of a store node."""

from baton.telemetry.metric import SHORT_BUCKETS, Metric

STORE_BLOCKS = Metric("baton_store_blocks", "gauge", "blocks", "Blocks that look-ups find.", ("tier",))
STORE_BYTES = Metric("baton_store_used_bytes", "gauge", "bytes", "Bytes used of a tier.", ("tier",))
STORE_LIMIT_BYTES = Metric(
    "baton_store_limit_bytes", "gauge", "bytes", "Configured size of a tier.", ("tier",)
)
STORE_PINNED = Metric(
    "baton_store_pinned_blocks",
    "gauge",
    "blocks",
    "Blocks pinned by loads and writes in progress.",
    ("tier",),
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
    "Time from a worker's request for blocks to the last of them being ready.",
    (),
    SHORT_BUCKETS,
)
STORE_LOADS_FAILED = Metric(
    "baton_store_failed_loads_total",
    "counter",
    "events",
    "Loads that failed in part or in whole.",
    ("reason",),
)
STORE_PATH_BYTES = Metric(
    "baton_store_path_bytes_total",
    "counter",
    "bytes",
    "Bytes moved by path: ssd_read, ssd_write, peer_read.",
    ("path",),
)
STORE_PATH = Metric(
    "baton_store_path_seconds",
    "histogram",
    "seconds",
    "Duration of one operation on a path.",
    ("path",),
    SHORT_BUCKETS,
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
    "Bytes fetched from peers, kept as copies of those, and served to peers.",
    ("kind",),
)
STORE_SESSIONS = Metric(
    "baton_store_open_sessions", "gauge", "sessions", "Sessions with workers and peers.", ("kind",)
)
