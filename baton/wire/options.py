"""gRPC channel and server options, the same on both ends."""

KEEPALIVE_S = 2.0
KEEPALIVE_TIMEOUT_S = 3.0
RECONNECT_FIRST_S, RECONNECT_MAX_S = 0.1, 1.0
CONNECT_MAX_S = 3.0
"""The longest attempt at a host that does not answer at all."""
MESSAGE_BYTES_MAX = 64 * 2**20

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A peer that vanished without a word (host down, process frozen) ends the stream within
    # KEEPALIVE_S + KEEPALIVE_TIMEOUT_S.
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Cluster traffic never goes through a proxy of the environment.
    ("grpc.enable_http_proxy", 0),
    # Retries are decided above (placement), and a restarted peer must not inherit a backoff.
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's own wait before it dials again would grow to two minutes while a peer is away; a directory that
    # is back must be heard within seconds.
    ("grpc.initial_reconnect_backoff_ms", int(RECONNECT_FIRST_S * 1000)),
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_MAX_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(RECONNECT_MAX_S * 1000)),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *CHANNEL_OPTIONS[:6],
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # Two processes must never share a port by accident.
    ("grpc.so_reuseport", 0),
]
